"""The table of what is served of the JSON Schema Test Suite: how it is counted; no invalid instance is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from motet.tests.rigs.schema_suite import rows_of, table_of

PAGE = Path(__file__).with_name("schema_suite.md")
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2}
SUITE: dict[str, list[dict[str, Any]]] = {
    "prefixItems": [
        {
            "schema": PAIR,
            "tests": [
                {"data": [1, "a"], "valid": True},
                {"data": [1.0, "a"], "valid": True},  # the grammar has no such number
                {"data": ["a", 1], "valid": False},
                {"data": [1], "valid": False},
                {"data": [1, "a", None], "valid": False},
            ],
        }
    ],
    "contains": [
        {"schema": {"contains": PAIR, "not": {}}, "tests": [{"data": 1, "valid": True}]},
        {"schema": {"$ref": "https://example.com/none"}, "tests": []},
        {"schema": True, "tests": [{"data": {"a": [None, "\n"]}, "valid": True}]},
    ],
}


def test_its_rows() -> None:
    head, rule, *rows = table_of(rows_of(SUITE)).split("\n")
    assert head.count("|") == rule.count("|") == 6
    assert rows == [
        "| `contains` | 1 of 3 | 1 of 1 | 0 of 0 | `contains` (1), `not` (1), a reference to elsewhere (1) |",
        "| `prefixItems` | 1 of 1 | 1 of 2 | 0 of 3 |  |",
        "| **all** | 2 of 4 | 2 of 3 | 0 of 3 |  |",
    ]


def test_no_invalid_instance_of_the_suite_is_taken() -> None:
    rows = re.findall(
        r"^\| (?:`\w[\w-]*`|\*\*all\*\*) \| \d+ of \d+ \| \d+ of \d+ \| (\d+) of \d+ \|", PAGE.read_text(), re.MULTILINE
    )
    assert len(rows) > 40
    assert {*rows} == {"0"}
