"""Completions and chats on their way out: documents with choices, and streams of chunks that can be resumed.

Each event's id is the position in the stream; a client that reconnects with such an id gets the events that follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from ..generation.choice import Delta
from ..generation.generation import Generation
from ..openai_api.answer_schema import ChunkUsage, Usage
from ..openai_api.errors import ApiError
from ..openai_api.stream_position import AT_USAGE, EventIds, StreamPosition, wrong_position
from .answer_shape import AnswerShape, WholeChoice

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
