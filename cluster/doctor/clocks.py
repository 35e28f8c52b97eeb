"""Clocks: of Redis, and of the nodes among each other."""

from __future__ import annotations

from collections.abc import Mapping

from .finding import Finding, error, ok, warning

CHECK = "clocks"
APART_S = 1.0
FAR_APART_S = 60.0  # what the hour of a sweep may still be wrong by
WHY = "what is younger than an hour is kept from sweeps by its time, and logs of several nodes are read by theirs"
DO = "let a time service run on every node (chronyd, systemd-timesyncd): chronyc tracking says how it is doing"


def check_clocks(offsets_s: Mapping[str, float]) -> list[Finding]:
    """`offsets_s`: of each clock, against one that all were compared with."""
    if len(offsets_s) < 2:
        return []
    first, *_, last = sorted(offsets_s, key=lambda name: offsets_s[name])
    apart_s = offsets_s[last] - offsets_s[first]
    found = f"{last} is {apart_s:.2f} s ahead of {first}"
    if apart_s >= FAR_APART_S:
        return [error(CHECK, found, why=WHY, do=DO)]
    if apart_s >= APART_S:
        return [warning(CHECK, found, why=WHY, do=DO)]
    return [ok(CHECK, f"{len(offsets_s)} clocks are within {apart_s * 1e3:.0f} ms")]
