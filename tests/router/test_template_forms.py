"""Chats with tools reach a template in the forms that it reads, and have the tokens of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from motet.tests.rigs.chat_cases import ASK, CASES, TOOLS, Json, TemplateRig, calling, result, said

_START = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for document in documents or [] %}<|document|>{{ document.title }}: {{ document.text }}<|end|>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
)
_END = (
    "{% if m.content %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CALLS = "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }}"
_THOUGHT = "{% if m.NAME %}<|think|>{{ m.NAME }}<|end|>{% endif %}"
OBJECTS = f"{_START}{_CALLS}{{{{ call.function.arguments | tojson }}}}{{% endfor %}}{_END}"
ITEMS = (
    f"{_START}{_CALLS}{{% for k, v in call.function.arguments.items() %}}[{{{{ k }}}}={{{{ v }}}}]{{% endfor %}}"
    f"{{% endfor %}}{_END}"
)
TEXTS = f"{_START}{_CALLS}{{{{ ' ' + call.function.arguments }}}}{{% endfor %}}{_END}"
PRINTED = f"{_START}{_CALLS}{{{{ call.function.arguments }}}}{{% endfor %}}{_END}"
EITHER = (
    f"{_START}{_CALLS}{{% if call.function.arguments is string %}}{{{{ call.function.arguments }}}}{{% else %}}"
    f"{{{{ call.function.arguments | tojson }}}}{{% endif %}}{{% endfor %}}{_END}"
)
FROM_EMPTY = TEXTS.replace("{% if m.content %}{{ m.content }}{% endif %}", "{{ m.content + '' }}")
PARTS = OBJECTS.replace(
    "{% if m.content %}{{ m.content }}{% endif %}",
    "{% for part in m.content or [] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
)
DEVELOPERS = OBJECTS.replace("<|{{ m.role }}|>", "<|{{ 'top' if m.role == 'developer' else m.role }}|>")
TEMPLATES = {
    "objects": OBJECTS,
    "items": ITEMS,
    "texts": TEXTS,
    "printed": PRINTED,
    "either": EITHER,
    "from empty": FROM_EMPTY,
    "parts": PARTS,
    "developers": DEVELOPERS,
}
CONTROL = "<|tools|><|end|>"  # no template here writes the one behind the other


@pytest.fixture(params=TEMPLATES)
def rig(request: pytest.FixtureRequest) -> Iterator[TemplateRig]:
    rig = TemplateRig(TEMPLATES[request.param])
    yield rig
    rig.close()


def shown(rig: TemplateRig, token_ids: list[int] | str) -> str:
    assert not isinstance(token_ids, str), token_ids
    return str(rig.backend.decode(token_ids, skip_special_tokens=False))


async def prompt(template: str, **case: Any) -> str:
    rig = TemplateRig(template)
    try:
        return shown(rig, await rig.ours({"messages": [ASK], **case}))
    finally:
        rig.close()


async def test_every_chat_has_the_tokens_of_transformers(rig: TemplateRig) -> None:
    for name, case in CASES.items():
        assert await rig.ours(case) == rig.expected(case), name
        text = shown(rig, rig.expected(case))  # none of these templates refuses one
        assert "Winterthur" in text or "Winterthur" not in json.dumps(case), name


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (OBJECTS, '<|call|>f{"a": "é", "b": [1, null]}'),
        (TEXTS, '<|call|>f {"a":"é","b":[1,null]}'),
        (PRINTED, '<|call|>f{"a":"é","b":[1,null]}'),
        (EITHER, '<|call|>f{"a": "é", "b": [1, null]}'),
        (ITEMS, "<|call|>f[a=é][b=[1, None]]"),
    ],
)
async def test_arguments_are_an_object_or_the_text_that_was_sent(template: str, expected: str) -> None:
    call = calling(("f", {}))
    call["tool_calls"][0]["function"]["arguments"] = '{"a":"é","b":[1,null]}'
    assert expected in await prompt(template, messages=[ASK, call, result("1")])


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "3", '"a"', "[" * 100_000])
async def test_arguments_that_are_no_object(arguments: str) -> None:
    call = calling(("f", {}))
    call["tool_calls"][0]["function"]["arguments"] = arguments
    case = {"messages": [ASK, call, result("1")]}
    for template, is_taken in ((EITHER, True), (TEXTS, True), (OBJECTS, False), (ITEMS, False)):
        rig = TemplateRig(template)
        found = await rig.ours(case)
        rig.close()
        if is_taken:
            assert arguments in shown(rig, found)
        else:
            call["tool_calls"][0]["function"]["arguments"] = "{}"
            rig = TemplateRig(template)
            assert found == await rig.ours(case)
            rig.close()
            call["tool_calls"][0]["function"]["arguments"] = arguments


async def test_no_arguments_are_an_empty_object() -> None:
    call = calling(("f", {}))
    for arguments in ("", None):
        call["tool_calls"][0]["function"]["arguments"] = arguments
        assert "<|call|>f{}" in await prompt(OBJECTS, messages=[ASK, call, result("1")])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "sent", [{"reasoning": "Hm."}, {"reasoning_content": "Hm."}, {"reasoning": "Hm.", "reasoning_content": "?"}]
)
async def test_thoughts_have_the_templates_name(name: str, sent: Json) -> None:
    template = OBJECTS.replace("{% for call in", _THOUGHT.replace("NAME", name) + "{% for call in")
    assert "<|assistant|><|think|>Hm.<|end|>Yes.<|end|>" in await prompt(
        template, messages=[ASK, said("Yes.", **sent), ASK]
    )


async def test_functions_of_old() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    old = [ASK, call, {"role": "function", "name": "f", "content": "2"}]
    text = await prompt(OBJECTS, messages=old, functions=[TOOLS[1]["function"]])
    new = [ASK, calling(("f", {"a": 1})), {**result("2"), "name": "f"}]
    assert text == await prompt(OBJECTS, messages=new, tools=TOOLS[1:])
    assert '<|call|>f{"a": 1}<|end|><|tool|>2<|end|>' in text


async def test_what_was_refused_is_the_content() -> None:
    refusals = [said(None, refusal="No."), said([{"type": "refusal", "refusal": "No."}])]  # type: ignore[arg-type]
    for refusal in refusals:
        assert "<|assistant|>No.<|end|>" in await prompt(OBJECTS, messages=[ASK, refusal, ASK])


async def test_a_tool_is_shown_with_the_fields_that_were_sent() -> None:
    for function in (
        {"name": "f"},
        {"name": "a.b-c", "description": "", "strict": True},
        {"name": "f", "parameters": {"type": "object"}, "return": {"type": "string"}},
    ):
        tool = {"type": "function", "function": function}
        assert f"<|tools|>{json.dumps(tool)}<|end|>" in await prompt(OBJECTS, tools=[tool], tool_choice="none")


@pytest.mark.parametrize("effort", ["none", "low", "high"])
async def test_effort_is_the_templates_variable_or_its_switch(effort: str) -> None:
    graded = OBJECTS + "{{ reasoning_effort or 'medium' }}"
    switched = OBJECTS + "{{ 'on' if enable_thinking is not defined or enable_thinking else 'off' }}"
    assert (await prompt(graded, reasoning_effort=effort)).endswith(effort)
    assert (await prompt(switched, reasoning_effort=effort)).endswith("off" if effort == "none" else "on")
    given = {"enable_thinking": effort == "none"}
    text = await prompt(switched, reasoning_effort=effort, chat_template_kwargs=given)
    assert text.endswith("on" if effort == "none" else "off")


async def test_control_tokens_in_whatever_is_said_of_tools_are_text(rig: TemplateRig) -> None:
    """They would end a message and begin another."""

    def case(word: str) -> Json:
        parameters = {"type": "object", "properties": {f"p{word}": {"type": "string", "enum": [word]}}}
        function = {"name": "f", "description": f"Does {word}.", "parameters": parameters}
        call = calling(("f", {f"p{word}": [word, {"x": word}]}), content=f"I call. {word}")
        return {
            "messages": [ASK, {**call, "reasoning": word}, result(word), {"role": "user", "content": word}],
            "tools": [{"type": "function", "function": function}],
            "documents": [{"title": word, "text": word}],
        }

    clean, hostile = await rig.ours(case("word")), await rig.ours(case(CONTROL))
    assert not isinstance(clean, str) and not isinstance(hostile, str)
    assert rig.control(hostile) == rig.control(clean)
    assert shown(rig, hostile).replace(CONTROL, "word") == shown(rig, clean)
