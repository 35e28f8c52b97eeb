"""Grammars of requests in llguidance's Lark: what they take, and what is refused."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from motet.router.grammars.check_process import GrammarTrial
from motet.router.grammars.lark_pieces import MAX_SPACES, MAX_SPACES_IN_LINE
from motet.router.grammars.lark_text import lark_of_gbnf, lark_text
from motet.router.grammars.response_format import WantedGrammar
from motet.tests.rigs.grammar_matcher import NUM_TOKENS, accepts, random_text

THINK, TOOL = 257, 258
SPECIAL = {"</think>": THINK, "<tool>": TOOL}
TRIAL = GrammarTrial()
Form = Literal["json", "regex", "choice", "grammar", "structural_tag"]


def lark(form: Form, value: Any, **rest: Any) -> str:
    return lark_text(WantedGrammar("field", form, value, **rest), SPECIAL)


def problem(form: Form, value: Any) -> str:
    try:
        return TRIAL.problem(lark(form, value), NUM_TOKENS)
    except ValueError as error:
        return str(error)


# JSON

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def test_a_schema_as_text_is_the_same_as_the_schema() -> None:
    assert lark("json", json.dumps(POINT)) == lark("json", POINT)
    assert accepts(lark("json", POINT), '{"x":1}')
    assert not accepts(lark("json", POINT), '{"x":"1"}')
    assert accepts(lark("json", {}), "[1,null]")
    assert accepts(lark("json", True), "[1,null]")


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1, LARGE]},
        {"const": -LARGE},
        {"const": {"id": [LARGE]}},
        {"type": "integer", "minimum": LARGE},
        {"type": "integer", "exclusiveMaximum": 2**63 - 1},
        {"type": "number", "multipleOf": LARGE},
        {"type": "object", "properties": {"id": {"anyOf": [{"type": "null"}, {"enum": [LARGE]}]}}},
        {"$defs": {"id": {"const": LARGE}}, "type": "array", "items": {"$ref": "#/$defs/id"}},
    ],
)
def test_integers_that_a_double_does_not_hold_are_refused(schema: dict[str, Any]) -> None:
    """llguidance would let a neighbour through."""
    pattern = (
        r"'(enum|const|minimum|exclusiveMaximum|multipleOf)' has -?\d+, which a double does not hold: whole numbers"
    )
    assert re.match(pattern, problem("json", schema))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    assert re.match(pattern, problem("structural_tag", tag))


def test_integers_that_a_double_holds_are_exact() -> None:
    for number in (2**53, -(2**53), 2**53 - 1, 2**60):
        assert accepts(lark("json", {"enum": [number]}), str(number))
        assert not accepts(lark("json", {"enum": [number]}), str(number + 1))
    at_most = lark("json", {"type": "integer", "minimum": -(2**53), "maximum": 2**53})
    assert accepts(at_most, str(2**53)) and not accepts(at_most, str(LARGE))
    assert accepts(at_most, str(-(2**53))) and not accepts(at_most, str(-LARGE))
    assert not problem("json", {"type": "integer", "default": LARGE, "examples": [LARGE]})
    assert not problem("json", {"type": "object", "properties": {"enum": {"type": "integer", "default": LARGE}}})


def test_runs_of_white_space_are_bounded() -> None:
    grammar = lark("json", POINT)
    assert accepts(grammar, json.dumps({"x": 1}, indent=4))
    assert accepts(grammar, json.dumps({"x": 1}, indent="\t").replace("\n", "\r\n"))
    assert accepts(grammar, '{"x":\n' + " " * MAX_SPACES + "1}")
    assert not accepts(grammar, '{"x":\n' + " " * (MAX_SPACES + 1) + "1}")
    assert accepts(grammar, '{"x":' + " " * MAX_SPACES_IN_LINE + "1}")
    assert not accepts(grammar, '{"x":' + " " * (MAX_SPACES_IN_LINE + 1) + "1}")
    assert not accepts(grammar, '{"x":\n\n1}')
    assert not accepts(grammar, ' {"x":1}')
    assert not accepts(grammar, '{"x":1} ')


def test_white_space_can_be_chosen() -> None:
    assert accepts(lark("json", POINT, spaces=None), '{"x":1}')
    assert not accepts(lark("json", POINT, spaces=None), '{"x": 1}')
    assert accepts(lark("json", POINT, spaces=" ?"), '{"x": 1}')
    assert not accepts(lark("json", POINT, spaces=" ?"), '{"x":  1}')


@pytest.mark.parametrize(
    ("schema", "reported"),
    [
        ({"type": "array", "contains": {}}, '"contains"'),
        ({"not": {}, "if": {}}, '"if", "not"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"properties": {"a": {"dependentRequired": {}}}}, '"dependentRequired"'),
        ({"type": "string", "format": "color"}, "color"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "text"}, "Invalid type: text"),
        ({"minLength": "3"}, "minLength"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"allOf": [{"x-guidance": {"lenient": True}, "not": {}}]}, '"not"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, "oneOf"),
        (False, "false"),
        ({"enum": []}, "nsatisfiable"),
        ({"$ref": "#"}, "no text"),
        ("{", "not valid"),
        ("[]", "not valid"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(schema: Any, reported: str) -> None:
    assert reported in problem("json", schema)


WIDE = {"anyOf": [{"properties": {f"p{number}": {"const": "s"}}, "required": [f"p{number}"]} for number in range(1200)]}


@pytest.mark.parametrize(
    "schema",
    [
        WIDE,
        {"type": "array", "items": WIDE},
        {"type": "object", "additionalProperties": WIDE},
        POINT | {"properties": {"x": {"type": "string"}, "y": WIDE}, "required": ["x", "y"]},
        POINT | {"properties": {"a_name_of_24_characters_": WIDE}, "required": ["a_name_of_24_characters_"]},
    ],
    ids=["itself", "items", "values", "behind a text", "behind a name"],
)
def test_more_alternatives_than_a_gang_follows_are_refused_wherever_an_answer_comes_to_them(schema: Any) -> None:
    found = problem("json", schema)
    assert found.endswith("alternatives are open at one place of an answer: at most 2000 are followed.")


def test_alternatives_that_an_answer_has_distinguished_count_as_many_as_they_are() -> None:
    objects = {"anyOf": [{"type": "object", **one, "additionalProperties": False} for one in WIDE["anyOf"]]}
    assert problem("json", objects) == ""
    assert problem("json", {"anyOf": WIDE["anyOf"][:300]}) == ""


# Regular expressions and choices


@given(st.text(max_size=20))
@settings(max_examples=60, deadline=None)
def test_an_escaped_text_is_taken_and_only_that(text: str) -> None:
    for grammar in (lark("regex", re.escape(text)), lark("choice", [text])):
        assert accepts(grammar, text)
        assert not accepts(grammar, text + "a")


@pytest.mark.parametrize(
    ("pattern", "taken", "not_taken"),
    [
        ("^[0-9]{3}$", "123", "1234"),
        ("a|b", "b", "ab"),
        ("(?i)yes/no", "YES/no", "yes"),
        ("a\nb", "a\nb", "a b"),
        (r"a\/b", "a/b", r"a\/b"),
        ("", "", "a"),
    ],
)
def test_a_regular_expression_is_of_the_whole_answer(pattern: str, taken: str, not_taken: str) -> None:
    assert accepts(lark("regex", pattern), taken)
    assert not accepts(lark("regex", pattern), not_taken)


def test_one_of_many_choices() -> None:
    choices = [f"choice {number}" for number in range(2000)]
    assert not problem("choice", choices)
    assert accepts(lark("choice", choices), "choice 77")
    assert not accepts(lark("choice", choices), "choice 2000")
    assert accepts(lark("choice", ["a", "ab", ""]), "ab")


@pytest.mark.parametrize("pattern", ["(", r"\bfoo", r"(a)\1", "a{2,1}"])
def test_what_is_no_regular_expression_is_refused(pattern: str) -> None:
    assert "regular expression" in problem("regex", pattern) or "lookaround" in problem("regex", pattern)


# GBNF

ARITHMETIC = """
root ::= sum   # a comment
sum  ::= term (("+" | "-") term)*
term ::= [0-9]+ | "(" sum ")"
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws (
    value ("," ws value)*
  )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "taken", "not_taken"),
    [
        (ARITHMETIC, ["1", "1+2", "(1-23)+(4)"], ["", "1+", "()", "1 + 2"]),
        (JSON, ['{"a": [1, -2.5, "x\\n"], "b": {}}', '{ "é": true}'], ['{"a": tru}', "[]", '{"a"}']),
        ('root ::= x "ab"\nx ::= [a]*', ["ab", "aaab"], ["b", "aaa"]),  # a lexer that takes the longest would fail
        (r'root ::= "a/b#\u00e9\x41" [\-a\]^/]', ["a/b#éA-", "a/b#éA]", "a/b#éA/"], ["a/b#éAb"]),
        ("root ::= .{2,3}", ["a\n", "éab"], ["a", "abcd"]),
        ("root ::= [^a-z]", ["A", "é"], ["b", "AB"]),
        ('root ::= "a"? "b" {2} | ""', ["abb", "bb", ""], ["ab"]),
        ('root ::= "x" root?', ["x", "xxx"], [""]),
    ],
)
def test_gbnf(grammar: str, taken: list[str], not_taken: list[str]) -> None:
    assert not problem("grammar", grammar)
    assert all(accepts(lark("grammar", grammar), text) for text in taken)
    assert not any(accepts(lark("grammar", grammar), text) for text in not_taken)


@pytest.mark.parametrize(
    ("grammar", "reported"),
    [
        ('a ::= "x"', "no rule 'root'"),
        ("root ::= y", "'y'"),
        ('root ::= "a"\nroot ::= "b"', "line 2"),
        ('root ::= ("a"', "'('"),
        ('root ::= "a")', "')'"),
        ('root ::= * "a"', "repeated"),
        ('root ::= "a"**', "repeated"),
        (r'root ::= "\q"', "escape"),
        (r'root ::= "\ud800"', "not a character"),
        ('root ::= "a" %', "line 1"),
        ('x\nroot ::= "b"', "must begin"),
        ("root ::= [z-a]", "range"),
        ("root ::= " + "(" * 30 + '"a"' + ")" * 30, "nested"),
    ],
)
def test_what_is_no_gbnf_is_refused(grammar: str, reported: str) -> None:
    assert reported in problem("grammar", grammar)


_NAMES = [f"rule-{number}" for number in range(4)]


@st.composite
def regular_gbnf(draw: st.DrawFn) -> tuple[str, str]:
    """A grammar whose rules use only later ones, and the same as a regular expression of Python's."""
    patterns: dict[str, str] = {}
    rules: list[str] = []
    for number in reversed(range(len(_NAMES))):
        grammar, pattern = draw(_expressions(tuple(_NAMES[number + 1 :]), patterns))
        patterns[_NAMES[number]] = f"(?:{pattern})"
        rules.append(f"{_NAMES[number]} ::= {grammar}")
    return "\n".join([f"root ::= {_NAMES[0]}", *rules]), patterns[_NAMES[0]]


def _expressions(names: tuple[str, ...], patterns: dict[str, str]) -> st.SearchStrategy[tuple[str, str]]:
    atoms = st.sampled_from([('"ab"', "ab"), ("[a-c]", "[a-c]"), ('""', ""), ("[^a]", "[^a]"), (".", r"[\s\S]")])
    if names:
        atoms |= st.sampled_from(names).map(lambda name: (name, patterns[name]))

    def larger(inner: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda two: (f"({two[0][0]} | {two[1][0]})", f"(?:{two[0][1]}|{two[1][1]})")),
            pairs.map(lambda two: (f"{two[0][0]} {two[1][0]}", two[0][1] + two[1][1])),
            st.tuples(inner, st.sampled_from(["?", "*", "+", "{1,2}"])).map(
                lambda one: (f"({one[0][0]}){one[1]}", f"(?:{one[0][1]}){one[1]}")
            ),
        )

    return st.recursive(atoms, larger, max_leaves=4)


@given(regular_gbnf(), st.lists(st.text("abcd", max_size=6), max_size=6))
@settings(max_examples=60, deadline=None)
def test_gbnf_that_does_not_refer_to_itself_means_what_a_regular_expression_does(
    grammar: tuple[str, str], texts: list[str]
) -> None:
    gbnf, pattern = grammar
    converted = lark_of_gbnf(gbnf)
    for text in texts:
        assert accepts(converted, text) == (re.fullmatch(pattern, text) is not None), (gbnf, text)


# Clients' own Lark


def test_lark_is_taken_as_it_is_and_special_tokens_by_name() -> None:
    grammar = lark("grammar", 'start: "stop=" NUMBER <tool> // stop=1\nNUMBER: /[0-9<a>]+/')
    assert accepts(grammar, "stop=12", TOOL)
    assert "no special token '<none>'" in problem("grammar", "start: <none>")


@pytest.mark.parametrize(
    "option", ["max_tokens=3", "temperature=0.5", 'stop="x"', "lazy, stop = /a/", "stop_capture=x"]
)
def test_options_that_the_engine_would_ignore_are_refused(option: str) -> None:
    assert "is not supported" in problem("grammar", f"start: a\na[{option}]: /[a-z]+/")
    assert "is not supported" in problem("grammar", '%llguidance { "no_forcing": true }\nstart: "a"')


# Structural tags

TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": {"type": "object"}, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "integer"}, "end": "</function>"},
        {"begin": "<tool>x", "end": " end"},
    ],
    "triggers": ["<function=", "<tool>"],
}


def test_behind_a_trigger_a_structure_must_follow() -> None:
    for grammar in (lark("structural_tag", TAGS), lark("structural_tag", json.dumps(TAGS))):
        assert accepts(grammar, "no call at all < function")
        assert accepts(grammar, 'a <function=g>12</function> b <function=f>{"a":1}</function>')
        assert accepts(grammar, "a", TOOL, "x[1] end and so on")
        assert not accepts(grammar, "a <function=g>{}</function>")
        assert not accepts(grammar, "a <function=h>")
        assert not accepts(grammar, "a", TOOL, "y")


def tagged(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALLS = [
    {"type": "tag", "begin": "<f>", "content": INTEGER, "end": "</f>"},
    {"type": "tag", "begin": "<tool>", "content": {"type": "regex", "pattern": "a+"}, "end": ";"},
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<tool>"], "tags": CALLS}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
THOUGHT_BY_TOKEN = THOUGHT | {"end": "</think>"}


@pytest.mark.parametrize(
    ("form", "taken", "not_taken"),
    [
        ({"type": "const_string", "value": "a<tool>"}, [("a", TOOL)], [("a<tool>",), ("a",)]),
        (INTEGER, [("12",)], [('"a"',)]),
        ({"type": "grammar", "grammar": ARITHMETIC}, [("1+2",)], [("1+",)]),
        (
            {"type": "sequence", "elements": [THOUGHT, INTEGER]},
            [("<t>1</t>2",), ("<t></t>2",)],
            [("<t>1</t>",), ("2",)],
        ),
        (
            {"type": "sequence", "elements": [THOUGHT_BY_TOKEN, {"type": "any_text"}]},
            [("<t>1", THINK, "b")],
            [("<t>1",)],
        ),
        ({"type": "or", "elements": [INTEGER, {"type": "regex", "pattern": "[ab]"}]}, [("1",), ("a",)], [("c",)]),
        (TRIGGERED, [("hi",), ("x<f>1</f>y", TOOL, "aa;z"), ("",)], [("<f>a</f>",), ("<fun",), ("a", TOOL)]),
        (TRIGGERED | {"at_least_one": True}, [("x<f>1</f>y",)], [("hi",), ("",)]),
        (TRIGGERED | {"stop_after_first": True}, [("x<f>1</f>",), ("hi",)], [("<f>1</f>x",), ("<f>1</f><f>1</f>",)]),
        (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, [("x<f>1</f>",)], [("hi",)]),
        (
            {"type": "tags_with_separator", "tags": CALLS, "separator": ", "},
            [("",), ("<f>1</f>",), ("<f>1</f>, ", TOOL, "a;")],
            [("<f>1</f><f>1</f>",), ("<f>1</f>, ",)],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": CALLS,
                "separator": "",
                "at_least_one": True,
                "stop_after_first": True,
            },
            [("<f>1</f>",)],
            [("",), ("<f>1</f><f>1</f>",)],
        ),
    ],
)
def test_formats_of_structural_tags(form: Any, taken: list[Any], not_taken: list[Any]) -> None:
    grammar = lark("structural_tag", tagged(form))
    assert not TRIAL.problem(grammar, NUM_TOKENS)
    for parts in taken:
        assert accepts(grammar, *parts), parts
    for parts in not_taken:
        assert not accepts(grammar, *parts), parts


def test_structural_tags_that_cannot_be_served_are_refused() -> None:
    assert "no trigger does" in problem("structural_tag", TAGS | {"triggers": ["<tool>"]})
    assert "at least one" in problem("structural_tag", TAGS | {"structures": []})
    assert "needs 'format'" in problem("structural_tag", {"type": "structural_tag"})
    assert "it is not valid" in problem("structural_tag", "{")
    first = {"type": "sequence", "elements": [{"type": "any_text"}, INTEGER]}
    assert "must come last" in problem("structural_tag", tagged(first))
    assert "nothing to choose" in problem("structural_tag", tagged({"type": "or", "elements": []}))
    assert "qwen_xml_parameter" in problem("structural_tag", tagged({"type": "qwen_xml_parameter", "json_schema": {}}))
    assert "excludes" in problem("structural_tag", tagged({"type": "any_text", "excludes": ["a"]}))


# Behind reasoning


@pytest.mark.parametrize("end", [["</think>"], ["done thinking"]])
def test_a_grammar_begins_where_reasoning_ends(end: list[str]) -> None:
    parts: list[str | int] = [SPECIAL.get(end[0], end[0])]
    for form, value, answer in (
        ("json", POINT, '{"x":1}'),
        ("choice", ["yes"], "yes"),
        ("grammar", ARITHMETIC, "1+2"),
        ("grammar", 'start: "{" B "}"\nB: "b"', "{b}"),
    ):
        grammar = lark(form, value, thought=("", end[0], ""))  # type: ignore[arg-type]
        assert not TRIAL.problem(grammar, NUM_TOKENS)
        assert accepts(grammar, "hm, {}\n", *parts, answer)
        assert accepts(grammar, *parts, answer)
        assert not accepts(grammar, answer)
        assert not accepts(grammar, "hm", *parts, "x" + answer)


# Random schemas

_LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-f]+$"},
        {"type": "string", "format": "date"},
        {"enum": ["a", 1, None, {"b": [2]}]},
        {"const": "c"},
        {"type": ["string", "null"], "minLength": 1},
    ]
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    return st.one_of(
        properties.flatmap(
            lambda some: st.fixed_dictionaries(
                {
                    "type": st.just("object"),
                    "properties": st.just(some),
                    "required": st.lists(st.sampled_from(sorted(some)), unique=True) if some else st.just([]),
                    "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
                }
            )
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        st.tuples(inner, inner).map(lambda two: {"$defs": {"one": two[0]}, "type": "array", "prefixItems": [two[1]]}),
        st.lists(inner, min_size=1, max_size=2).map(lambda some: {"allOf": some}),
    )


@given(st.recursive(_LEAVES, _nested, max_leaves=6), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_all_that_a_schemas_masks_let_through_fits_the_schema(schema: Any, seed: int) -> None:
    if problem("json", schema):  # such as an allOf that nothing fits
        return
    text = random_text(lark("json", schema), Random(seed))
    if text is not None:
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
