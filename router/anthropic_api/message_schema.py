"""Answers of Anthropic's Messages API as data: a message, its blocks, the events of a stream, and errors.

Requests are in `message_request.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.responses import Response

from ..openai_api.errors import ApiError, ErrorDetail

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, msgspec.Raw]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    input_tokens: int  # beside those that were found in the prefix cache
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, frozen=True):
    id: str
    model: str
    content: Sequence[AnswerBlock]
    stop_reason: StopReason | None
    usage: MessageUsage
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: Message


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class ToolUseBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


AddedToBlock = TextBlockDelta | ThinkingBlockDelta | ToolUseBlockDelta


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: AddedToBlock


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason | None
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


class MessageFailed(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error in place of an answer, too. `code` and `param` are as in OpenAI's API."""

    error: ErrorDetail


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageFailed


def error_event(error: ApiError) -> MessageFailed:
    detail = error.detail
    return MessageFailed(ErrorDetail(detail.message, _type_of(error.status_code), detail.param, detail.code))


def error_response(error: ApiError) -> Response:
    body = msgspec.json.encode(error_event(error))
    return Response(body, error.status_code, error.headers, "application/json")


def _type_of(status_code: int) -> str:
    known = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    return known.get(status_code, "api_error" if status_code >= 500 else "invalid_request_error")
