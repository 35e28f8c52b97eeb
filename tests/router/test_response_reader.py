"""Answers taken apart: each format against transformers' own parser, cut everywhere, and at what cost."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given as given_values
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from motet.router.text.answer_format import FORMATS, NO_FORMAT, answer_format, known_format, named_format
from motet.router.text.call_parsing import Call, KnownTools
from motet.router.text.growing_calls import GrowingArguments
from motet.router.text.response_reader import MAX_HELD_CHARS, Piece, Reading, ResponseReader
from motet.tests.rigs.answer_samples import SAMPLES, TOOLS, message_of, message_of_sample, reader_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>'


def read(name: str, *texts: str, prompt: str = "", **options: Any) -> dict[str, Any]:
    reader = reader_of(name, prompt, **options)
    pieces: list[Piece] = []
    for text in texts:
        pieces += reader.feed(text)
    return message_of([*pieces, *reader.finish()])


def test_every_format_has_a_sample() -> None:
    assert SAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_is_read_as_transformers_reads_it(name: str) -> None:
    sample = SAMPLES[name]
    found = read(name, sample.text, prompt=sample.prompt)
    assert found == message_of_sample(sample)
    if sample.is_alike:
        assert found == parse_response(sample.text, FORMATS[name], prefix=sample.prompt, tools=TOOLS)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_shown_follows_from_the_text_alone(name: str) -> None:
    """Cut in two at every character, and character by character; and what is out at each place is the same, too."""
    sample = SAMPLES[name]
    reader, out, shown = reader_of(name, sample.prompt), [], []
    for char in sample.text:
        out += reader.feed(char)
        shown.append(message_of(out))
    whole = message_of([*out, *reader.finish()])
    assert whole == message_of_sample(sample)
    for cut in range(1, len(sample.text)):
        reader = reader_of(name, sample.prompt)
        first = reader.feed(sample.text[:cut])
        assert message_of(first) == shown[cut - 1]
        assert reader.copy().finish() == reader.copy().finish()
        assert message_of([*first, *reader.feed(sample.text[cut:]), *reader.finish()]) == whole


@pytest.mark.parametrize("name", SAMPLES)
def test_marks_of_a_cut_answer_are_not_content(name: str) -> None:
    """Of no call, and of no thought: all that is shown is the begin of what the whole answer shows.

    Only brackets that may as well be the begin of JSON or a list are.
    """
    sample = SAMPLES[name]
    whole = message_of_sample(sample)
    for cut in range(1, len(sample.text)):
        reader = reader_of(name, sample.prompt)
        found = message_of([*reader.feed(sample.text[:cut]), *reader.finish(is_cut=True)])
        for part in ("content", "reasoning_content"):
            shown = re.sub(r'[\[{]\s*(?:"\w*"?\s*:?)?\Z', "", found.get(part) or "")
            assert (whole.get(part) or "").startswith(shown), (sample.text[:cut], found)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_cut_answer_has_whole_calls_and_the_begin_of_one(name: str) -> None:
    """Of those that are written as JSON; of others only whole ones."""
    sample = SAMPLES[name]
    calls = message_of_sample(sample).get("tool_calls", [])
    num_cut = 0
    for cut in range(len(sample.text)):
        found = read(name, sample.text[:cut], prompt=sample.prompt).get("tool_calls", [])
        for one, call in zip(found, calls, strict=False):
            given = one["function"]["arguments"]
            if one is found[-1] and isinstance(given, str):
                assert one["function"]["name"] == call["function"]["name"]
                assert sample.text[:cut].endswith(given) or not given
                num_cut += 1
            else:
                assert one == call
    is_json = name in ("hermes", "llama-json", "mistral", "mistral-args", "gpt-oss", "deepseek", "deepseek-3.1")
    assert bool(num_cut) == is_json


@pytest.mark.parametrize("seed", range(20))
def test_texts_of_marks_are_read_alike_however_they_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    for name, sample in SAMPLES.items():
        parts = [sample.text[a : a + chance.randint(1, 30)] for a in chance.choices(range(len(sample.text)), k=12)]
        text = "".join(parts)
        cuts = sorted(chance.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(name, *pieces) == read(name, text) == read(name, *text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call>",
        "<tool_call>{not json</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {n: 3}}</tool_call>',
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        "<tool_call>[1, null]</tool_call>",
        f"<tool_call>{'[' * 100_000}</tool_call>",
        '<tool_call>{"name": "f", "argum',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read("hermes", text) == {"content": text}


def given(arguments: str, *, is_whole: bool = True) -> str:
    """The arguments of a call as they are shown, character by character, or at once."""
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}' + "}</tool_call>" * is_whole
    reader, at_once = reader_of("hermes"), reader_of("hermes")
    calls = [piece for char in text for piece in reader.feed(char)] + reader.finish()
    found = "".join(call.arguments for call in calls if isinstance(call, Call))
    assert found == "".join(call.arguments for call in at_once.feed(text) + at_once.finish() if isinstance(call, Call))
    assert [call.name for call in calls if isinstance(call, Call)] == ["f"] + [""] * (len(calls) - 1)
    assert reader.num_calls == is_whole
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        '{"n": [-2E+667, 1.5]}',
        '{"b": "\\ud83d\\ude00\\n\\"}"}',
        '{"b": {"c": ["}", "]"]}}',
        '{"n": 1' + "0" * 10_000 + "}",
    ],
)
def test_arguments_are_shown_as_they_were_written(arguments: str) -> None:
    assert given(arguments) == arguments


def test_what_strict_readers_of_json_refuse_in_texts_is_mended() -> None:
    assert given('{"a": "\\ud800é\\udc00 \\ud800\\n"}') == '{"a": "\\ufffdé\\ufffd \\ufffd\\n"}'
    assert given('{"a": "x\ny"}') == '{"a": "x\\u000ay"}'


def test_a_text_is_shown_as_the_type_that_the_schema_names() -> None:
    assert given('{"n": "3", "a": "4", "b": {"n": "5"}}') == '{"n": 3, "a": "4", "b": {"n": "5"}}'
    assert given('{"n": "many"}') == '{"n": "many"}'


@pytest.mark.parametrize("arguments", ['{"n": "3', '{"a": "\\u00', '{"a": {"b": [', '{"a'])
def test_arguments_that_were_cut_off_are_shown_as_far_as_they_came(arguments: str) -> None:
    assert given(arguments, is_whole=False) == arguments


@given_values(st.dictionaries(st.text(), VALUES), st.booleans(), st.integers(1, 7))
def test_pieces_of_any_arguments_give_them_whole(arguments: dict[str, Any], is_ascii: bool, size: int) -> None:
    text = json.dumps(arguments, ensure_ascii=is_ascii)
    growing, shown = GrowingArguments(KnownTools({"f": {}}), "f"), ""
    for start in range(0, len(text), size):
        assert not growing.is_over
        piece, rest = growing.feed(text[start : start + size] + "} behind" * (start + size >= len(text)))
        shown += piece
    assert growing.is_over and rest == "} behind"
    assert json.loads(shown) == arguments


def test_text_behind_calls_is_content() -> None:
    text = '{"name": "f", "parameters": {"n": 1}}; {"name": "unknown", "parameters": {}}'
    assert read("llama-json", text) == {
        "content": '; {"name": "unknown", "parameters": {}}',
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}],
    }


def test_a_call_that_the_prompt_has_begun_is_shown_once_it_is_whole() -> None:
    prompt = '<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"n": '
    pieces = reader_of("hermes", prompt).feed("3}}</tool_call>")
    assert pieces == [Call(0, "f", '{"n": 3}')]


def test_texts_are_read_as_the_types_that_the_schema_names() -> None:
    def typed(schema: Any, text: str) -> Any:
        body = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
        ours = reader_of("glm")
        ours.reading.tools.properties["f"]["a"] = schema  # type: ignore[index]
        found = message_of(ours.feed(body))["tool_calls"][0]["function"]["arguments"]["a"]
        theirs = parse_response(body, FORMATS["glm"], prefix="", tools=tools)
        assert theirs["tool_calls"][0]["function"]["arguments"]["a"] == found
        return found

    assert typed({"type": "integer"}, "3.0") == 3
    assert typed({"type": "number"}, "1.5") == 1.5
    assert typed({"type": "boolean"}, "True") is True
    assert typed({"type": "object"}, '{"b": [1]}') == {"b": [1]}
    assert typed({"anyOf": [{"type": "null"}, {"type": "string"}]}, "null") is None
    assert typed({"type": "string"}, "75001") == "75001"
    assert typed({"type": "integer"}, "many") == "many"
    assert typed({"type": "integer"}, "Infinity") == "Infinity"
    assert typed({"type": "number"}, "NaN") == "NaN"
    assert typed({"type": ["array", "string"]}, "[1, 2]") == [1, 2]


def test_a_text_is_read_once_however_many_types_a_schema_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema may name thousands of alternatives, and the text may be long."""
    reads: list[str] = []
    plain_loads = json.loads

    def loads(text: str, **options: Any) -> Any:
        reads.append(text)
        return plain_loads(text, **options)

    monkeypatch.setattr(json, "loads", loads)
    schema = {"anyOf": [{"type": name} for name in ("integer", "boolean", "number", "null", "string") * 1_000]}
    found = KnownTools({"f": {"a": schema}}).typed("f", {"a": "[1, 2]"})
    assert (found, reads) == ({"a": "[1, 2]"}, ["[1, 2]"])


def test_spaces_at_edges_are_left_out_and_parts_are_lines() -> None:
    text = f"  \n a  b \n{CALL}\n\n c  \n{CALL} \n"
    assert read("hermes", text)["content"] == "a  b\nc"


def test_the_answer_begins_where_the_prompt_ends() -> None:
    old = "<|im_start|>assistant\n<think>no</think>an answer<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    assert read("hermes", "x</think>y", prompt=old + "<|im_start|>assistant\n<think>\n") == {
        "reasoning": "x",
        "content": "y",
    }
    assert read("hermes", " goes on", prompt=old + "<|im_start|>assistant\nIt") == {"content": " goes on"}
    assert read("hermes", "x</think>y", prompt="no answer begins <think>") == {"content": "x</think>y"}


def test_only_what_is_requested_is_shown() -> None:
    text = f"<think>t</think>c{CALL}{CALL}"
    assert "reasoning" not in read("hermes", text, with_reasoning=False)
    assert len(read("hermes", text, max_calls=1)["tool_calls"]) == 1


def test_text_without_a_mark_is_content_where_content_has_one() -> None:
    assert read("gpt-oss", "just ", "text") == {"content": "just text"}
    assert read("gpt-oss", "noise<|channel|>final<|message|>text<|return|>") == {"content": "text"}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_cost_is_linear(name: str) -> None:
    """Hostile texts: each mark again and again, whole and half, a million braces, spaces without end."""
    sample = SAMPLES[name]
    marks = [sample.text[start : start + 9] for start in range(0, len(sample.text), 17)]
    opening = sample.text[: sample.text.find("f") + 8]
    for text in (*marks, opening, "{", "{{,", '"', '\\"', " ", "<", "[", "`", "<parameter=a>", "<arg_key>a", '<|"|>'):
        num_repeats = 1_500 // len(text)
        reader = reader_of(name, sample.prompt)
        for _ in range(num_repeats):
            reader.feed(text)
        reader.finish()
        assert reader.num_scanned <= 4 * MAX_HELD_CHARS * num_repeats * len(text)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    "unit", ["{", "[", '"', '\\"', ",", " ", "\n", "a", "{,", '{"a":', "<parameter=a>", "<arg_key>a</arg_key>", '<|"|>']
)
def test_a_call_of_hostile_text_takes_no_time(name: str, unit: str) -> None:
    """A quadratic pattern would take minutes."""
    opening = {
        "hermes": "<tool_call>",
        "qwen-xml": "<tool_call><function=f>\n<parameter=a>",
        "glm": "<tool_call>f\n<arg_key>a</arg_key><arg_value>",
        "llama-json": '{"name": "f", "parameters": ',
        "pythonic": "[f(",
        "lfm": "<|tool_call_start|>[f(",
        "mistral": "[TOOL_CALLS]",
        "mistral-args": "[TOOL_CALLS]f[ARGS]",
        "gemma": "<|tool_call>call:f{",
        "gpt-oss": "<|channel|>commentary to=functions.f<|message|>",
        "deepseek": f"{'<｜tool▁call▁begin｜>'}function<｜tool▁sep｜>f\n```json\n",
        "deepseek-3.1": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "think": "<think>",
    }[name]
    text = opening + unit * (50_000 // len(unit)) + "</parameter></arg_value></tool_call><tool_call|>"
    found = read(name, text)
    assert found.keys() <= {"content", "reasoning", "tool_calls"}


@pytest.mark.parametrize(
    ("name", "opening", "unit", "closing"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "[],", "0]}}</tool_call>"),
        ("gemma", "<|tool_call>call:f{a:[", "{a:1},", "0]}<tool_call|>"),
        ("qwen-xml", "<tool_call><function=f>\n<parameter=a>[", "[],", "0]</parameter></function></tool_call>"),
        ("llama-json", '{"name": "f", "parameters": {}}', '; {"name": "f", "parameters": {}}', ""),
        ("lfm", "<|tool_call_start|>[f(a=[", "1,", "0])]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[", "f(),", "f()]<|tool_call_end|>"),
    ],
)
def test_a_call_of_more_values_than_one_step_may_read_is_content(
    name: str, opening: str, unit: str, closing: str
) -> None:
    """Those that are read on the event loop in one piece; long texts are no such values."""
    tools = KnownTools({"f": {"a": {"type": "array"}}})

    def read_times(number: int, one: str) -> dict[str, Any]:
        reader = ResponseReader(Reading(named_format(name), tools), "")
        return message_of([*reader.feed(opening + one * number + closing), *reader.finish()])

    assert "tool_calls" in read_times(500, unit)
    is_shown_as_it_comes = name in ("hermes", "llama-json")
    assert read_times(40_000, unit).keys() == {"tool_calls" if is_shown_as_it_comes else "content"}
    if "[" in opening and unit != "f(),":
        assert "tool_calls" in read_times(1, '"' + ",[{(" * 40_000 + '",')


@pytest.mark.parametrize("middle", ["", "<|channel|>commentary"])
def test_spaces_in_a_mark_take_as_long_as_letters(middle: str) -> None:
    """A pattern that shares a run of spaces out in all ways needs its square for each character that comes."""

    def cost_s(run: str) -> float:
        costs = []
        for _ in range(5):
            reader = reader_of("gpt-oss")
            reader.feed(f"to=functions.f{run}{middle}{run}")
            began_at = time.thread_time()
            reader.feed("x")
            costs.append(time.thread_time() - began_at)
        return min(costs)

    assert cost_s(" " * 450) < 50 * cost_s("f" * 450)


def tokenizer(template: str, own: Any = None) -> Any:
    return SimpleNamespace(chat_template=template, response_template=own)


def test_the_format_follows_from_the_operator_the_model_and_the_chat_template(tmp_path: Path) -> None:
    hermes = "<|im_start|> <tool_call> <think>"
    none: frozenset[str] = frozenset()

    def name_of(chosen: str, template: str, own: Any = None) -> str | None:
        found = answer_format(chosen, tokenizer(template, own), none)
        return None if found is None else found.name

    assert name_of("auto", hermes) == "hermes"
    assert name_of("auto", "plain") is None
    assert name_of(NO_FORMAT, hermes) is None
    assert name_of("glm", hermes) == "glm"
    assert name_of("auto", hermes, own=FORMATS["gemma"]) == "the model's own"
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(FORMATS["glm"]))
    assert name_of(str(path), hermes) == str(path)
    with pytest.raises(ValueError, match="neither a file nor one of"):
        name_of("other", hermes)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a response template"):
        name_of(str(path), hermes)
    late = {"open_pattern": r"(?=[\s\S]*?</think>)", "close": "</think>"}
    with pytest.raises(ValueError, match="cannot be streamed"):
        name_of("auto", hermes, own={"start_anchor": "a", "fields": {"reasoning": late, "content": {}}})


def test_thoughts_are_only_looked_for_where_the_model_knows_their_marks() -> None:
    template = "<|im_start|> <tool_call>"
    found = answer_format("auto", tokenizer(template), frozenset())
    assert found is not None and not found.has_reasoning and found.has_calls
    found = answer_format("auto", tokenizer(template), frozenset({"<think>"}))
    assert found is not None and found.has_reasoning
    assert not found.without_calls.has_calls


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        ("<|im_start|> <tool_call> <function=", "qwen-xml"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral-args"),
        ('<|start_header_id|>assistant "parameters"', "llama-json"),
        ("<|header_start|>assistant [func_name1(", "pythonic"),
        ("<｜tool▁call▁begin｜>", "deepseek-3.1"),
        ("<think> </think>", "think"),
        ("hello", None),
    ],
)
def test_a_chat_template_is_known_by_its_marks(texts: str, name: str | None) -> None:
    assert known_format(texts) == name


@pytest.mark.parametrize("num_spaces", [900, 975, 990, 2000])
def test_a_long_head_of_a_call_is_read_alike_however_it_is_cut(num_spaces: int) -> None:
    text = f'<tool_call>{" " * num_spaces}{{"name": "f", "arguments": {{"n": 3}}}}</tool_call>'
    assert read("hermes", text) == read("hermes", *text)
    assert "tool_calls" in read("hermes", text)
    assert reader_of("hermes").feed(text)[0] == Call(0, "f", "" if num_spaces < 995 else '{"n": 3}')
