"""Grammars of tool calls: what they let through is read as calls whose arguments fit, in each form of calls."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema
import pytest

from motet.router.grammars.call_grammar import CALL_TEXTS, WantedCalls, after_thought, with_calls
from motet.router.grammars.lark_pieces import SPACES
from motet.router.text.answer_format import named_format
from motet.router.text.call_parsing import KnownTools
from motet.router.text.response_reader import Reading, ResponseReader
from motet.tests.rigs.answer_samples import SAMPLES, TOOLS, message_of
from motet.tests.rigs.grammar_matcher import accepts, random_text
from motet.tests.rigs.random_tools import random_tools

NUM_DEFINITIONS = int(os.environ.get("MOTET_NUM_TOOL_DEFINITIONS", "3"))  # of each form of calls; thorough: 100
CALLS = [("f", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})]


def grammar_of(name: str, tools: list[tuple[str, Any]], answer: str | None = None, **options: Any) -> str:
    return with_calls(WantedCalls(CALL_TEXTS[name], tools, **options), answer, {}, SPACES)


def read(name: str, text: str, tools: list[tuple[str, Any]]) -> dict[str, Any]:
    known = KnownTools({tool: schema.get("properties", {}) for tool, schema in tools})
    reader = ResponseReader(Reading(named_format(name), known), "")
    return message_of([*reader.feed(text), *reader.finish()])


@pytest.mark.parametrize("name", CALL_TEXTS)
def test_arguments_of_random_tools_are_read_and_fit(name: str) -> None:
    rng = random.Random(name)
    num_found = 0
    for number in range(NUM_DEFINITIONS):
        tools = random_tools(rng, is_flat=CALL_TEXTS[name].tags is not None, is_ascii=CALL_TEXTS[name].are_keywords)
        tools.append(("any", {"type": "object"}))
        text = random_text(grammar_of(name, tools, must_call=True, is_one=number % 2 == 0), rng, 1200)
        if text is None:  # a string without end
            continue
        num_found += 1
        message = read(name, text, tools)
        assert message.keys() == {"tool_calls"}, text
        for call in message["tool_calls"]:
            jsonschema.validate(call["function"]["arguments"], dict(tools)[call["function"]["name"]])
        assert (number % 2 and not CALL_TEXTS[name].is_alone) or len(message["tool_calls"]) == 1
    assert num_found


@pytest.mark.parametrize("name", CALL_TEXTS)
def test_calls_stand_in_free_text_or_in_the_place_of_an_answer(name: str) -> None:
    rng, form = random.Random(1), CALL_TEXTS[name]
    text = random_text(grammar_of(name, CALLS, must_call=True, is_one=True), rng, 1200)
    assert text is not None
    grammar = grammar_of(name, CALLS, 'start: "none"', must_call=False, is_one=False)
    assert accepts(grammar, text) and accepts(grammar, "none") and not accepts(grammar, "other")
    if not form.trigger:  # of gpt-oss they stand in the place of an answer
        with pytest.raises(ValueError, match="strict"):
            grammar_of(name, CALLS, must_call=False, is_one=False)
        return
    grammar = grammar_of(name, CALLS, must_call=False, is_one=False)
    assert accepts(grammar, f"So: {text}") and accepts(grammar, "text")
    assert not accepts(grammar, f"So: {form.trigger}")
    one = grammar_of(name, CALLS, must_call=False, is_one=True)
    assert accepts(one, f"So: {text}") and not accepts(one, f"{text}{text}")


@pytest.mark.parametrize("name", CALL_TEXTS)
def test_arguments_have_no_integers_that_a_double_does_not_hold(name: str) -> None:
    tool = {"type": "object", "properties": {"n": {"type": "integer", "enum": [2**53 + 1]}}, "required": ["n"]}
    with pytest.raises(ValueError, match="'enum' has 9007199254740993, which a double does not hold"):
        grammar_of(name, [("f", tool)], must_call=True, is_one=True)


def test_thoughts_may_come_first() -> None:
    grammar = after_thought('start: "a"', "<think>", "</think>", "", {})
    assert accepts(grammar, "a") and accepts(grammar, "<think>b</think>\n\na") and not accepts(grammar, "<think>a")
    special = after_thought('start: "a"', "<think>", "</think>", "", {"<think>": 257, "</think>": 258})
    assert accepts(special, 257, "b</think>", 258, "a") and not accepts(special, "<think>b</think>a")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "a"}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
        {"anyOf": [{"type": "object"}]},
    ],
)
def test_what_tags_cannot_say_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this model's form of calls"):
        grammar_of("glm", [("f", schema)], must_call=True, is_one=True)


def test_every_sample_of_a_form_with_a_grammar_is_one_that_it_lets_through() -> None:
    """So that a model is not driven from what it was trained on. Its free text is beside the point."""
    tools = [(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS]
    for name, text in CALL_TEXTS.items():
        sample = SAMPLES[name].text
        calls = sample[sample.index(text.trigger or text.begin.partition("{name}")[0]) :].removesuffix("<|call|>")
        calls = calls.removesuffix("Here.")
        if name == "mistral":
            calls = calls.replace("] [", "][")
        assert accepts(grammar_of(name, tools, must_call=True, is_one=False), calls), json.dumps(calls)
