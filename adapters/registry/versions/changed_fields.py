"""What a change of a name's state has changed, for the audit log: a pure function of both states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .name_state import NameState, VersionNote
from .rollout import versions_of


def changed_fields(before: NameState | None, after: NameState) -> dict[str, object]:
    """Each field that differs, as {"from": …, "to": …}; None stands for an absent field.

    `current` is a version's number, `pinned_gangs` how many gangs keep it in host memory, `versions` are all numbers,
    `aliases` only those that changed; `canary` and `shadow` have version and share. Of an ended canary there is also
    how and why it ended. Of notes, which are free text, only the versions are listed.
    """
    facts, now = {} if before is None else _facts(before), _facts(after)
    changed: dict[str, object] = {
        name: {"from": facts.get(name), "to": now.get(name)}
        for name in (*now, *(name for name in facts if name not in now))
        if facts.get(name) != now.get(name)
    }
    aliases = {} if before is None else before.rollout.aliases
    if aliases != after.rollout.aliases:
        changed["aliases"] = _differing(aliases, after.rollout.aliases)
    ended = after.notes.last_canary
    if ended is not None and (before is None or before.notes.last_canary != ended):
        changed["canary_ended"] = {"version": ended.version, "state": ended.state, "reason": ended.reason}
    if before is not None:
        noted = [version for version in now["versions"] if _note(before, version) != _note(after, version)]
        if noted:
            changed["notes"] = noted
    return changed


def _facts(state: NameState) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "current": state.current.version,
        "versions": sorted(one.version for one in versions_of(state.current)),
    }
    if state.rollout.pinned_gangs:
        facts["pinned_gangs"] = state.rollout.pinned_gangs
    for name in ("canary", "shadow"):
        trial = getattr(state.rollout, name)
        if trial is not None:
            facts[name] = {"version": trial.version, "share": trial.share}
    return facts


def _note(state: NameState, version: int) -> str:
    return state.notes.versions.get(version, VersionNote()).note


def _differing(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, object]:
    return {
        alias: {"from": before.get(alias), "to": after.get(alias)}
        for alias in sorted({*before, *after})
        if before.get(alias) != after.get(alias)
    }
