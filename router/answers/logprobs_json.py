"""Log-probabilities of a whole answer as JSON that grows with its tokens.

To format those of thousands of tokens at the end would hold the event loop for as long as they take together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, Protocol

import msgspec

from ..generation.choice import ShownToken
from .openai_logprobs import BytesOfToken, chat_logprobs, completion_logprobs
from .prompt_logprobs_json import EchoedLogprobs, listed

_encode: Final = msgspec.json.Encoder().encode


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
        found = completion_logprobs(tokens, self._bytes_of)
        for field, parts in self._fields.items():
            parts.append(_elements(getattr(found, field)))

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
