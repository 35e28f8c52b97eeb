"""A request of the Responses API as the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ..openai_api.errors import invalid_value, unsupported
from ..openai_api.one_answer import OneAnswerFields
from ..openai_api.response_request import (
    InputItem,
    InputPart,
    KeptConversation,
    ReasoningConfig,
    ResponseChat,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextConfig,
)
from ..openai_api.response_schema import (
    AllowedFunctionTools,
    FunctionTool,
    NamedFunctionTool,
    ResponseTerms,
    ShownReasoning,
    ShownText,
    TextFormat,
)
from .chat_fields import chat_of, missing, needed
from .stored_items import conversation_items

NAMES: Final = {  # of a chat's fields: see `renamed`
    "messages.*": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}
_THOUGHTS: Final = "reasoning_content"  # of a message
_LOGPROBS: Final = "message.output_text.logprobs"
_OWN: Final = frozenset({*OneAnswerFields.__annotations__, "max_tokens", "stream_options"})
_REFUSED: Final = {
    "max_tokens": "it is called max_output_tokens here.",
    "use_beam_search": "a response has one answer: leave it out.",
    "return_token_ids": "a response shows none: leave it out.",
    "background": "an answer goes to the request's client, and is not kept: leave it out.",
    "conversation": "conversations are not stored here: send their items as input.",
    "prompt": "prompts are not stored here: send its text as instructions.",
    "context_management": "send the items that count as input.",
    "moderation": "nothing is moderated here.",
}
_REFUSED_UNSTORED: Final = {
    "store": "answers are not stored here: send false, or leave it out.",
    "previous_response_id": "answers are not stored here: send the items of the conversation as input.",
}
MAX_STORED_ITEMS: Final = 8192  # of a conversation


def response_chat(request: ResponsesRequest, kept: Mapping[str, KeptConversation] | None = None) -> ResponseChat:
    """Raises a 400 that names a field of the request.

    `kept`: stored responses that it may refer to, by id; None: none is stored. See `conversation_items`.
    """
    _refuse(request, _REFUSED if kept is not None else {**_REFUSED, **_REFUSED_UNSTORED})
    items, num_earlier = conversation_items(request, kept)
    is_stored = kept is not None and request.store is not False
    if is_stored and len(items) > MAX_STORED_ITEMS:
        raise invalid_value("input", f"of a response that is stored it has at most {MAX_STORED_ITEMS} items.")
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    messages += _Conversation(items, num_earlier).messages
    if not messages:
        raise invalid_value("input", "it has no item, and there are no instructions.")
    tools = [_tool(tool, f"tools[{position}]") for position, tool in enumerate(request.tools or ())]
    choice = _choice(request.tool_choice)
    text, reasoning = request.text or TextConfig(), request.reasoning or ReasoningConfig()
    has_logprobs = _LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    own = {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": [{"type": "function", "function": _given(tool)} for tool in tools] or None,
        "tool_choice": None if request.tool_choice is None else _chat_choice(choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(text.format),
        "verbosity": text.verbosity,
        "reasoning_effort": reasoning.effort,
        "logprobs": has_logprobs or None,
        "top_logprobs": request.top_logprobs if has_logprobs else None,
        "chat_template_kwargs": request.chat_template_kwargs,
        "has_instructions": request.instructions is not None,
        "items": msgspec.json.encode(items) if is_stored else None,
        "terms": ResponseTerms(
            max_output_tokens=request.max_output_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            tools=tools,
            tool_choice=choice,
            text=ShownText(text.format or TextFormat("text"), text.verbosity),
            reasoning=ShownReasoning(reasoning.effort, reasoning.summary),
            top_logprobs=request.top_logprobs or 0,
            metadata=request.metadata or {},
            service_tier="flex" if request.service_tier == "flex" else "default",
            max_tool_calls=request.max_tool_calls,
            user=request.user,
            prompt_cache_key=request.prompt_cache_key,
            safety_identifier=request.safety_identifier,
            store=is_stored,
            previous_response_id=request.previous_response_id,
        ),
    }
    return chat_of(request, own, ResponseChat, besides=_OWN, names=NAMES)


def _refuse(request: ResponsesRequest, refused: Mapping[str, str]) -> None:
    for field, why in refused.items():
        if getattr(request, field) not in (None, False):
            raise unsupported(field, why)


class _Conversation:
    """Converts items to messages of a chat. Consecutive thoughts, texts and calls of the assistant are one message."""

    def __init__(self, items: Sequence[InputItem], num_earlier: int) -> None:
        """`num_earlier`: of the items are not in the request's input."""
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the assistant's message under way, which is the last of the messages
        for position, item in enumerate(items, -num_earlier):
            self._add(item, f"input[{position}]" if position >= 0 else "previous_response_id")
        for message in self.messages:
            if thoughts := message.get(_THOUGHTS):
                message[_THOUGHTS] = "".join(thoughts)

    def _add(self, item: InputItem, param: str) -> None:
        match item.type:
            case "message":
                role = needed(item.role, f"{param}.role")
                content = _content(item.content, f"{param}.content")
                if role == "assistant":
                    self._turn_without("content", "tool_calls")["content"] = content
                else:
                    self._end_with({"role": role, "content": content})
            case "reasoning":
                self._add_reasoning(item, param)
            case "function_call":
                function = {
                    "name": needed(item.name, f"{param}.name"),
                    "arguments": needed(item.arguments, f"{param}.arguments"),
                }
                call_id = needed(item.call_id, f"{param}.call_id")
                calls = self._turn_without().setdefault("tool_calls", [])
                calls.append({"id": call_id, "type": "function", "function": function})
            case "function_call_output":
                call_id = needed(item.call_id, f"{param}.call_id")
                output = _content(item.output, f"{param}.output")
                self._end_with({"role": "tool", "tool_call_id": call_id, "content": output})
            case "item_reference":
                raise unsupported(f"{param}.type", "answers are not stored here: send the item itself (store: false).")
            case _:
                raise unsupported(f"{param}.type", f"there are no items {item.type[:40]!r} here.")

    def _add_reasoning(self, item: InputItem, param: str) -> None:
        parts = item.content if isinstance(item.content, list) else [InputPart("reasoning_text", item.content)]
        thought = "".join(part.text or "" for part in parts)
        if not thought and item.encrypted_content:
            raise unsupported(f"{param}.encrypted_content", "only its server can decrypt it: send the content.")
        if thought:
            self._turn_without("content", "tool_calls").setdefault(_THOUGHTS, []).append(thought)  # joined in the end

    def _turn_without(self, *fields: str) -> dict[str, Any]:
        """The assistant's message under way, or a new one if that has any of the fields already."""
        if self._turn is None or any(self._turn.get(field) for field in fields):
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _end_with(self, message: dict[str, Any]) -> None:
        self._turn = None
        self.messages.append(message)


def _content(content: str | list[InputPart] | None, param: str) -> str | list[dict[str, Any]]:
    """The content of a chat's message: a single text is a string."""
    if content is None:
        raise missing(param)
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{param}[{position}]") for position, part in enumerate(content)]
    return str(parts[0]["text"]) if len(parts) == 1 and "text" in parts[0] else parts


def _part(part: InputPart, param: str) -> dict[str, Any]:
    match part.type:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": needed(part.text, f"{param}.text")}
        case "refusal":
            return {"type": "refusal", "refusal": needed(part.refusal, f"{param}.refusal")}
    raise unsupported(f"{param}.type", f"only texts are supported here, not {part.type[:40]!r}.")


def _tool(tool: ResponseTool, param: str) -> FunctionTool:
    if tool.type != "function":
        raise unsupported(f"{param}.type", f"there are no tools {tool.type[:40]!r} here, only functions.")
    return FunctionTool(needed(tool.name, f"{param}.name"), tool.description, tool.parameters, tool.strict)


def _given(tool: FunctionTool) -> dict[str, Any]:
    """The fields that were sent, in the order in which templates print them."""
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {field: value for field, value in fields.items() if value is not None}


def _choice(requested: Any) -> Any:
    """The choice as the response repeats it."""
    if requested is None:
        return "auto"
    if not isinstance(requested, ResponseToolChoice):
        return requested
    match requested.type:
        case "function":
            return NamedFunctionTool(needed(requested.name, "tool_choice.name"))
        case "allowed_tools":
            tools = needed(requested.tools, "tool_choice.tools")
            names = [_tool(tool, f"tool_choice.tools[{position}]").name for position, tool in enumerate(tools)]
            if requested.mode is None:
                raise missing("tool_choice.mode")
            return AllowedFunctionTools(requested.mode, [{"type": "function", "name": name} for name in names])
    raise unsupported("tool_choice.type", f"there are no tools {requested.type[:40]!r} here, only functions.")


def _chat_choice(choice: Any) -> Any:
    match choice:
        case NamedFunctionTool(name=name):
            return {"type": "function", "function": {"name": name}}
        case AllowedFunctionTools(mode=mode, tools=tools):
            named = [{"type": "function", "function": {"name": tool["name"]}} for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return choice


def _response_format(requested: TextFormat | None) -> dict[str, Any] | None:
    if requested is None or requested.type == "text":
        return None
    if requested.type == "json_object":
        return {"type": "json_object"}
    needed(requested.name, "text.format.name")
    needed(requested.schema, "text.format.schema")
    fields = {field: getattr(requested, field) for field in ("name", "description", "schema", "strict")}
    return {"type": "json_schema", "json_schema": {k: v for k, v in fields.items() if v is not None}}
