"""A request of Anthropic's Messages API as the chat that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..anthropic_api.message_request import (
    Block,
    CountedChat,
    CountTokensRequest,
    MessageChat,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
)
from ..openai_api.errors import invalid_value, unsupported
from ..openai_api.one_answer import OneAnswerFields
from .chat_fields import chat_of, needed

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
    **dict.fromkeys(("stream_options", "container", "mcp_servers", "context_management"), "leave it out."),
}
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
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for position, turn in enumerate(request.messages):
        param = f"messages[{position}].content"
        blocks = [Block("text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        messages += _of_user(blocks, param) if turn.role == "user" else [_of_assistant(blocks, param)]
    config, choice = request.output_config or OutputConfig(), request.tool_choice
    return {
        "messages": messages,
        "stop": request.stop_sequences or None,
        "user": None if request.metadata is None else request.metadata.user_id,
        "tools": [_tool(tool, f"tools[{position}]") for position, tool in enumerate(request.tools or ())] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": None if config.format is None else _response_format(config.format.schema),
        "reasoning_effort": config.effort,
        "chat_template_kwargs": _template_arguments(request),
        "thinking_token_budget": None if request.thinking is None else request.thinking.budget_tokens,
    }


def _of_user(blocks: Sequence[Block], param: str) -> list[dict[str, Any]]:
    """A message for each result of a tool, and for the texts between them."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []

    def end_texts() -> None:
        if texts:
            messages.append({"role": "user", "content": _parts(texts)})
            texts.clear()

    for position, block in enumerate(blocks):
        place = f"{param}[{position}]"
        match block.type:
            case "text":
                texts.append(needed(block.text, f"{place}.text"))
            case "tool_result":
                end_texts()
                result = "" if block.content is None else _text(block.content, f"{place}.content")
                tool_call_id = needed(block.tool_use_id, f"{place}.tool_use_id")
                messages.append({"role": "tool", "tool_call_id": tool_call_id, "content": result})
            case _:
                raise unsupported(f"{place}.type", f"a user's content has no {block.type[:40]!r} here, only texts.")
    end_texts()
    if not messages:
        raise invalid_value(param, "a block is needed.")
    return messages


def _of_assistant(blocks: Sequence[Block], param: str) -> dict[str, Any]:
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
                arguments = msgspec.json.encode(needed(block.input, f"{place}.input")).decode()
                function = {"name": needed(block.name, f"{place}.name"), "arguments": arguments}
                calls.append({"id": needed(block.id, f"{place}.id"), "type": "function", "function": function})
            case _:
                raise unsupported(f"{place}.type", f"an assistant's content has no {block.type[:40]!r} here.")
    message: dict[str, Any] = {"role": "assistant", "content": _parts(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _text(content: str | list[Block], param: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    for position, block in enumerate(content):
        if block.type != "text":
            raise unsupported(f"{param}[{position}].type", f"there is no {block.type[:40]!r} here, only texts.")
    return _parts([needed(block.text, f"{param}[{position}].text") for position, block in enumerate(content)])


def _parts(texts: list[str]) -> str | list[dict[str, str]]:
    """The content of a chat's message: a single text is a string."""
    return "".join(texts) if len(texts) <= 1 else [{"type": "text", "text": text} for text in texts]


def _tool(tool: MessageTool, param: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported(f"{param}.type", f"there are no tools {tool.type[:40]!r} here, only your own.")
    parameters = needed(tool.input_schema, f"{param}.input_schema")
    fields = {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}
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
