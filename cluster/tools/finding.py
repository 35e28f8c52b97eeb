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


def ok(check: str, observation: str) -> Finding:
    return Finding(check=check, level="ok", found=observation)


def warning(check: str, observation: str, *, why: str, do: str) -> Finding:
    return Finding(check=check, level="warning", found=observation, why=why, do=do)


def error(check: str, observation: str, *, why: str, do: str) -> Finding:
    return Finding(check=check, level="error", found=observation, why=why, do=do)


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


# Findings as lines for a person, or as JSON for a machine.

SIGNS = {"ok": "ok", "warning": "WARNING", "error": "ERROR"}


def report_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines by node, one for each finding; problems also have their consequence and what to do."""
    for node in dict.fromkeys(finding.node for finding in findings):
        node_findings = [finding for finding in findings if finding.node == node]
        if node or any(finding.node for finding in findings):
            yield f"node {node}" if node else "all nodes"
        for finding in node_findings:
            yield f"{SIGNS[finding.level]:<8} {finding.check}: {finding.found}"
            if finding.level != "ok":
                yield f"         why: {finding.why}"
                yield f"         do:  {finding.do}"
    yield summary(findings)


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    said = [f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in ("error", "warning") if counts[level]]
    return ", ".join(said) if said else f"nothing is wrong: {counts['ok']} findings"


def report_json(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    document = {
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
