"""The interface that the shapes of both kinds of answers, completions and chats, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..generation.choice import Delta
from ..openai_api.answer_schema import ChunkUsage, Usage


@dataclass(frozen=True)
class AnswerHead:
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int  # Unix time, seconds
    model: str  # as the client named it


class AnswerShape(Protocol):
    """Turns the deltas of a request's choices into the messages of OpenAI's API."""

    def opening(self, usage: ChunkUsage) -> Sequence[msgspec.Struct]:
        """The chunks of a stream before the first delta."""

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> msgspec.Struct:
        """The chunk for a delta of the choice `index`."""

    def closing(self, usage: Usage) -> msgspec.Struct:
        """The chunk without choices, which tells the usage at the end of a stream."""

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> msgspec.Struct:
        """The answer in one piece; `deltas` has one delta for each choice."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice, joined into one."""
    return Delta(
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [token for delta in deltas for token in delta.logprobs],
        deltas[-1].finish_reason,
    )
