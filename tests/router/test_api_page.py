"""docs/api.md is up to date, and it, with docs/adapters.md, names every field of a request and every error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from motet.router.bodies.request_decoder import refused_fields
from motet.router.openai.request_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    RefusedInCompletions,
    UnsupportedFields,
)
from motet.router.openapi_document import ERRORS, openapi_document
from motet.tests.rigs.all_routes import rig_with_all_routes
from motet.tests.rigs.api_tables import given_errors, with_tables
from motet.tests.rigs.made_api_page import made_page
from motet.tests.rigs.router_rig import text_service

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "docs" / "api.md"
CODE = re.compile(r"""code="(\w+)"|unavailable\([^)]*"(\w+)"\)""")
OF_THE_EDGE = {
    "invalid_header",
    "bad_http",
    "request_timeout",
    "too_many_requests",
    "headers_too_large",
    "router_lost",
    "no_router",
    "router_timeout",
}


def rows(table: str) -> list[list[str]]:
    """Of a table that is made, without its head: the cells of each row."""
    made = API.read_text().split(f"<!-- made: {table} -->")[1].split("<!-- end -->")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.strip().splitlines()[2:]]


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def own_fields(schema: type[GenerationFields]) -> set[str]:
    return set(schema.__struct_fields__) - set(GenerationFields.__struct_fields__)


def test_its_tables_are_up_to_date(tmp_path: Path) -> None:
    page = API.read_text()
    assert made_page(page, tmp_path) == page, "run .venv/bin/python -m motet.tests.rigs.made_api_page docs/api.md"


def test_a_table_that_is_missing_is_reported() -> None:
    with pytest.raises(ValueError, match="'types'"):
        with_tables("<!-- made: errors -->\n<!-- end -->", {})


def test_every_field_that_is_obeyed_is_in_the_table() -> None:
    table: dict[str, set[str]] = {}
    for field, where, *_ in rows("fields"):
        table.setdefault(where, set()).update(names(field))
    common = set(GenerationFields.__struct_fields__) - set(UnsupportedFields.__struct_fields__)
    of_chats = common & RefusedInCompletions.__annotations__.keys()
    assert table["both"] == common - of_chats
    assert table["completions"] == own_fields(CompletionRequest) - set(refused_fields(CompletionRequest))
    assert table["chat"] == own_fields(ChatRequest) - {"echo", *refused_fields(ChatRequest)} | of_chats


def test_bounds_and_meanings_come_with_the_fields() -> None:
    reported = {(where, field): [accepted, meaning] for field, where, accepted, meaning in rows("fields")}
    assert reported["both", "`timeout`"] == ["number over 0, at most 86,400", "Seconds for the whole answer."]
    assert reported["both", "`seed`"][0] == "integer, -2^63 to 2^63-1"
    assert reported["completions", "`logprobs`"][0] == "boolean or integer, 0 to 20"
    stop = "text of 1 to 1,024 characters or list of at most 16 of text of 1 to 1,024 characters"
    assert reported["both", "`stop`"][0] == stop


def test_every_field_that_is_refused_is_named() -> None:
    assert {name for field, _ in rows("refused") for name in names(field)} == {
        *refused_fields(ChatRequest),
        *refused_fields(CompletionRequest),
        "echo",
    }


def test_every_error_is_explained_and_every_explained_one_is_given(tmp_path: Path) -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "router").rglob("*.py")))
    codes = {first or second for first, second in CODE.findall(source)} | {"not_found", "method_not_allowed"}
    assert {"overloaded", "gang_lost", "registry_unavailable"} <= codes
    assert codes | OF_THE_EDGE == set(ERRORS)
    shown = {(int(status), *names(code)) for status, code, _ in rows("errors")}
    assert shown == {(status, code) for code, (status, _) in ERRORS.items()}
    document = openapi_document(rig_with_all_routes(tmp_path, text_service()).app.state.routes)
    assert ERRORS.keys() - given_errors(document) == set(), "an error that no route gives"
