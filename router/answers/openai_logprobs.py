"""Log probabilities of tokens, in OpenAI's two formats for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..generation.choice import ShownToken
from ..openai_api.answer_schema import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from ..text.token_bytes import readable

LEAST_LOGPROB: Final = -9999.0  # in place of minus infinity, which JSON does not have

BytesOfToken = Callable[[int], bytes]


def named_by_id(token_id: int) -> bytes:
    """Names a token by its id, as vLLM does, for clients that ask for that."""
    return b"token_id:%d" % token_id


def completion_logprobs(tokens: Sequence[ShownToken], bytes_of: BytesOfToken) -> CompletionLogprobs:
    """Lists with one entry for each token. `top_logprobs` has the chosen token, even if it is none of the top k."""
    return CompletionLogprobs(
        tokens=[readable(bytes_of(token.token_id)) for token in tokens],
        token_logprobs=[_finite(token.logprobs.chosen) for token in tokens],
        top_logprobs=[_top(token, bytes_of) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def chat_logprobs(tokens: Sequence[ShownToken], bytes_of: BytesOfToken) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(token, bytes_of) for token in tokens])


def _top(token: ShownToken, bytes_of: BytesOfToken) -> dict[str, float]:
    top = {
        readable(bytes_of(token_id)): _finite(logprob)
        for token_id, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
    }
    top.setdefault(readable(bytes_of(token.token_id)), _finite(token.logprobs.chosen))
    return top


def _chat_token(token: ShownToken, bytes_of: BytesOfToken) -> ChatTokenLogprob:
    top = [
        _entry(bytes_of(token_id), logprob)
        for token_id, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
    ]
    raw = bytes_of(token.token_id)
    return ChatTokenLogprob(readable(raw), _finite(token.logprobs.chosen), list(raw), top)


def _entry(raw: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(readable(raw), _finite(logprob), list(raw))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
