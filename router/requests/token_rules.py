"""Rules for a request's tokens: vLLM's `allowed_token_ids`, `bad_words` and `min_tokens`, and a thinking budget."""

from __future__ import annotations

from ...workers.wire.messages import GangInfo
from ...workers.wire.token_rules import ThinkingBudget, TokenRules, Word
from ..openai_api.errors import invalid_value
from ..openai_api.request_schema import GenerationFields
from ..text.text import TextService
from .model_limits import check_token_ids

MAX_WORD_TOKENS = 64  # of a bad word


async def token_rules(
    request: GenerationFields,
    text: TextService,
    gang: GangInfo,
    *,
    has_form: bool,
    thinking: ThinkingBudget | None = None,
) -> TokenRules | None:
    """None: all tokens are allowed. Raises a 400 for ids outside of the vocabulary, and for rules that allow no token.

    `has_form`: a grammar limits the tokens too, and the answer may end where the grammar does.
    """
    allowed, words = request.allowed_token_ids, request.bad_words or []
    min_tokens = request.min_tokens or 0
    if allowed is None and not words and not min_tokens:
        return None if thinking is None else TokenRules(thinking=thinking)
    if allowed is not None:
        check_token_ids(allowed, gang.vocab_size, "allowed_token_ids")
    late = {*(request.stop_token_ids or ()), *(() if request.ignore_eos else gang.eos_token_ids)} if min_tokens else ()
    ends = gang.eos_token_ids if has_form and allowed is not None else ()
    rules = TokenRules(
        allowed_token_ids=(*dict.fromkeys([*(allowed or ()), *ends]),),
        bad_words=await _tokenized(words, text),
        min_tokens=min_tokens,
        late_token_ids=(*sorted(late),),
        thinking=thinking,
    )
    banned = {*late, *(word[-1] for word in rules.bad_words)}
    if banned.issuperset(range(gang.vocab_size) if allowed is None else allowed):
        field = "bad_words" if words else "min_tokens"
        raise invalid_value(field, "with the other fields it may exclude all tokens.")
    return rules


async def _tokenized(words: list[str], text: TextService) -> tuple[Word, ...]:
    """Tokens of each word at the start of a text, and after a space if these are as many and begin differently.

    That is vLLM's rule.
    """
    if not words:
        return ()
    bare = [word.lstrip() for word in words]
    if any(not word for word in bare):
        raise invalid_value(f"bad_words[{bare.index('')}]", "it is empty.")
    spaced = [f" {word}" for word in bare]
    found = await text.encode_all([*bare, *spaced], add_special_tokens=False)
    tokenized: dict[Word, None] = {}
    for position, (plain, behind) in enumerate(zip(found, found[len(bare) :], strict=False)):
        if len(plain) > MAX_WORD_TOKENS:
            message = f"it has {len(plain)} tokens: at most {MAX_WORD_TOKENS} are accepted."
            raise invalid_value(f"bad_words[{position}]", message)
        if not plain:
            raise invalid_value(f"bad_words[{position}]", "it has no tokens.")
        tokenized[(*plain,)] = None
        if len(behind) == len(plain) and behind[0] != plain[0]:
            tokenized[(*behind,)] = None
    return (*tokenized,)
