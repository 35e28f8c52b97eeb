"""Answers in the format of Anthropic's Messages API: the answer to a chat as blocks and events.

A whole answer is made from the same events as a stream, so both have the same content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import UNSET
from pydantic_core import from_json
from starlette.responses import Response

from ..generation.choice import Delta
from ..generation.usage import Usage
from ..http.errors import ApiError
from ..openai.answer_form import Spoken, named_event, spoken_in
from ..openai.answer_schema import CalledToolDelta
from ..openai.chat_answer import AnswerHead, ChatAnswer
from ..text.response_reader import TextPiece
from . import message_chat as schema
from .message_chat import MessageEvent

_encode: Final = msgspec.json.Encoder().encode
_Kind = type[schema.TextBlock] | type[schema.ThinkingBlock] | type[schema.ToolUseBlock]


class MessageForm:
    """An `AnswerForm`."""

    def __init__(self, head: AnswerHead, chat: ChatAnswer, *, is_stream: bool) -> None:
        self.is_stream = is_stream
        self._head, self._chat = head, chat
        self._done: list[schema.AnswerBlock] = []
        self._kind: _Kind | None = None  # of the block under way; None: there is none
        self._call: CalledToolDelta | None = None  # if it is one of a call
        self._texts: list[str] = []
        self._end = schema.MessageEnd("end_turn")

    def take(self, index: int, delta: Delta) -> None:
        for _ in self._events(spoken_in(delta, self._chat)):
            pass

    def document(self, usage: Usage) -> Iterator[bytes]:
        for _ in self._ended_block():
            pass
        yield _encode(self._message(self._end, usage))

    def opening(self, usage: Usage, *, is_over: bool) -> Iterator[bytes]:
        yield named_event(schema.MessageStart(self._message(schema.MessageEnd(None), usage)))
        yield named_event(schema.Ping())

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.is_empty:
            return b""
        return b"".join(map(named_event, self._events(spoken_in(delta, self._chat))))

    def ending(self, usage: Usage) -> bytes:
        last = schema.MessageDelta(self._end, _usage(usage))
        return b"".join(map(named_event, (*self._ended_block(), last, schema.MessageStop())))

    def failure(self, error: ApiError) -> bytes:
        return named_event(schema.error_event(error))

    def refusal(self, error: ApiError) -> Response:
        return schema.error_response(error)

    def _events(self, spoken: Spoken) -> Iterator[MessageEvent]:
        for part in spoken.parts:
            if not isinstance(part, TextPiece):
                arguments = part.function.arguments
                if part.id is not UNSET:
                    yield from self._begin(schema.ToolUseBlock, part)
                if arguments:
                    yield self._added(arguments, schema.ToolUseBlockDelta(arguments))
                continue
            kind = schema.ThinkingBlock if part.part == "reasoning" else schema.TextBlock
            if self._kind is not kind:
                yield from self._begin(kind)
            thinks = kind is schema.ThinkingBlock
            yield self._added(
                part.text, schema.ThinkingBlockDelta(part.text) if thinks else schema.TextBlockDelta(part.text)
            )
        if spoken.finish_reason is not None:
            reason = _STOP_REASONS[spoken.finish_reason] if spoken.stop_string is None else "stop_sequence"
            self._end = schema.MessageEnd(reason, spoken.stop_string)

    def _begin(self, kind: _Kind, call: CalledToolDelta | None = None) -> Iterator[MessageEvent]:
        yield from self._ended_block()
        self._kind, self._call = kind, call
        yield schema.BlockStart(len(self._done), self._block())

    def _added(self, text: str, delta: schema.AddedToBlock) -> MessageEvent:
        self._texts.append(text)
        return schema.BlockDelta(len(self._done), delta)

    def _ended_block(self) -> Iterator[MessageEvent]:
        """The events that end the block under way, if there is one."""
        if self._kind is not None:
            yield schema.BlockStop(len(self._done))
            self._done.append(self._block())
            self._kind, self._texts = None, []

    def _block(self) -> schema.AnswerBlock:
        text = "".join(self._texts)
        if self._kind is schema.ToolUseBlock:
            assert self._call is not None and self._call.id is not UNSET and self._call.function.name is not UNSET
            return schema.ToolUseBlock(self._call.id, self._call.function.name, _input(text))
        return schema.ThinkingBlock(text) if self._kind is schema.ThinkingBlock else schema.TextBlock(text)

    def _message(self, end: schema.MessageEnd, usage: Usage) -> schema.Message:
        head = self._head
        return schema.Message(head.id, head.model, [*self._done], end.stop_reason, _usage(usage), end.stop_sequence)


_STOP_REASONS: Final[dict[str, schema.StopReason]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def _input(text: str) -> dict[str, Any]:
    """Of a call that was cut off what there is of it, as Anthropic's clients read it from a stream.

    Numbers that floats do not hold are null: clients could not send them back.
    """
    try:
        msgspec.json.decode(text or "{}")
        return msgspec.json.decode(text or "{}", type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        arguments = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _usage(usage: Usage) -> schema.MessageUsage:
    details = usage.prompt_tokens_details
    num_cached = 0 if details is UNSET else details.cached_tokens
    return schema.MessageUsage(usage.prompt_tokens - num_cached, usage.completion_tokens, num_cached)
