"""Items of stored conversations: what a request refers to of them, and how they are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from ..http.errors import NoSuchResponse, invalid_value
from ..openai.chat_fields import needed
from . import response_schema as schema
from .response_schema import InputItem, InputPart, KeptConversation, ResponsesRequest

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
    """None: no router of motet made the id."""
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
