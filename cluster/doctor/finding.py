"""What a check says of what it saw."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. Unless it is "ok", it says why it matters and what to do."""

    check: str  # the family: "redis"
    level: Level
    found: str
    why: str = ""
    do: str = ""  # a command, a setting, or a field of a manifest
    node: str = ""  # its address; empty: of no single node

    def __post_init__(self) -> None:
        assert self.level == "ok" or (self.why and self.do), f"{self.found}: why, and what to do?"


def ok(check: str, found: str) -> Finding:
    return Finding(check=check, level="ok", found=found)


def warning(check: str, found: str, *, why: str, do: str) -> Finding:
    return Finding(check=check, level="warning", found=found, why=why, do=do)


def error(check: str, found: str, *, why: str, do: str) -> Finding:
    return Finding(check=check, level="error", found=found, why=why, do=do)


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(one.level == "error" for one in findings)


# Findings as lines for a person, or as JSON for a machine.

SIGNS = {"ok": "ok", "warning": "WARNING", "error": "ERROR"}


def report_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines by node, one for each finding; problems also have their consequence and what to do."""
    for node in dict.fromkeys(one.node for one in findings):
        own = [one for one in findings if one.node == node]
        if node or any(one.node for one in findings):
            yield f"node {node}" if node else "all nodes"
        for one in own:
            yield f"{SIGNS[one.level]:<8} {one.check}: {one.found}"
            if one.level != "ok":
                yield f"         why: {one.why}"
                yield f"         do:  {one.do}"
    yield summary(findings)


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(one.level for one in findings)
    said = [f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in ("error", "warning") if counts[level]]
    return ", ".join(said) if said else f"nothing is wrong: {counts['ok']} findings"


def report_json(findings: Sequence[Finding]) -> str:
    counts = Counter(one.level for one in findings)
    document = {
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": [asdict(one) for one in findings],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
