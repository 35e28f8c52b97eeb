"""The lines of `scripts/clients` as the table of docs/clients.md: python tests/clients/table.py < LINES."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

COLUMNS = {
    "text": ("text",),
    "streams": ("stream",),
    "tools": ("tools", "tools_streamed", "tool_required"),
    "schemas": ("schema", "schema_streamed"),
    "responses": ("responses", "responses_streamed", "responses_tools", "responses_schema"),
    "stored responses": ("stored",),
    "embeddings": ("embeddings",),
    "others": ("scores", "benchmark", "batches"),
}


def table(lines: Iterable[str]) -> str:
    """`yes`: all checks of the column passed; else the names of those that did not; `–`: the library has none."""
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        if line.startswith("{"):
            each = json.loads(line)
            found.setdefault(f"{each['library']} {each['version']}", {})[each["check"]] = each["wrong"]
    rows = [["client", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    rows += [[library, *(_cell(results, checks) for checks in COLUMNS.values())] for library, results in found.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _cell(results: dict[str, str], checks: tuple[str, ...]) -> str:
    there = [check for check in checks if check in results]
    failed = [check for check in there if results[check]]
    return f"not {', '.join(failed)}" if failed else "yes" if there else "–"


if __name__ == "__main__":
    sys.stdout.write(table(sys.stdin))
