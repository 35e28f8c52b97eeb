#!/usr/bin/env bash
# llguidance 1.9.1 brings a converter of GBNF (`llguidance.gbnf_to_lark`), whose result it cannot always read itself.
# Guess: what is valid GBNF is converted to a grammar of the same language, or refused by the converter.
# Behaviour: "\u00e9" becomes "\ue9", without the zeros that the own reader asks for, which refuses it; rules of characters become
# terminals, of which the lexer takes the longest, so that [0-9]+ followed by [0-9] matches no number; `.` lacks the newline.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark


class Bytes:
    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    tokens = [bytes([byte]) for byte in range(256)] + [b""]

    def __call__(self, text):
        return text.encode() if isinstance(text, str) else text


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


def takes(gbnf, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(any_to_lark(gbnf)), log_level=0)
    if matcher.is_error():
        return "lexer error" if "lexer error" in matcher.get_error() else matcher.get_error()
    return matcher.validate_tokens(list(text.encode())) == len(text.encode()) and (
        all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()
    )


seen = {
    "a letter as such": takes('root ::= "é"', "é"),
    "the same letter escaped": takes(r'root ::= "\u00e9"', "é"),
    "digits, then a digit": takes("root ::= a b\na ::= [0-9]+\nb ::= [0-9]", "123"),
    "any character, a newline": takes("root ::= .", "\n"),
}
print(any_to_lark(r'root ::= "\u00e9"').split()[-1])
for name, value in seen.items():
    print(f"{name}: {value}")
assert seen == {
    "a letter as such": True,
    "the same letter escaped": "lexer error",
    "digits, then a digit": False,
    "any character, a newline": False,
}, "the behaviour has changed"
PY
