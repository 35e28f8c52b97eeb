"""What the two kinds of answers, text completions and chats, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..generation.choice import Delta
from ..openai_api.answers import ChunkUsage, Usage


@dataclass(frozen=True)
class AnswerHead:
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int  # Unix time, seconds
    model: str  # as the client named it


class AnswerShape(Protocol):
    """Makes messages of OpenAI's API out of what the choices of a request bring."""

    def opening(self, usage: ChunkUsage) -> Sequence[msgspec.Struct]:
        """Chunks before the first delta."""

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> msgspec.Struct:
        """The chunk of one choice's delta."""

    def closing(self, usage: Usage) -> msgspec.Struct:
        """The chunk without choices that tells the usage."""

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> msgspec.Struct:
        """The answer in one piece. One delta for each choice."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    return Delta(
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [token for delta in deltas for token in delta.logprobs],
        deltas[-1].finish_reason,
    )
