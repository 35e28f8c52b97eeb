"""Requests and answers of OpenAI's Responses API as data: responses, their items, and the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ..openai.answer_schema import ChatTokenLogprob
from ..openai.request_schema import Count, InputFormat, OneAnswerFields, StreamOptions, TranslatedChat

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class FunctionTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    name: str
    description: str | None = None
    format: InputFormat | None = None


class NamedCustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    name: str


class NamedFunctionTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    name: str


class AllowedFunctionTools(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[dict[str, str]]


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ShownText(msgspec.Struct, frozen=True):
    format: TextFormat
    verbosity: Literal["low", "medium", "high"] | None = None


class ShownReasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: Sequence[None] = ()
    logprobs: Sequence[ChatTokenLogprob] | msgspec.Raw = ()


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: Sequence[OutputText] = ()
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str = ""


class CustomCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str = ""


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    content: Sequence[ReasoningText] = ()
    summary: Sequence[None] = ()
    encrypted_content: None = None


OutputItem = OutputMessage | FunctionCallItem | CustomCallItem | ReasoningItem


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    text: str


class RefusalText(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    role: Literal["system", "developer", "user", "assistant"]
    content: Sequence[InputText | OutputText | RefusalText]
    status: ItemStatus = "completed"


class CallOutputItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str | Sequence[InputText]
    status: ItemStatus = "completed"


class CustomCallOutputItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call_output"):
    id: str
    call_id: str
    output: str | Sequence[InputText]
    status: ItemStatus = "completed"


InputItemShown = (
    MessageItem | FunctionCallItem | CustomCallItem | CallOutputItem | CustomCallOutputItem | ReasoningItem
)  # of a stored conversation


class InputItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the items that a stored response answers."""

    object: Literal["list"] = "list"
    data: list[InputItemShown]
    first_id: str | None  # null: the page is empty
    last_id: str | None
    has_more: bool  # another page follows


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, frozen=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a response repeats of its request."""

    max_output_tokens: int | None
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tools: list[FunctionTool | CustomTool] | msgspec.Raw
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | NamedCustomTool | AllowedFunctionTools
    text: ShownText | msgspec.Raw
    reasoning: ShownReasoning
    top_logprobs: int
    metadata: dict[str, str]
    service_tier: Literal["default", "flex"]
    max_tool_calls: int | None
    user: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    store: bool
    previous_response_id: str | None


class Response(ResponseTerms, frozen=True, kw_only=True):
    id: str
    created_at: int
    completed_at: int | None = None  # where the status is completed
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    instructions: str | None
    output: Sequence[OutputItem] = ()
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    object: Literal["response"] = "response"
    background: bool = False
    truncation: Literal["disabled"] = "disabled"


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class ResponseEvent(_Event, frozen=True, kw_only=True):
    response: Response


class Created(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    pass


class InProgress(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    pass


class Incomplete(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    pass


class _OfItem(_Event, frozen=True, kw_only=True):
    output_index: int


class ItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class _InItem(_OfItem, frozen=True, kw_only=True):
    item_id: str


class ArgumentsDelta(_InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class InputDelta(_InItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(_InItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


class _InPart(_InItem, frozen=True, kw_only=True):
    content_index: Literal[0] = 0


class PartAdded(_InPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_InPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(_InPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: Sequence[ChatTokenLogprob] = ()


class TextDone(_InPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: Sequence[ChatTokenLogprob] | msgspec.Raw = ()


class ReasoningDelta(_InPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_InPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ErrorEvent(_Event, frozen=True, kw_only=True, tag="error"):
    message: str
    code: str | None
    param: str | None


StreamEvent = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
    | PartDone
    | ItemDone
    | Completed
    | Incomplete
    | Failed
    | ErrorEvent
)


# Requests of OpenAI's Responses API as data.
#
# The fields that are not OpenAI's mean the same as at /v1/chat/completions.

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
