"""The law: every answer that motet gives is accepted when it comes back, wherever it was cut off."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motet.tests.rigs.router_rig import RouterRig, posted, text_service
from motet.tests.router.test_agent_requests import STRICT
from motet.tests.router.test_tool_calls import TEMPLATE

# Reads arguments as objects, and refuses others.
OBJECTS: Final = TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}",
)
TEMPLATES: Final = {"objects": OBJECTS, "strict": STRICT}
ASK: Final = [{"role": "user", "content": "hello"}]
PARAMETERS: Final = {"type": "object", "properties": {"n": {"type": "integer"}, "city": {"type": "string"}}}
WHOLE: Final = (
    "<think>the fox</think>\nSo, 猫:\n<tool_call>\n"
    '{"name": "f", "arguments": {"n": "3", "city": "a\\n\\"b\\""}}\n</tool_call>'
    '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
BROKEN: Final = '<tool_call>\n{"name": "f", "arguments": {"n": 3,, "city": tru}}\n</tool_call>'
_MARKS: Final = ("<tool", "</tool", "tool_call>", "<th", "</th")


@pytest.fixture(scope="module", params=TEMPLATES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RouterRig:
    rig = RouterRig(tmp_path_factory.mktemp("spool"), text_service(TEMPLATES[request.param]))
    rig.dispatcher.context = 4096
    return rig


async def answered(rig: RouterRig, path: str, **fields: Any) -> Any:
    response = await posted(rig, path, **fields)
    assert response.status_code == 200, (fields, response.text)
    return response.json()


async def chats(rig: RouterRig, num_tokens: int, **more: Any) -> str:
    """Asks, sends the answer back with results of its calls, and returns its content."""
    tools = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
    fields: dict[str, Any] = {"tools": tools, "max_tokens": num_tokens, **more}
    message = (await answered(rig, "/v1/chat/completions", messages=ASK, **fields))["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "5"} for one in message.get("tool_calls") or []]
    await answered(rig, "/v1/chat/completions", messages=[*ASK, message, *results, *ASK], **fields)
    return message["content"] or ""


async def responses(rig: RouterRig, num_tokens: int, **more: Any) -> str:
    tools = [{"type": "function", "name": "f", "parameters": PARAMETERS}, {"type": "custom", "name": "g"}]
    fields: dict[str, Any] = {"tools": tools, "max_output_tokens": num_tokens, **more}
    items = (await answered(rig, "/v1/responses", input=ASK, **fields))["output"]
    results = [
        {"type": f"{one['type']}_output", "call_id": one["call_id"], "output": "5"} for one in items if "call_id" in one
    ]
    await answered(rig, "/v1/responses", input=[*ASK, *items, *results, *ASK], **fields)
    return "".join(part["text"] for one in items if one["type"] == "message" for part in one["content"])


async def messages(rig: RouterRig, num_tokens: int, **more: Any) -> str:
    tools = [{"name": name, "input_schema": PARAMETERS} for name in ("f", "g")]
    fields: dict[str, Any] = {"tools": tools, "max_tokens": num_tokens, **more}
    blocks = (await answered(rig, "/v1/messages", messages=ASK, **fields))["content"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": one["id"], "content": "5"} for one in blocks if one["type"] == "tool_use"
    ]
    turns = [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [*results, {"type": "text", "text": "on"}]},
    ]
    await answered(rig, "/v1/messages", messages=[*ASK, *turns], **fields)
    return "".join(one["text"] for one in blocks if one["type"] == "text")


DOORS: Final = (chats, responses, messages)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("text", [WHOLE, BROKEN], ids=["whole", "broken"])
async def test_answers_cut_anywhere_come_back(rig: RouterRig, door: Any, text: str) -> None:
    rig.dispatcher.answer = rig.ids(text)
    step = 1 if rig.text.forms.takes_any_turn else 5  # at every token; of the strict template at some
    for num_tokens in range(1, len(rig.dispatcher.answer) + 1, step):
        content = await door(rig, num_tokens)
        assert not any(mark in content for mark in _MARKS), (num_tokens, content)


@pytest.mark.parametrize("number", ["1e999", "9" * 400, "[" * 125 + "]" * 125, "[" * 500 + "]" * 500])
@pytest.mark.parametrize("door", DOORS)
async def test_answers_with_extreme_values_come_back(rig: RouterRig, door: Any, number: str) -> None:
    rig.dispatcher.answer = rig.ids(f'<tool_call>{{"name": "f", "arguments": {{"n": {number}}}}}</tool_call>')
    await door(rig, 2000)


@pytest.mark.parametrize("door", DOORS)
async def test_answers_cut_by_a_stop_string_come_back(rig: RouterRig, door: Any) -> None:
    rig.dispatcher.answer = rig.ids(WHOLE)
    stop = "stop_sequences" if door is messages else "stop"
    for string in ('"name"', "city", "\n</tool", "arguments"):
        content = await door(rig, 500, **{stop: [string]})
        assert not any(mark in content for mark in _MARKS), (string, content)


PIECES: Final = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": ',
        '{"name": "g", "arguments": ',
        '{"input": "a', "{", "}", '"n": ', "3", "1e999", '"\\ud800"', "[", "]", ",", "null", '"', "\\",
        "a fox", "\n", "猫",
    ]
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(PIECES, min_size=1, max_size=12), num_tokens=st.integers(1, 60), door=st.sampled_from(DOORS))
async def test_any_answer_comes_back(rig: RouterRig, pieces: list[str], num_tokens: int, door: Any) -> None:
    rig.dispatcher.answer = rig.ids("".join(pieces))
    await door(rig, num_tokens)


@pytest.mark.parametrize("arguments", ["null", "[]", " ", "", '{"city": "Li', '{"city":"a\\qb"}', None])
async def test_broken_arguments_go_on(rig: RouterRig, arguments: str | None) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1"} | {"content": "x"},
    ]
    response = await posted(rig, "/v1/chat/completions", messages=turns)
    items = [*ASK, {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}]
    items.append({"type": "function_call_output", "call_id": "c1", "output": "x"})
    other = await posted(rig, "/v1/responses", input=items)
    assert (response.status_code, other.status_code) == (200, 200), (response.text, other.text)
    is_empty = (arguments or "").strip() in ("", "null")
    takes_text = rig.text.forms.takes_text_arguments
    assert ("input[1].arguments" in other.headers.get("x-motet-warning", "")) is not (is_empty or takes_text)
    name = "messages[1].tool_calls[0].function.arguments"
    assert (name in response.headers.get("x-motet-warning", "")) is not (is_empty or takes_text)
