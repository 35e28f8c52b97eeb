"""The interface that the shapes of both kinds of answers, completions and chats, have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from ...workers.wire.messages import FinishReason
from ..generation.choice import Delta
from ..openai_api.answer_schema import ChunkUsage, Usage
from .logprobs_json import LogprobsJson
from .prompt_logprobs_json import EchoedLogprobs, PromptLogprobs


@dataclass(frozen=True)
class AnswerHead:
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int  # Unix time, seconds
    model: str  # as the client named it


_MARK: Final = b"\0"  # in place of a long field: JSON has no such byte


class AnswerShape(Protocol):
    """Turns the deltas of a request's choices into the messages of OpenAI's API."""

    def opening(self, usage: ChunkUsage) -> Sequence[msgspec.Struct]:
        """The chunks of a stream before the first delta."""

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> msgspec.Struct:
        """The chunk for a delta of the choice `index`."""

    def closing(self, usage: Usage) -> msgspec.Struct:
        """The chunk without choices that has the usage, at the end of a stream."""

    def gathering(self, index: int, first: WholeChoice | None) -> WholeChoice:
        """A collector of the deltas of one choice of a whole answer. `index`: of the choice.

        `first`: of the first choice of the same prompt, whose log-probabilities of the prompt are this one's, too.
        """

    def choice(self, index: int, whole: WholeChoice) -> msgspec.Struct:
        """The choice at this place of a whole answer."""

    def without_choices(self, usage: Usage, first: WholeChoice) -> msgspec.Struct:
        """A whole answer whose list of choices is empty. `first`: of the choices that were gathered."""


class WholeChoice:
    """All deltas of one choice, joined."""

    def __init__(
        self,
        logprobs: LogprobsJson | None,
        echoed: EchoedLogprobs | None = None,
        prompt: PromptLogprobs | None = None,
    ) -> None:
        """`logprobs`: None if none are shown. `echoed`, `prompt`: of the prompt, if they are requested."""
        self.echoed, self.prompt = echoed, prompt
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._texts: list[str] = []
        self._long: list[Iterator[bytes]] = []  # JSON of long fields, in the order of the fields
        self._logprobs = logprobs

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self._logprobs is not None and delta.logprobs:
            self._logprobs.add(delta.logprobs)
        for growing in (self.echoed, self.prompt):
            if growing is not None and delta.prompt_scores is not None:
                growing.add(delta.prompt_scores)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def logprobs(self) -> msgspec.Raw | None:
        """The placeholder of this field until `json` inserts it."""
        return None if self._logprobs is None else self._later(self._logprobs.whole())

    @property
    def prompt_logprobs(self) -> msgspec.Raw | UnsetType:
        """As `logprobs`."""
        return UNSET if self.prompt is None else self._later(self.prompt.whole())

    def json(self, encoded: bytes) -> Iterator[bytes]:
        """The encoded choice, in pieces, with the long fields that were requested since the last call, in this order.

        Joining tens of megabytes would block the event loop.
        """
        long, self._long = self._long, []
        first, *rest = encoded.split(_MARK)
        return chain([first], *(chain(pieces, [after]) for pieces, after in zip(long, rest, strict=True)))

    def _later(self, pieces: Iterator[bytes]) -> msgspec.Raw:
        self._long.append(pieces)
        return msgspec.Raw(_MARK)
