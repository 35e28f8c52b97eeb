"""Grammars of texts within JSON: what they take is what the grammar itself takes, quoted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.router.grammars.lark_pieces import quoted_lark, quoted_pattern
from motet.tests.clients.agent_requests import PATCH
from motet.tests.rigs.grammar_matcher import accepts

PATTERNS = (
    "[a-z]+", r"[^\n]*", r"[\x00-\x7f]+", r'a\.b\\c"', r"[\w\s]+", r"\S+\s\d{2,3}", "(?s:.*)x", r'[^"\\]+', r"\D+",
    r"(?:ab|c)*\/\n?", "[ -~]+", "[]a]+", r"[\]a-]+", ".é.", "a?[.]b|-", "(?s:.)x.", r"[^\s]\s", "(.)(?s:(.).).",
)  # fmt: skip
TEXTS = st.text(alphabet='\xa0ab c"\\\n\t\x01.x12é/]-', max_size=6)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=TEXTS)
def test_a_pattern_takes_the_same_texts(pattern: str, text: str) -> None:
    assert accepts(f"start: /{quoted_pattern(pattern)}/", quoted(text)) == accepts(f"start: /{pattern}/", text)


LINES = st.lists(st.tuples(st.sampled_from("+- "), TEXTS.filter(lambda text: "\n" not in text)), max_size=3)


@given(name=TEXTS, lines=LINES, end=st.sampled_from(["", "\n", " "]))
def test_a_grammar_takes_the_same_texts(name: str, lines: list[tuple[str, str]], end: str) -> None:
    body = "".join(f"{mark}{line}\n" for mark, line in lines)
    text = f"*** Begin Patch\n*** Update File: {name}\n{body}*** End Patch{end}"
    assert accepts(quoted_lark(PATCH), quoted(text)) == accepts(PATCH, text)


@given(text=TEXTS)
def test_a_range_takes_the_same_texts(text: str) -> None:
    grammar = 'start: (" ".."~" | "\\n".."\\r" | "é".."😀")*'
    assert accepts(quoted_lark(grammar), quoted(text)) == accepts(grammar, text)


@pytest.mark.parametrize(
    "grammar",
    ['start: "\\n"i', "start: %json {}", "start: <|im_end|>", r"start: /\ba/", "start: /a/x", "start: /[\\W]/"],
)
def test_what_has_no_such_form_is_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match="supported"):
        quoted_lark(grammar)
