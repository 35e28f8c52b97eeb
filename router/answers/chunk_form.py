"""Completions and chats on their way out: documents with choices, and streams of chunks that can be resumed.

Each event's id is the position in the stream; a client that reconnects with such an id gets the events that follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...workers.wire.messages import FinishReason
from ..generation.choice import Delta
from ..generation.generation import Generation
from ..openai_api.answer_schema import ChunkUsage, Usage
from ..openai_api.errors import ApiError
from ..openai_api.stream_position import AT_USAGE, EventIds, StreamPosition, wrong_position
from .logprobs_json import EchoedLogprobs, LogprobsJson, PromptLogprobs

# The interface that the shapes of both kinds of answers, completions and chats, have in common.


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
        first, *tails = encoded.split(_MARK)
        return chain([first], *(chain(pieces, [after]) for pieces, after in zip(long, tails, strict=True)))

    def _later(self, pieces: Iterator[bytes]) -> msgspec.Raw:
        self._long.append(pieces)
        return msgspec.Raw(_MARK)


_NO_CHOICES: Final = b'"choices":[]'
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class StreamStyle:
    """The options of a stream, and where it begins."""

    event_ids: EventIds
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    position: StreamPosition | None = None  # what the client has already had; None: nothing


class ChunkForm:
    """An `AnswerForm`."""

    def __init__(self, shape: AnswerShape, style: StreamStyle | None, generation: Generation) -> None:
        """`style`: None for one JSON document."""
        self.is_stream = style is not None
        self._shape, self._style, self._generation = shape, style, generation
        self._wholes: dict[int, WholeChoice] = {}  # by the index of the choice
        num_drawn = generation.request.n
        num_answered = generation.request.num_best or num_drawn
        for index in range(0 if self.is_stream else len(generation.choices)):
            number, place = divmod(index, num_drawn)
            first = self._wholes[index - place] if place else None
            self._wholes[index] = shape.gathering(number * num_answered, first)

    def take(self, index: int, delta: Delta) -> None:
        self._wholes[index].add(delta)

    def document(self, usage: Usage) -> Iterator[bytes]:
        # Only the answer's own list can contain this: within a text its quotes would be escaped.
        before, after = _encode(self._shape.without_choices(usage, self._wholes[0])).split(_NO_CHOICES, 1)
        endings = self._wholes[0].json(after)
        yield before + b'"choices":['
        for place, index in enumerate(self._generation.answers()):
            whole = self._wholes.pop(index)  # freed before the next one: all at once would take long
            yield b"," if place else b""
            yield from whole.json(_encode(self._shape.choice(place, whole)))
        yield b"]"
        yield from endings

    def opening(self, usage: Usage, *, is_over: bool) -> Iterator[bytes]:
        position = self._stream.position
        if position is not None and position.has_usage and not is_over:
            raise wrong_position("it is the end of the answer, and the answer has not ended.")
        return self._opening(0 if position is None else position.num_openings)

    def _opening(self, num_had: int | None) -> Iterator[bytes]:
        """Drops the events that the client has already received; None: all of them."""
        if num_had is None:
            return
        none_yet = [0] * len(self._generation.choices)
        chunks = self._shape.opening(self._chunk_usage())
        suffixes = [*range(1, len(chunks)), ""]  # the last event needs no suffix: only tokens follow it
        for suffix, chunk in [*zip(suffixes, chunks, strict=False)][num_had:]:
            yield self._stream.event_ids.line(none_yet, suffix) + _event(chunk)

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.is_empty:
            return b""
        line = self._stream.event_ids.line(self._generation.num_tokens)
        return line + _event(self._shape.chunk(index, delta, self._chunk_usage()))

    def ending(self, usage: Usage) -> bytes:
        style, events = self._stream, b""
        if style.include_usage and not (style.position is not None and style.position.has_usage):
            events = style.event_ids.line(self._generation.num_tokens, AT_USAGE) + _event(self._shape.closing(usage))
        return events + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """No [DONE] follows, so that clients do not take the stream for complete."""
        return b"data: " + error.body() + b"\n\n"

    def refusal(self, error: ApiError) -> Response:
        return error.response()

    @property
    def _stream(self) -> StreamStyle:
        assert self._style is not None
        return self._style

    def _chunk_usage(self) -> ChunkUsage:
        if self._stream.usage_in_every_chunk:
            return self._generation.usage()
        return None if self._stream.include_usage else UNSET


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
