"""docs/api.md and docs/adapters.md name every field of a request and every error."""

from __future__ import annotations

import re
from pathlib import Path

from motet.router.openai_api.request_schema import ChatRequest, CompletionRequest, GenerationFields, UnsupportedFields

ROOT = Path(__file__).resolve().parents[2]
API, ADAPTERS = (ROOT / "docs" / name for name in ("api.md", "adapters.md"))
CODE = re.compile(r"""code="(\w+)"|(?:unavailable|_registry_away)\([^)]*"(\w+)"\)""")
OF_NO_CLIENT = {"not_ready"}  # of /ready


def section(heading: str) -> str:
    """Of the page of requests, up to the next heading."""
    return API.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def own_fields(schema: type[GenerationFields]) -> set[str]:
    return set(schema.__struct_fields__) - set(GenerationFields.__struct_fields__)


def test_every_field_that_is_obeyed_is_in_the_table() -> None:
    table = {row.split("|")[1].strip(): names(row) for row in section("Obeyed").splitlines() if row.startswith("| ")}
    common = set(GenerationFields.__struct_fields__) - set(UnsupportedFields.__struct_fields__)
    assert table["both"] | {"best_of"} == common
    assert table["completions"] == {*own_fields(CompletionRequest), "best_of"}
    assert table["chat"] == own_fields(ChatRequest) - {"echo"}  # which is refused


def test_every_field_that_is_refused_is_named() -> None:
    assert names(section("Refused")) == {*UnsupportedFields.__struct_fields__, "echo"}


def test_every_error_is_explained() -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "router").rglob("*.py")))
    codes = {first or second for first, second in CODE.findall(source)} - OF_NO_CLIENT
    assert {"overloaded", "gang_lost", "registry_unavailable"} <= codes
    assert codes - names(API.read_text()) - names(ADAPTERS.read_text()) == set()
