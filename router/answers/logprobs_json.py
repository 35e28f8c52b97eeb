"""Log-probabilities of a whole answer as JSON that grows with its tokens.

To format those of thousands of tokens at the end would hold the event loop for as long as they take together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from ..generation.choice import ShownToken
from .openai_logprobs import BytesOfToken, chat_logprobs, completion_logprobs

_encode: Final = msgspec.json.Encoder().encode


class LogprobsJson(Protocol):
    """Of one choice."""

    def add(self, tokens: Sequence[ShownToken]) -> None: ...

    def whole(self) -> msgspec.Raw:
        """The field `logprobs` of the choice with all tokens that were added."""


class CompletionLogprobsJson:
    """A `LogprobsJson` in the format of completions."""

    def __init__(self, bytes_of: BytesOfToken) -> None:
        self._bytes_of = bytes_of
        self._fields: dict[str, list[bytes]] = {
            field: [] for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }

    def add(self, tokens: Sequence[ShownToken]) -> None:
        found = completion_logprobs(tokens, self._bytes_of)
        for field, parts in self._fields.items():
            parts.append(_elements(getattr(found, field)))

    def whole(self) -> msgspec.Raw:
        fields = [b'"' + field.encode() + b'":[' + b",".join(parts) + b"]" for field, parts in self._fields.items()]
        return msgspec.Raw(b"{" + b",".join(fields) + b"}")


class ChatLogprobsJson:
    """A `LogprobsJson` in the format of chats."""

    def __init__(self, bytes_of: BytesOfToken) -> None:
        self._bytes_of = bytes_of
        self._parts: list[bytes] = []

    def add(self, tokens: Sequence[ShownToken]) -> None:
        self._parts.append(_elements(chat_logprobs(tokens, self._bytes_of).content))

    def whole(self) -> msgspec.Raw:
        return msgspec.Raw(b'{"content":[' + b",".join(self._parts) + b'],"refusal":null}')


def _elements(values: Sequence[object]) -> bytes:
    """The JSON of the values with commas between them."""
    return _encode(values)[1:-1]
