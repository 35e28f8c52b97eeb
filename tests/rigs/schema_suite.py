"""The table of tests/router/schema_suite.md: the JSON Schema Test Suite, draft 2020-12, as motet's grammars take it.

The suite is in the source distribution of jsonschema, which this reads as it is:

    pip download --no-deps --no-binary jsonschema jsonschema==4.23.0
    .venv/bin/python -m motet.tests.rigs.schema_suite jsonschema-4.23.0.tar.gz tests/router/schema_suite.md
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from motet.router.grammars.check_process import GrammarTrial
from motet.router.grammars.lark_text import lark_text
from motet.router.grammars.response_format import WantedGrammar
from motet.tests.rigs.grammar_matcher import NUM_TOKENS, accepts

FOLDER: Final = "json/tests/draft2020-12/"
_BEGIN, _END = "<!-- made: suite -->", "<!-- end -->"
_REASONS: Final = {  # words of a problem
    "Resource": "a reference to elsewhere",
    "Anchor": "a reference to elsewhere",
    "Pointer": "a reference to elsewhere",
    "no value": "nothing fits it",
    "no text": "nothing fits it",
    "Unsatisfiable": "nothing fits it",
    "not disjoint": "patterns that may overlap",
    "oneOf": "branches that may overlap",
    "positive integer": "a whole number with a point",
}
_KEYWORDS: Final = re.compile(r'keywords are not supported: (".*")')


class Row:
    """What was found of one file, which is one keyword's."""

    def __init__(self) -> None:
        self.num_served = self.num_refused = 0
        self.refusals: Counter[str] = Counter()  # schemas by reason, of which one may have several
        self.num_valid = self.num_valid_taken = self.num_invalid = self.num_invalid_taken = 0

    def add(self, trial: GrammarTrial, schema: Any, tests: Iterable[Mapping[str, Any]]) -> None:
        try:
            grammar = lark_text(WantedGrammar("schema", "json", schema), {})
            problem = trial.problem(grammar, NUM_TOKENS)
        except ValueError as error:
            problem = str(error)
        if problem:
            self.num_refused += 1
            self.refusals.update(_reasons(problem))
            return
        self.num_served += 1
        for test in tests:
            taken = accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
            self.num_valid += test["valid"]
            self.num_valid_taken += test["valid"] and taken
            self.num_invalid += not test["valid"]
            self.num_invalid_taken += taken and not test["valid"]

    def cells(self, name: str) -> str:
        why = ", ".join(f"{reason} ({number})" for reason, number in self.refusals.most_common())
        parts = (
            name,
            f"{self.num_served} of {self.num_served + self.num_refused}",
            f"{self.num_valid_taken} of {self.num_valid}",
            f"{self.num_invalid_taken} of {self.num_invalid}",
            why,
        )
        return f"| {' | '.join(parts)} |"


def rows_of(suite: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Row]:
    """By keyword. `suite`: groups of tests, each of one schema."""
    trial, rows = GrammarTrial(), {}
    for keyword, groups in sorted(suite.items()):
        row = rows[keyword] = Row()
        for group in groups:
            row.add(trial, group["schema"], group["tests"])
    return rows


def table_of(rows: Mapping[str, Row]) -> str:
    total = Row()
    for row in rows.values():
        for count in [name for name in vars(row) if name.startswith("num_")]:
            setattr(total, count, getattr(total, count) + getattr(row, count))
    head = "| keyword | schemas served | valid taken | invalid taken | why others are refused |\n" + "| --- " * 5 + "|"
    lines = [row.cells(f"`{keyword}`") for keyword, row in rows.items()]
    return "\n".join([head, *lines, total.cells("**all**")])


def _reasons(problem: str) -> list[str]:
    if match := _KEYWORDS.search(problem):
        return match[1].replace('"', "`").split(", ")
    for words, reason in _REASONS.items():
        if words in problem:
            return [reason]
    return [problem.partition(":")[0].partition(". ")[0].removesuffix(".")]


def _suite_in(path: Path) -> dict[str, list[Mapping[str, Any]]]:
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            _, at, name = member.name.partition(FOLDER)
            if at and name.endswith(".json") and "/" not in name:
                file = archive.extractfile(member)
                assert file is not None
                found[name.removesuffix(".json")] = json.load(file)
    return found


def main() -> None:
    source, page = map(Path, sys.argv[1:])
    before, _, rest = page.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}\n\n{table_of(rows_of(_suite_in(source)))}\n{_END}{after}")


if __name__ == "__main__":
    main()
