"""A request of Anthropic's Messages API as the chat that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from ..http.errors import invalid_value, unsupported
from ..openai.chat_fields import chat_of, left_out_text, needed
from ..openai.request_schema import OneAnswerFields
from .message_schema import (
    Block,
    CountedChat,
    CountTokensRequest,
    MessageChat,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
)

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
_LEFT_OUT: Final = ("stream_options", "container", "mcp_servers", "context_management")
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
    yield from (field for field in _LEFT_OUT if getattr(request, field) not in (None, [], {}))
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
