#!/usr/bin/env bash
# llguidance 1.9.1 reads the numbers of a JSON schema as doubles, and says so of none of them.
# Guess: a constrained decoder keeps 64-bit integers exact, or refuses them.
# Behaviour: `const` and `enum` of 1234567890123456789 leave ...768 as the only answer; an integer with the minimum 2^60 is
# not compiled; any bound on a `number` forbids the spelling 1e2 of a value that is within it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import json

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    tokens = [bytes([byte]) for byte in range(256)] + [b""]

    def __call__(self, text):
        return text.encode() if isinstance(text, str) else text


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


def matcher(schema):
    return LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)


def takes(schema, text):
    return matcher(schema).validate_tokens(list(text.encode())) == len(text)


large = 1234567890123456789
seen = {
    "const": matcher({"const": large}).compute_ff_bytes(),
    "enum": matcher({"enum": [large]}).compute_ff_bytes(),
    "minimum 2^60": matcher({"type": "integer", "minimum": 2**60}).get_error().partition(":")[0],
    "1e2": takes({"type": "number"}, "1e2"),
    "1e2 with a minimum": takes({"type": "number", "minimum": 0}, "1e2"),
}
for name, value in seen.items():
    print(f"{name}: {value}")
assert seen == {
    "const": b"1234567890123456768",
    "enum": b"1234567890123456768",
    "minimum 2^60": "Failed to generate regex for integer range",
    "1e2": True,
    "1e2 with a minimum": False,
}, "the behaviour has changed"
PY
