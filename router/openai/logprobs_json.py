"""Log-probabilities of a whole answer as JSON that grows with its tokens.

To format those of thousands of tokens at the end would hold the event loop for as long as they take together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, Protocol

import msgspec

from ...workers.wire.prompt_scores import PromptScores
from ..generation.choice import ShownToken
from ..text.token_bytes import readable
from .answer_schema import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

# Log probabilities of tokens, in OpenAI's two formats for them.

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


# Log-probabilities of a prompt as JSON that is encoded as they arrive, in the format of `echo` and in vLLM's.
#
# The first token of a prompt has none: null takes its place.

_encode: Final = msgspec.json.Encoder().encode
StepText = Callable[[int], str]  # the text that the prompt's next token completes


class EchoedLogprobs:
    """The fields of a completion's `logprobs`, of the tokens of its prompt."""

    def __init__(self, token_ids: Sequence[int], bytes_of: BytesOfToken, step: StepText, num_top: int) -> None:
        """`step` is called for each token, in order."""
        self.fields: dict[str, list[bytes]] = {
            "tokens": [_encode(readable(bytes_of(token_ids[0])))],
            "token_logprobs": [b"null"],
            "top_logprobs": [b"null"],
            "text_offset": [b"0"],
        }
        self._token_ids, self._bytes_of, self._step, self._num_top = token_ids, bytes_of, step, num_top
        self._position = 1  # of the next token
        self._num_chars = len(step(token_ids[0]))

    def add(self, scores: PromptScores) -> None:
        """Adds the next tokens."""
        start, num_top = self._position, self._num_top
        self._position = end = start + scores.num_rows
        token_ids = self._token_ids[start:end]
        texts = [readable(self._bytes_of(token_id)) for token_id in token_ids]
        logprobs, _, top_ids, top_logprobs = _lists(scores)
        tops = []
        for text, logprob, ids, values in zip(texts, logprobs, top_ids, top_logprobs, strict=True):
            top = dict(zip(map(self._text, ids[:num_top]), values[:num_top], strict=True))
            top.setdefault(text, logprob)
            tops.append(top)
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(self._step(token_id))
        for parts, column in zip(self.fields.values(), (texts, logprobs, tops, offsets), strict=True):
            parts.append(_encode(column)[1:-1])

    def _text(self, token_id: int) -> str:
        return readable(self._bytes_of(token_id))


class PromptLogprobs:
    """vLLM's `prompt_logprobs`: for each token an object with it and the likeliest ones, by id."""

    def __init__(self, token_ids: Sequence[int], bytes_of: BytesOfToken, num_top: int) -> None:
        self._token_ids, self._bytes_of, self._num_top = token_ids, bytes_of, num_top
        self._position = 1
        self._parts = [b"null"]

    def add(self, scores: PromptScores) -> None:
        """Adds the next tokens."""
        start, num_top = self._position, self._num_top
        self._position = end = start + scores.num_rows
        rows = []
        for token_id, logprob, rank, ids, values in zip(self._token_ids[start:end], *_lists(scores), strict=True):
            row = {token_id: self._entry(token_id, logprob, rank)}
            for place, (top_id, value) in enumerate(zip(ids[:num_top], values[:num_top], strict=True)):
                if top_id != token_id:
                    row[top_id] = self._entry(top_id, value, place + 1)
            rows.append(row)
        self._parts.append(_encode(rows)[1:-1])

    def whole(self) -> Iterator[bytes]:
        """JSON of the field, in pieces."""
        yield b"["
        yield from listed(self._parts)
        yield b"]"

    def _entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": readable(self._bytes_of(token_id))}


def listed(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The parts with a comma between each two."""
    for number, part in enumerate(parts):
        yield b"," + part if number else part


def _lists(scores: PromptScores) -> tuple[list[float], list[int], list[list[int]], list[list[float]]]:
    rows = scores.rows()
    # Numbers that are not finite fail their sequence, so the least is minus infinity, which JSON does not have.
    logprobs, top_logprobs = rows["logprob"].clip(LEAST_LOGPROB), rows["top_logprobs"].clip(LEAST_LOGPROB)
    return logprobs.tolist(), rows["rank"].tolist(), rows["top_ids"].tolist(), top_logprobs.tolist()


class LogprobsJson(Protocol):
    """Log-probabilities of one choice."""

    def add(self, tokens: Sequence[ShownToken]) -> None: ...

    def whole(self) -> Iterator[bytes]:
        """JSON of the choice's field `logprobs` with all tokens that were added, in pieces."""


class CompletionLogprobsJson:
    """A `LogprobsJson` in the format of completions."""

    def __init__(self, bytes_of: BytesOfToken, echoed: EchoedLogprobs | None = None, num_echoed: int = 0) -> None:
        """`echoed`: of the prompt, whose text has `num_echoed` characters, before the completion."""
        self._bytes_of, self._echoed, self._num_echoed = bytes_of, echoed, num_echoed
        self._fields: dict[str, list[bytes]] = {
            field: [] for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }

    def add(self, tokens: Sequence[ShownToken]) -> None:
        if self._num_echoed:
            tokens = [token._replace(offset=token.offset + self._num_echoed) for token in tokens]
        logprobs = completion_logprobs(tokens, self._bytes_of)
        for field, parts in self._fields.items():
            parts.append(_elements(getattr(logprobs, field)))

    def whole(self) -> Iterator[bytes]:
        before = {} if self._echoed is None else self._echoed.fields
        for number, (field, parts) in enumerate(self._fields.items()):
            yield (b',"' if number else b'{"') + field.encode() + b'":['
            yield from listed(chain(before.get(field, ()), parts))
            yield b"]"
        yield b"}"


class ChatLogprobsJson:
    """A `LogprobsJson` in the format of chats."""

    def __init__(self, bytes_of: BytesOfToken) -> None:
        self._bytes_of = bytes_of
        self._parts: list[bytes] = []

    def add(self, tokens: Sequence[ShownToken]) -> None:
        self._parts.append(_elements(chat_logprobs(tokens, self._bytes_of).content))

    def whole(self) -> Iterator[bytes]:
        yield b'{"content":['
        yield from listed(self._parts)
        yield b'],"refusal":null}'


def _elements(values: Sequence[object]) -> bytes:
    """The JSON of the values with commas between them."""
    return _encode(values)[1:-1]
