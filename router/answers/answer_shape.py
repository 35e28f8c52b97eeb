"""The interface that the shapes of both kinds of answers, completions and chats, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...workers.wire.messages import FinishReason
from ..generation.choice import Delta
from ..openai_api.answer_schema import ChunkUsage, Usage
from .logprobs_json import LogprobsJson


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
        """The chunk without choices that has the usage, at the end of a stream."""

    def gathering(self) -> WholeChoice:
        """What the deltas of one choice of a whole answer are added to."""

    def choice(self, index: int, whole: WholeChoice) -> msgspec.Struct:
        """The choice at this place of a whole answer."""

    def without_choices(self, usage: Usage) -> msgspec.Struct:
        """A whole answer whose list of choices is empty."""


class WholeChoice:
    """All deltas of one choice, joined."""

    def __init__(self, logprobs: LogprobsJson | None) -> None:
        """`logprobs`: None if none are shown."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._texts: list[str] = []
        self._logprobs = logprobs

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        if self._logprobs is not None and delta.logprobs:
            self._logprobs.add(delta.logprobs)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def logprobs(self) -> msgspec.Raw | None:
        return None if self._logprobs is None else self._logprobs.whole()
