"""The interface of all formats of answers: one JSON document, or a stream of events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, NoReturn, Protocol

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from ..generation.choice import Delta
from ..generation.usage import Usage
from ..http.errors import ApiError
from ..text.response_reader import TextPiece
from .answer_schema import CalledToolDelta, ChatFinishReason, ChatTokenLogprob
from .chat_answer import ChatAnswer

# What a delta adds to the answer to a chat, as plain values that other APIs show in their own shapes.


class Spoken(NamedTuple):
    parts: Sequence[TextPiece | CalledToolDelta]  # in the order of the text
    logprobs: Sequence[ChatTokenLogprob]
    finish_reason: ChatFinishReason | None
    stop_string: str | None  # the stop string that ended the answer; None: none did


def spoken_in(delta: Delta, chat: ChatAnswer) -> Spoken:
    (choice,) = chat.chunk(0, delta, UNSET).choices
    calls = iter(choice.delta.tool_calls or ())
    pieces = delta.pieces or ([TextPiece("content", delta.text)] if delta.text else [])
    parts = [piece if isinstance(piece, TextPiece) else next(calls) for piece in pieces]
    logprobs = () if choice.logprobs is None else choice.logprobs.content
    stop_string = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    return Spoken(parts, logprobs, choice.finish_reason, stop_string)


# Server-sent events with a name, as `/v1/messages` and `/v1/responses` send them.

_encode: Final = msgspec.json.Encoder().encode


def named_event(event: msgspec.Struct) -> bytes:
    """The event's name is the tag of its type."""
    return b"event: " + str(type(event).__struct_config__.tag).encode() + b"\ndata: " + _encode(event) + b"\n\n"


class AnswerForm(Protocol):
    """Formats one answer, and may keep state between calls."""

    is_stream: bool

    def take(self, index: int, delta: Delta) -> None:
        """Adds a delta of the choice `index` to the document."""

    def document(self, usage: Usage) -> Iterator[bytes]:
        """The whole answer as JSON, in pieces that each take little time."""

    def opening(self, usage: Usage, *, is_over: bool) -> Iterable[bytes]:
        """The events before the first delta that the client has not received.

        `is_over`: there is no such delta. Raises a 400 if that contradicts the client's position.
        """

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events for a delta of the choice `index`; empty: none."""

    def ending(self, usage: Usage) -> bytes:
        """The events after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that has begun and cannot go on."""

    def refusal(self, error: ApiError) -> Response:
        """The error in place of an answer."""


class UnstreamedForm:
    """What all forms of answers have in common that are one document, never a stream."""

    is_stream = False

    def opening(self, usage: Usage, *, is_over: bool) -> Iterable[bytes]:
        _never()

    def delta(self, index: int, delta: Delta) -> bytes:
        _never()

    def ending(self, usage: Usage) -> bytes:
        _never()

    def failure(self, error: ApiError) -> bytes:
        _never()

    def refusal(self, error: ApiError) -> Response:
        return error.response()


def _never() -> NoReturn:
    raise AssertionError("these answers are never streamed")
