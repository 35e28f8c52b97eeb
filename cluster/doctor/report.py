"""Findings as lines for a person, or as JSON for a machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from .finding import Finding

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
