"""A request of the Responses API as the chat that it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from pydantic_core import from_json

from ..grammars.call_grammar import INPUT
from ..http.errors import NoSuchResponse, invalid_value, unsupported
from ..openai.chat_fields import chat_of, left_out_text, missing, needed
from ..openai.request_schema import InputFormat, OneAnswerFields
from ..responses import response_schema as schema
from .response_schema import (
    AllowedFunctionTools,
    CustomTool,
    FunctionTool,
    InputItem,
    InputPart,
    KeptConversation,
    NamedCustomTool,
    NamedFunctionTool,
    ReasoningConfig,
    ResponseChat,
    ResponsesRequest,
    ResponseTerms,
    ResponseToolChoice,
    ShownReasoning,
    ShownText,
    TextConfig,
    TextFormat,
)

# Items of stored conversations: what a request refers to of them, and how they are shown.

_ITEM_ID: Final = re.compile(r"[a-z]+_([A-Za-z0-9_-]{1,64})_(i?)([0-9]{1,6})", re.ASCII)
_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_PAGE_BYTES: Final = 1 << 20
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_item: Final = msgspec.json.Decoder(InputItem).decode


class ItemPlace(NamedTuple):
    """Where an item is, as its id says: `msg_…_0` is the first of a response's output."""

    response_id: str
    is_input: bool  # `msg_…_i0`: it is one that the response answers
    number: int  # from 0 on


def item_place(item_id: str) -> ItemPlace | None:
    """None: no router of motet made the id.

    >>> item_place("msg_" + "0" * 32 + "_i1")
    ItemPlace(response_id='resp_00000000000000000000000000000000', is_input=True, number=1)
    >>> item_place("msg_of_another_server") is None
    True
    """
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else ItemPlace(f"resp_{match[1]}", bool(match[2]), int(match[3]))


def conversation_items(
    request: ResponsesRequest, conversations: Mapping[str, KeptConversation] | None
) -> tuple[Sequence[InputItem], int]:
    """All items of the conversation that the request goes on with, and how many of them come before its input.

    `conversations`: stored responses, by id; None: there are none, and no item is looked up. Raises NoSuchResponse,
    with the ids of all responses that the request refers to, if one of them is not there. Raises a 400 for an item
    that is referred to twice: many short references could otherwise stand for a long item each.
    """
    input_items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    if conversations is None:
        return input_items, 0
    params, places, seen = dict[str, str](), dict[int, ItemPlace](), set[ItemPlace]()
    if request.previous_response_id is not None:
        params[request.previous_response_id] = "previous_response_id"
    for position, item in enumerate(input_items):
        if item.type == "item_reference":
            param = f"input[{position}].id"
            place = item_place(needed(item.id, param))
            if place is None:
                raise NoSuchResponse(param)
            if place in seen:
                raise invalid_value(param, "an item before it refers to the same: leave one out.")
            seen.add(place)
            places[position] = place
            params.setdefault(place.response_id, param)
    for response_id, param in params.items():
        if response_id not in conversations:
            raise NoSuchResponse(param, params)
    new_items = [
        _referred(conversations, places[position], position) if position in places else item
        for position, item in enumerate(input_items)
    ]
    if request.previous_response_id is None:
        return new_items, 0
    previous = conversations[request.previous_response_id]
    earlier = [*previous.input, *previous.response.output]
    return [*earlier, *new_items], len(earlier)


def input_page(
    conversation: bytes, *, response_id: str, after: str | None, limit: int, is_ascending: bool
) -> tuple[list[schema.InputItemShown], bool]:
    """Items of a stored conversation, and whether more follow: at most `limit`, and few where they are long.

    `after`: id of the last one of the page before. Raises 400 if that is none of the response's.
    """
    items = _items(conversation)
    positions = range(len(items)) if is_ascending else range(len(items) - 1, -1, -1)
    if after is not None:
        place = item_place(after)
        if place is None or place[:2] != (response_id, True) or place.number >= len(items):
            raise invalid_value("after", "it is the id of no such item.")
        positions = positions[positions.index(place.number) + 1 :]
    end, num_bytes = response_id.partition("_")[2], 0
    page = list[schema.InputItemShown]()
    for position in positions[:limit]:
        num_bytes += len(memoryview(items[position]))
        if page and num_bytes > _PAGE_BYTES:
            break
        item = _item(items[position])
        page.append(_item_view(item, f"{_PREFIXES[item.type]}_{end}_i{position}"))
    return page, len(positions) > len(page)


def _referred(conversations: Mapping[str, KeptConversation], place: ItemPlace, position: int) -> InputItem:
    conversation = conversations[place.response_id]
    items = conversation.input if place.is_input else conversation.response.output
    if place.number >= len(items):
        raise NoSuchResponse(f"input[{position}].id")
    return items[place.number]


def _item_view(item: InputItem, item_id: str) -> schema.InputItemShown:
    """An item that was taken has all that its type needs."""
    match item.type:
        case "function_call":
            return schema.FunctionCallItem(item_id, "completed", item.call_id or "", item.name or "", _arguments(item))
        case "custom_tool_call":
            return schema.CustomCallItem(item_id, "completed", item.call_id or "", item.name or "", item.input or "")
        case "function_call_output" | "custom_tool_call_output":
            output = item.output or ""
            texts = [schema.InputText(part.text or "") for part in output if isinstance(part, InputPart)]
            is_custom = item.type == "custom_tool_call_output"
            kind = schema.CustomCallOutputItem if is_custom else schema.CallOutputItem
            return kind(item_id, item.call_id or "", output if isinstance(output, str) else texts)
        case "reasoning":
            thoughts = [schema.ReasoningText(part.text or "") for part in _parts(item.content)]
            return schema.ReasoningItem(item_id, "completed", thoughts)
    role = item.role or "user"
    return schema.MessageItem(item_id, role, [_shown_part(part, role) for part in _parts(item.content)])


def _arguments(item: InputItem) -> str:
    arguments = item.arguments or ""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _parts(content: str | list[InputPart] | None) -> Sequence[InputPart]:
    return [InputPart("text", content)] if isinstance(content, str) else content or ()


def _shown_part(part: InputPart, role: str) -> schema.InputText | schema.OutputText | schema.RefusalText:
    if part.type == "refusal":
        return schema.RefusalText(part.refusal or "")
    return schema.OutputText(part.text or "") if role == "assistant" else schema.InputText(part.text or "")


# Custom tools of OpenAI's Responses API: tools whose input is a text, as functions with one argument.


def custom_function(tool: CustomTool) -> dict[str, Any]:
    """The fields of the function that the model is shown, in the order in which templates print them.

    A grammar is shown behind the description, as it is the only description of the input that many have.
    """
    form, description = tool.format, tool.description or ""
    if form is not None and form.definition is not None:
        grammar = f"Its {INPUT} is of this {form.syntax} grammar:\n{form.definition}"
        description = f"{description}\n\n{grammar}" if description else grammar
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"name": tool.name, "description": description, "parameters": parameters}


def input_of(arguments: str) -> str:
    """The input in the arguments of a call; of one that was cut off what there is of it.

    >>> input_of('{"input": "half an ans')
    'half an ans'
    >>> input_of('[1]')
    ''
    """
    try:
        document = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = document.get(INPUT) if isinstance(document, dict) else None
    return text if isinstance(text, str) else ""


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
}
_REFUSED_UNSTORED: Final = {
    "store": "answers are not stored here: send false, or leave it out.",
    "previous_response_id": "answers are not stored here: send the items of the conversation as input.",
}
_LEFT_OUT: Final = ("context_management", "moderation")
_INCLUDABLE: Final = frozenset(  # what answers have anyway, or of items that there never are here
    {
        _LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
_TOOL_TYPES: Final = ("function", "custom")
_CALLS: Final = ("function_call", "custom_tool_call")
_ANSWERS: Final = ("_output", "_response")  # end the types of items that refer to others
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")
_KNOWN: Final = frozenset({"message", "reasoning", "item_reference", *_CALLS, *_OUTPUTS})
MAX_STORED_ITEMS: Final = 8192  # of a conversation


def response_chat(
    request: ResponsesRequest, conversations: Mapping[str, KeptConversation] | None = None
) -> ResponseChat:
    """Raises a 400 that names a field of the request.

    `conversations`: stored responses that it may refer to, by id; None: none is stored. See `conversation_items`.
    """
    _refuse(request, _REFUSED if conversations is not None else {**_REFUSED, **_REFUSED_UNSTORED})
    items, num_earlier = conversation_items(request, conversations)
    is_stored = conversations is not None and request.store is not False
    if is_stored and len(items) > MAX_STORED_ITEMS:
        raise invalid_value("input", f"of a response that is stored it has at most {MAX_STORED_ITEMS} items.")
    begin = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    conversation = _Conversation(items, num_earlier, begin)
    messages, items = conversation.messages, conversation.items
    if not messages:
        raise invalid_value("input", "it has no item, and there are no instructions.")
    tools = _tools(request)
    choice = _choice(request.tool_choice)
    text, reasoning = request.text or TextConfig(), request.reasoning or ReasoningConfig()
    has_logprobs = _LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    chat_fields = {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": [{"type": "function", "function": _function(tool)} for tool in tools] or None,
        "custom_tools": {
            tool.name: tool.format or InputFormat("text") for tool in tools if isinstance(tool, CustomTool)
        },
        "left_out": [*_left_out(request), *conversation.left_out],
        "places": conversation.places,
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
    return chat_of(request, chat_fields, ResponseChat, besides=_OWN, names=NAMES)


def _refuse(request: ResponsesRequest, refused: Mapping[str, str]) -> None:
    for field, why in refused.items():
        if getattr(request, field) not in (None, False):
            raise unsupported(field, why)


def _left_out(request: ResponsesRequest) -> Iterator[str]:
    """Fields and tools that only another server knows."""
    yield from (field for field in _LEFT_OUT if getattr(request, field) not in (None, [], {}))
    if request.truncation == "auto":
        yield "truncation"
    yield from (f"include[{at}]" for at, name in enumerate(request.include or ()) if name not in _INCLUDABLE)
    yield from (f"tools[{at}]" for at, tool in enumerate(request.tools or ()) if tool.type not in _TOOL_TYPES)
    if isinstance(request.tool_choice, ResponseToolChoice):
        allowed = request.tool_choice.tools or ()
        yield from (f"tool_choice.tools[{at}]" for at, tool in enumerate(allowed) if tool.type not in _TOOL_TYPES)


class _Conversation:
    """Converts items to messages of a chat. Consecutive thoughts, texts and calls of the assistant are one message."""

    def __init__(self, items: Sequence[InputItem], num_earlier: int, begin: Sequence[dict[str, Any]]) -> None:
        """`num_earlier`: of the items are not in the request's input. `begin`: messages before theirs."""
        self.messages: list[dict[str, Any]] = [*begin]
        self.items: list[InputItem] = []  # without those that are left out
        self.left_out: list[str] = []
        self.places: dict[str, str] = {}
        self._turn: dict[str, Any] | None = None  # the assistant's message under way, which is the last of the messages
        self._num_past = max((at for at, item in enumerate(items, 1) if _is_of_assistant(item)), default=0)
        referred = {item.call_id or item.approval_request_id for item in items if item.type.endswith(_ANSWERS)} - {None}
        for number, item in enumerate(items):
            param = f"input[{number - num_earlier}]" if number >= num_earlier else "previous_response_id"
            if item.type in _KNOWN:
                visible_item = item
            else:
                self.left_out.append(param)
                if item.type.endswith(_ANSWERS) or referred.isdisjoint((item.id, item.call_id)):
                    continue
                visible_item = InputItem(
                    role="assistant", content=left_out_text(item.type)
                )  # what refers to it makes sense
            self._add(visible_item, param, is_past=number < self._num_past)
            self.items.append(visible_item)
        for message in self.messages:
            if thoughts := message.get(_THOUGHTS):
                message[_THOUGHTS] = "".join(thoughts)

    def _add(self, item: InputItem, param: str, *, is_past: bool) -> None:
        match item.type:
            case "message":
                role = needed(item.role, f"{param}.role")
                content = self._content(item.content, f"{param}.content", is_past=is_past)
                if role == "assistant":
                    self._turn_without("content", "tool_calls")["content"] = content
                else:
                    self._end_with({"role": role, "content": content})
            case "reasoning":
                self._add_reasoning(item, param)
            case "function_call" | "custom_tool_call":
                call_id = needed(item.call_id, f"{param}.call_id")
                name, arguments = needed(item.name, f"{param}.name"), item.arguments
                if item.type == "custom_tool_call":
                    arguments = {INPUT: needed(item.input, f"{param}.input")}
                if isinstance(arguments, dict):
                    arguments = msgspec.json.encode(arguments).decode()
                calls = self._turn_without().setdefault("tool_calls", [])
                self.places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}].function"] = param
                calls.append(
                    {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or ""}}
                )
            case "function_call_output" | "custom_tool_call_output":
                call_id = needed(item.call_id, f"{param}.call_id")
                if isinstance(item.output, dict):
                    raise invalid_value(f"{param}.output", "a text or a list of parts is needed.")
                output = self._content(item.output, f"{param}.output", is_past=True)
                self._end_with({"role": "tool", "tool_call_id": call_id, "content": output})
            case "item_reference":
                raise unsupported(f"{param}.type", "answers are not stored here: send the item itself (store: false).")

    def _add_reasoning(self, item: InputItem, param: str) -> None:
        parts = item.content if isinstance(item.content, list) else [InputPart("reasoning_text", item.content)]
        thought = "".join(part.text or "" for part in parts)
        if not thought and item.encrypted_content:  # which only its server can decrypt
            self.left_out.append(param)
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

    def _content(
        self, content: str | list[InputPart] | None, param: str, *, is_past: bool
    ) -> str | list[dict[str, Any]]:
        """The content of a chat's message: a single text is a string. `is_past`: an answer or a tool was behind it."""
        if content is None:
            raise missing(param)
        if isinstance(content, str):
            return content
        parts = [self._part(part, f"{param}[{position}]", is_past=is_past) for position, part in enumerate(content)]
        return str(parts[0]["text"]) if len(parts) == 1 and "text" in parts[0] else parts

    def _part(self, part: InputPart, param: str, *, is_past: bool) -> dict[str, Any]:
        match part.type:
            case "input_text" | "output_text" | "text":
                return {"type": "text", "text": needed(part.text, f"{param}.text")}
            case "refusal":
                return {"type": "refusal", "refusal": needed(part.refusal, f"{param}.refusal")}
        if not is_past:
            raise unsupported(f"{param}.type", f"only texts are supported here, not {part.type[:40]!r}.")
        self.left_out.append(param)
        return {"type": "text", "text": left_out_text(part.type)}


def _is_of_assistant(item: InputItem) -> bool:
    return item.role == "assistant" if item.type == "message" else item.type not in _OUTPUTS


def _tools(request: ResponsesRequest) -> list[FunctionTool | CustomTool]:
    """Without those that are left out."""
    tools: list[FunctionTool | CustomTool] = []
    for position, tool in enumerate(request.tools or ()):
        param = f"tools[{position}]"
        if tool.type == "function":
            name = needed(tool.name, f"{param}.name")
            tools.append(FunctionTool(name, tool.description, tool.parameters, tool.strict))
        elif tool.type == "custom":
            if tool.format is not None and tool.format.type == "grammar":
                needed(tool.format.syntax, f"{param}.format.syntax")
                needed(tool.format.definition, f"{param}.format.definition")
            tools.append(CustomTool(needed(tool.name, f"{param}.name"), tool.description, tool.format))
    return tools


def _function(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    """The fields that were sent, in the order in which templates print them."""
    if isinstance(tool, CustomTool):
        return custom_function(tool)
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
        case "custom":
            return NamedCustomTool(needed(requested.name, "tool_choice.name"))
        case "allowed_tools":
            tools = needed(requested.tools, "tool_choice.tools")
            named = [
                {"type": tool.type, "name": needed(tool.name, f"tool_choice.tools[{position}].name")}
                for position, tool in enumerate(tools)
                if tool.type in _TOOL_TYPES
            ]
            if requested.mode is None:
                raise missing("tool_choice.mode")
            if not named:
                raise unsupported(
                    "tool_choice.tools", "all of them are left out: functions and custom tools are served."
                )
            return AllowedFunctionTools(requested.mode, named)
    raise unsupported(
        "tool_choice.type", f"tools {requested.type[:40]!r} are left out here: functions and custom tools are served."
    )


def _chat_choice(choice: Any) -> Any:
    match choice:
        case NamedFunctionTool(name=name) | NamedCustomTool(name=name):
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
