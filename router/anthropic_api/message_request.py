"""Requests of Anthropic's Messages API as data. What it answers is in `message_schema.py`.

The fields that are not Anthropic's mean the same as at /v1/chat/completions.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ..openai_api.one_answer import OneAnswerFields
from ..openai_api.request_schema import Count, StopString, TranslatedChat

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
