"""What a check says of what it saw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
