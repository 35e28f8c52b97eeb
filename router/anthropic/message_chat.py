"""Anthropic's Messages API: requests and answers as data, and a request as the chat that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from ..http.errors import ApiError, ErrorDetail, invalid_value, unsupported
from ..openai.chat_fields import chat_of, left_out_text, needed
from ..openai.request_schema import Count, OneAnswerFields, StopString, TranslatedChat

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


NAMES: Final = {  # of a chat's fields: see `renamed`
    r"messages.*": "messages",
    "max_completion_tokens": "max_tokens",
    r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
}
_REFUSED: Final = {
    "use_beam_search": "a message has one answer: leave it out.",
    "return_token_ids": "a message shows none: leave it out.",
    "stop": "it is called stop_sequences here.",
    "user": "it is called metadata.user_id here.",
}
_LEFT_OUT_FIELDS: Final = ("stream_options", "container", "mcp_servers", "context_management")
_OWN: Final = frozenset({*OneAnswerFields.__annotations__, "stop", "user", "stream_options"})


def message_chat(request: MessagesRequest) -> MessageChat:
    """Raises a 400 that names a field of the request."""
    return chat_of(request, _chat_fields(request), MessageChat, besides=_OWN, names=NAMES)


def counted_chat(request: CountTokensRequest) -> CountedChat:
    """Likewise."""
    return chat_of(request, _chat_fields(request), CountedChat, besides=_OWN, names=NAMES)


def _chat_fields(request: CountTokensRequest) -> dict[str, Any]:
    for field, why in _REFUSED.items():
        if getattr(request, field) not in (None, False, []):
            raise unsupported(field, why)
    conversation = _Conversation(request)
    tools = [(at, tool) for at, tool in enumerate(request.tools or ()) if tool.type in (None, "custom")]
    config, choice = request.output_config or OutputConfig(), request.tool_choice
    return {
        "messages": conversation.messages,
        "left_out": [*_left_out(request), *conversation.left_out],
        "stop": request.stop_sequences or None,
        "user": None if request.metadata is None else request.metadata.user_id,
        "tools": [_tool(tool, f"tools[{at}]") for at, tool in tools] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": None if config.format is None else _response_format(config.format.schema),
        "reasoning_effort": config.effort,
        "chat_template_kwargs": _template_arguments(request),
        "thinking_token_budget": None if request.thinking is None else request.thinking.budget_tokens,
    }


def _left_out(request: CountTokensRequest) -> Iterator[str]:
    """Fields and tools that only another server knows."""
    yield from (field for field in _LEFT_OUT_FIELDS if getattr(request, field) not in (None, [], {}))
    yield from (f"tools[{at}]" for at, tool in enumerate(request.tools or ()) if tool.type not in (None, "custom"))


class _Conversation:
    """Converts turns to messages of a chat."""

    def __init__(self, request: CountTokensRequest) -> None:
        self.messages: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        turns = request.messages
        self._num_past = max((at for at, turn in enumerate(turns, 1) if turn.role == "assistant"), default=0)
        self._referred = {
            block.tool_use_id for turn in turns if not isinstance(turn.content, str) for block in turn.content
        }
        if request.system is not None:
            self._add_note(request.system, "system", is_past=False)
        for position, turn in enumerate(turns):
            param = f"messages[{position}].content"
            if turn.role == "system":
                self._add_note(turn.content, param, is_past=True)
                continue
            blocks = [Block("text", text=turn.content)] if isinstance(turn.content, str) else turn.content
            if turn.role == "user":
                self._add_user(blocks, param, is_past=position < self._num_past)
            else:
                self._add_assistant(blocks, param)

    def _add_note(self, content: str | list[Block], param: str, *, is_past: bool) -> None:
        self.messages.append({"role": "system", "content": self._text(content, param, is_past=is_past)})

    def _add_user(self, blocks: Sequence[Block], param: str, *, is_past: bool) -> None:
        """A message for each result of a tool, and for the texts between them."""
        num_before = len(self.messages)
        texts: list[str] = []

        def end_texts() -> None:
            if texts:
                self.messages.append({"role": "user", "content": _parts(texts)})
                texts.clear()

        for position, block in enumerate(blocks):
            place = f"{param}[{position}]"
            if block.type == "tool_result":
                end_texts()
                content = "" if block.content is None else block.content
                if isinstance(content, dict):
                    raise invalid_value(f"{place}.content", "a text or a list of blocks is needed.")
                result = self._text(content, f"{place}.content", is_past=True)
                tool_call_id = needed(block.tool_use_id, f"{place}.tool_use_id")
                self.messages.append({"role": "tool", "tool_call_id": tool_call_id, "content": result})
            else:
                texts.append(self._text_of(block, place, is_past=is_past))
        end_texts()
        if len(self.messages) == num_before:
            raise invalid_value(param, "a block is needed.")

    def _add_assistant(self, blocks: Sequence[Block], param: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for position, block in enumerate(blocks):
            place = f"{param}[{position}]"
            match block.type:
                case "text":
                    texts.append(needed(block.text, f"{place}.text"))
                case "thinking":
                    thoughts.append(needed(block.thinking, f"{place}.thinking"))
                case "tool_use":
                    function = {
                        "name": needed(block.name, f"{place}.name"),
                        "arguments": msgspec.json.encode(block.input or {}).decode(),
                    }
                    calls.append({"id": needed(block.id, f"{place}.id"), "type": "function", "function": function})
                case _:
                    self.left_out.append(place)
                    if block.id in self._referred and block.id is not None:
                        texts.append(left_out_text(block.type))  # what refers to it makes sense
        message: dict[str, Any] = {"role": "assistant", "content": _parts(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        self.messages.append(message | ({"tool_calls": calls} if calls else {}))

    def _text(self, content: str | list[Block], param: str, *, is_past: bool) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content
        return _parts([self._text_of(block, f"{param}[{at}]", is_past=is_past) for at, block in enumerate(content)])

    def _text_of(self, block: Block, param: str, *, is_past: bool) -> str:
        """A text, or a line in its place. `is_past`: an answer or a tool was behind it."""
        match block.type:
            case "text":
                return needed(block.text, f"{param}.text")
            case "tool_reference":  # the model is shown all tools
                return needed(block.tool_name, f"{param}.tool_name")
        if not is_past:
            raise unsupported(f"{param}.type", f"only texts are supported here, not {block.type[:40]!r}.")
        self.left_out.append(param)
        return left_out_text(block.type)


def _parts(texts: list[str]) -> str | list[dict[str, str]]:
    """The content of a chat's message: a single text is a string."""
    return "".join(texts) if len(texts) <= 1 else [{"type": "text", "text": text} for text in texts]


def _tool(tool: MessageTool, param: str) -> dict[str, Any]:
    name, parameters = needed(tool.name, f"{param}.name"), needed(tool.input_schema, f"{param}.input_schema")
    fields = {"name": name, "description": tool.description, "parameters": parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _choice(choice: MessageToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": needed(choice.name, "tool_choice.name")}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _template_arguments(request: CountTokensRequest) -> dict[str, Any] | None:
    """Most templates of reasoning models read `enable_thinking`; others ignore it."""
    if request.thinking is None:
        return request.chat_template_kwargs
    thinks = request.thinking.type != "disabled"
    return {"enable_thinking": thinks, "thinking": thinks} | (request.chat_template_kwargs or {})
