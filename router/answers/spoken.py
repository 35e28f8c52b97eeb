"""What a delta adds to the answer to a chat, as plain values that other APIs show in their own shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET

from ..generation.choice import Delta
from ..openai_api.answer_schema import CalledToolDelta, ChatFinishReason, ChatTokenLogprob
from ..text.response_reader import TextPiece
from .chat_answer import ChatAnswer


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
