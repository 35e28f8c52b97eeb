"""Messages of a chat, and the tools that a model may call in it, as data of OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_TOOLS = 256  # OpenAI takes 128 functions; agents with several MCP servers have more
MAX_TOOL_CALLS = 256  # of one message
MAX_DOCUMENTS = 1024

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Name = Annotated[str, Meta(max_length=1024)]
# Dots and 128 characters are MCP's; OpenAI takes 64.
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields in the order in which templates write them."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON schema of an object.")] = None
    returned: Annotated[dict[str, Any] | None, Meta(description="A JSON schema, as transformers writes it.")] = (
        msgspec.field(name="return", default=None)
    )
    response: Annotated[dict[str, Any] | None, Meta(description="A JSON schema, as Gemma's template reads it.")] = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool of type `function`. Tools of other types are left out."""

    type: str
    function: FunctionDefinition | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class FunctionCall(msgspec.Struct, frozen=True):
    name: Name
    arguments: Annotated[str | None, Meta(description="JSON of an object.")] = None


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: Name | None = None
    type: Literal["function"] = "function"


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[FunctionCall | None, Meta(description="A tool call, of old.")] = None
    reasoning_content: Annotated[str | None, Meta(description="What an assistant thought first.")] = None
    reasoning: Annotated[str | None, Meta(description="The same; it counts where both are given.")] = None
    refusal: str | None = None
    audio: Annotated[Any, Meta(description="Left out of what was said; else refused but null.")] = None
