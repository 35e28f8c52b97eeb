"""Requests of OpenAI's Responses API as data. What it answers is in `response_schema.py`.

The fields that are not OpenAI's mean the same as at /v1/chat/completions.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from .one_answer import OneAnswerFields
from .request_schema import Count, InputFormat, StreamOptions, TranslatedChat
from .response_schema import ResponseTerms, TextFormat

MAX_METADATA = 16
ShortText = Annotated[str, Meta(max_length=512)]
_REFUSED = Meta(description="Refused but null.")
_LEFT_OUT = Meta(description="Left out.")


class InputPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a content: `input_text`, `output_text`, `text`, `refusal`, `reasoning_text` or `summary_text`.

    In the history others are left out, and a line says so.
    """

    harmless_names: ClassVar = ("annotations", "logprobs")
    type: str = ""
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message, a call of a tool, its output, or what the model thought: as an answer had it, or new.

    Or an `item_reference`, with the `id` of an item of a stored response. Items of other types are left out.
    """

    harmless_names: ClassVar = ("status", "summary")
    type: Annotated[
        str,
        Meta(
            description="`message`, `function_call`, `function_call_output`, `custom_tool_call`, "
            "`custom_tool_call_output` or `reasoning`."
        ),
    ] = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    approval_request_id: str | None = None  # what an item that is left out refers to
    name: str | None = None
    arguments: str | dict[str, Any] | None = None  # of calls of functions a text
    input: str | None = None  # of a custom_tool_call
    output: str | list[InputPart] | dict[str, Any] | None = None  # of functions and custom tools a text, or parts
    encrypted_content: str | None = None


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None,
        Meta(description="What was thought is shown whole, never summed up."),
    ] = None


class ResponseTool(msgspec.Struct, frozen=True):
    """A tool of type `function`, or `custom`: its input is a text. Tools of other types are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None  # of a custom tool's input


class ResponseToolChoice(msgspec.Struct, frozen=True):
    """Of the type `function` or `custom`, with its name, or `allowed_tools`, with a mode and tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ResponseTool] | None = None


class ResponseStreamOptions(StreamOptions, frozen=True):
    include_obfuscation: Annotated[bool | None, Meta(description="Events are never padded.")] = None


class ResponsesRequest(OneAnswerFields, frozen=True, kw_only=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[Count | None, Meta(description="Of built-in tools, of which there are none.")] = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: (
        Annotated[list[str], Meta(description="`message.output_text.logprobs`; others make no difference.")] | None
    ) = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream_options: ResponseStreamOptions | None = None
    max_tokens: Annotated[Any, Meta(description="Refused: it is called `max_output_tokens`.")] = None
    truncation: Annotated[
        Literal["disabled", "auto"] | None, Meta(description="`auto` is left out: nothing is cut.")
    ] = None
    store: Annotated[bool | None, Meta(description="`true` is refused unless operators turn storage on.")] = None
    background: Annotated[bool | None, Meta(description="`true` is refused.")] = None
    metadata: Annotated[dict[str, ShortText], Meta(max_length=MAX_METADATA)] | None = None
    prompt_cache_key: ShortText | None = None
    safety_identifier: ShortText | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="For the chat template, as it is.")] = None
    previous_response_id: (
        Annotated[str, Meta(max_length=128, description="Of a stored response: the input goes on behind it.")] | None
    ) = None
    conversation: Annotated[Any, _REFUSED] = None
    prompt: Annotated[Any, _REFUSED] = None
    context_management: Annotated[Any, _LEFT_OUT] = None
    moderation: Annotated[Any, _LEFT_OUT] = None


class _KeptOutput(msgspec.Struct, frozen=True):
    output: list[InputItem]


class KeptConversation(msgspec.Struct, frozen=True):
    """What is stored of a response, as far as a next request needs it."""

    input: list[InputItem]
    response: _KeptOutput


class ResponseChat(TranslatedChat, frozen=True, kw_only=True):
    """The chat that a `ResponsesRequest` asks for, and what its answer repeats of it."""

    terms: ResponseTerms
    has_instructions: bool  # they are the first message
    items: bytes = b""  # JSON of the conversation's, where its response is to be stored
