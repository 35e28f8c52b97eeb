"""Requests and answers of Anthropic's Messages API as data: messages, blocks, events of a stream, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from ..http.errors import ApiError, ErrorDetail
from ..openai.request_schema import Count, OneAnswerFields, StopString, TranslatedChat

# Requests of Anthropic's Messages API as data.
#
# The fields that are not Anthropic's mean the same as at /v1/chat/completions.

_LEFT_OUT = Meta(description="Left out.")


class Block(msgspec.Struct, frozen=True):
    """A block of a content; which fields count depends on its type."""

    harmless_names: ClassVar = ("cache_control", "citations", "signature")
    type: Annotated[
        str, Meta(description="`text`, `tool_use`, `tool_result` or `thinking`; in the history others are left out.")
    ]
    text: str | None = None
    id: str | None = None  # of a tool_use
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a tool_result
    content: str | list[Block] | dict[str, Any] | None = None
    tool_name: str | None = None  # of a tool_reference
    thinking: str | None = None


class Turn(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(msgspec.Struct, frozen=True):
    harmless_names: ClassVar = ("cache_control",)
    name: str | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, Meta(description="A JSON schema of an object.")] = None
    type: Annotated[str | None, Meta(description="`custom`, the default. Others are left out.")] = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class MessageMetadata(msgspec.Struct, frozen=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


class CountTokensRequest(OneAnswerFields, frozen=True, kw_only=True):
    harmless_names: ClassVar = ("cache_control",)
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    metadata: MessageMetadata | None = None
    stop: Annotated[Any, Meta(description="Refused: it is called `stop_sequences`.")] = None
    user: Annotated[Any, Meta(description="Refused: it is called `metadata.user_id`.")] = None
    stream_options: Annotated[Any, _LEFT_OUT] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="For the chat template, as it is.")] = None
    container: Annotated[Any, _LEFT_OUT] = None
    mcp_servers: Annotated[Any, _LEFT_OUT] = None
    context_management: Annotated[Any, _LEFT_OUT] = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    max_tokens: Count


class MessageChat(TranslatedChat, frozen=True, kw_only=True):
    """The chat that a `MessagesRequest` asks for."""


class CountedChat(TranslatedChat, frozen=True, kw_only=True):
    """The chat that a `CountTokensRequest` asks about."""


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
    types = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    return types.get(status_code, "api_error" if status_code >= 500 else "invalid_request_error")
