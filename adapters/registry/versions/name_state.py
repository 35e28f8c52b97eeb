"""All that the registry knows of a name, and every change of it as a pure function: state in, state out.

Raises NoSuchVersion and VersionRefused, whose messages are for the tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
from msgspec import structs

from ...adapter import AdapterVersion
from ...errors import NoSuchVersion, VersionRefused
from ...names import check_alias
from ..events import decode_adapter
from .rollout import (
    MAX_ALIASES,
    MAX_PINNED_GANGS,
    MAX_VERSIONS,
    Canary,
    Rollout,
    Shadow,
    rollout_of,
    selected,
    version_of,
    versions_of,
    with_others,
)

Ending = Literal["promoted", "stopped", "superseded", "rolled_back"]
MAX_NOTE_CHARS: Final = 1000


class VersionNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """Free text about a version, and its uploader. Routers do not keep it."""

    note: str = ""
    uploaded_by: str = ""  # id of a key
    user: str = ""  # the user that it belongs to: the uploader, or the owner of the private adapter; empty: no user


class EndedCanary(msgspec.Struct, frozen=True):
    """How the last trial of a name ended."""

    id: str
    version: int
    share: float
    state: Ending
    reason: str
    ended_at: float  # Unix time, seconds


class NameNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    versions: Mapping[int, VersionNote] = {}
    last_canary: EndedCanary | None = None


NO_NOTES: Final = NameNotes()
_decode_notes: Final = msgspec.json.Decoder(NameNotes).decode


@dataclass(frozen=True)
class NameState:
    """A name that has a current version."""

    current: AdapterVersion
    notes: NameNotes = NO_NOTES

    @property
    def rollout(self) -> Rollout:
        return rollout_of(self.current)

    def find(self, selector: str) -> AdapterVersion:
        """The version that a number or an alias stands for. Raises NoSuchVersion."""
        version = selected(self.current, selector)
        if version is None:
            raise NoSuchVersion(
                f"{self.current.name}@{selector[:80]} does not exist: there is no such version or alias"
            )
        return version


def decode_name(field: str, record: str | None, notes: str | None) -> NameState | None:
    """The name that its record and notes in Redis describe; None: there is no such name."""
    if record is None:
        return None
    return NameState(decode_adapter(field, record), NO_NOTES if notes is None else _decode_notes(notes))


def no_version_yet(name: str) -> VersionRefused:
    """The error for a first version of a name that is not to become current."""
    return VersionRefused(f"{name} has no version yet, and its first one is current: leave activate out")


def with_upload(
    state: NameState | None, upload: AdapterVersion, note: VersionNote, *, activate: bool, now: float
) -> NameState:
    """The name with a new version, which is its current one if `activate`. The oldest versions may go."""
    if state is None:
        if not activate:
            raise no_version_yet(upload.name)
        return NameState(upload, _noted(NO_NOTES, upload.version, note))
    notes = _noted(state.notes, upload.version, note)
    if activate:
        return _trimmed(_with_current(replace(state, notes=notes), upload, now))
    rollout = with_others(state.rollout, state.rollout.others, upload)
    return _trimmed(replace(_with_rollout(state, rollout), notes=notes))


def promoted(state: NameState, selector: str | None, now: float) -> NameState:
    """The name with another current version; None: that of its canary. A canary ends with it."""
    canary = state.rollout.canary
    if selector is None:
        if canary is None:
            raise VersionRefused(f"{state.current.name} has no canary: say which version is to be promoted")
        selector = str(canary.version)
    target = state.find(selector)
    if target.version == state.current.version:
        return state
    return _with_current(state, target, now)


def rolled_back(state: NameState, now: float) -> NameState:
    """The name with the version that was current before. A canary ends with it."""
    version_numbers = {facts.version for facts in state.rollout.others}
    before = [version for version in state.rollout.previous if version in version_numbers]
    if not before:
        raise VersionRefused(f"{state.current.name} has had no other current version that is kept: promote one")
    target = state.find(str(before[-1]))
    return _with(_with_current(state, target, now), previous=tuple(before[:-1]))


def with_alias(state: NameState, alias: str, selector: str | None) -> NameState:
    """The name with an alias for a version, or without the alias. Raises AdapterInvalid for a bad alias."""
    check_alias(alias)
    aliases = dict(state.rollout.aliases)
    if selector is None:
        if aliases.pop(alias, None) is None:
            raise NoSuchVersion(f"{state.current.name}@{alias} does not exist: there is no such version or alias")
    else:
        aliases[alias] = state.find(selector).version
    if len(aliases) > MAX_ALIASES:
        raise VersionRefused(f"{state.current.name} has {MAX_ALIASES} aliases, which is the most: delete one")
    return _trimmed(_with(state, aliases=aliases))


def with_canary(state: NameState, selector: str, share: float, canary_id: str, now: float) -> NameState:
    """The name with a version on trial. One that is on trial already gets the new share, and keeps its id."""
    version = _on_trial(state, selector, "canary")
    running = state.rollout.canary
    if running is not None and running.version == version:
        return _with(state, canary=structs.replace(running, share=share))
    state = without_canary(state, "superseded", f"version {version} is on trial instead", now)
    return _with(state, canary=Canary(canary_id, version, share, now))


def _on_trial(state: NameState, selector: str, role: str) -> int:
    """The number of a version that can answer what the current one is asked. Raises VersionRefused for another."""
    target, current = state.find(selector), state.current
    if target.version == current.version:
        raise VersionRefused(f"version {target.version} of {current.name} is the current one: a {role} is another")
    if bool(target.num_labels) != bool(current.num_labels):
        raise VersionRefused(
            f"of the versions {target.version} and {current.version} of {current.name} one is a classifier, and "
            f"answers other requests: a {role} is of the current version's kind"
        )
    return target.version


def without_canary(state: NameState, ending: Ending, reason: str, now: float) -> NameState:
    """The name without a trial. `ending`: see `EndedCanary.state`."""
    canary = state.rollout.canary
    if canary is None:
        return state
    ended = EndedCanary(canary.id, canary.version, canary.share, ending, reason, now)
    state = _trimmed(_with(state, canary=None))
    return replace(state, notes=structs.replace(state.notes, last_canary=ended))


def with_shadow(state: NameState, selector: str | None, share: float, shadow_id: str = "") -> NameState:
    """The name with a version that sees requests too; None: without one."""
    if selector is None:
        return _trimmed(_with(state, shadow=None))
    version = _on_trial(state, selector, "shadow")
    return _with(state, shadow=Shadow(shadow_id, version, share))


def with_pin(state: NameState, num_gangs: int) -> NameState:
    """The name whose current version is kept in host memory by `num_gangs` gangs; 0: it is not pinned."""
    if num_gangs == 0 and not state.rollout.pinned_gangs:
        raise NoSuchVersion(f"{state.current.name} is not pinned")
    return _with(state, pinned_gangs=num_gangs)


def with_note(state: NameState, selector: str, text: str) -> NameState:
    version = state.find(selector).version
    note = state.notes.versions.get(version, VersionNote())
    return replace(state, notes=_noted(state.notes, version, structs.replace(note, note=text)))


def _with_current(state: NameState, target: AdapterVersion, now: float) -> NameState:
    """The canary ends; so does a shadow that would now answer itself."""
    canary, before = state.rollout.canary, state.current
    if canary is not None:
        is_it = canary.version == target.version
        ending: Ending = "promoted" if is_it else "superseded"
        state = without_canary(state, ending, f"version {target.version} is current", now)
    versions = [facts for facts in state.rollout.others if facts.version != target.version]
    rollout = with_others(state.rollout, versions, before)
    shadow = rollout.shadow
    if shadow is not None and shadow.version == target.version:
        shadow = None
    previous = (*(version for version in rollout.previous if version != target.version), before.version)
    changed = structs.replace(rollout, previous=previous[-MAX_VERSIONS:], shadow=shadow)
    return replace(state, current=replace(target, rollout=changed.json()))


def _trimmed(state: NameState) -> NameState:
    """The name without its oldest versions, as far as nothing points to them."""
    rollout = state.rollout
    pointed_to = rollout.pointed_to()
    free = [facts for facts in rollout.others if facts.version not in pointed_to]
    numbers_to_drop = {facts.version for facts in free[: max(0, len(free) + 1 - MAX_VERSIONS)]}
    if not numbers_to_drop:
        return state
    rollout = with_others(rollout, [facts for facts in rollout.others if facts.version not in numbers_to_drop])
    previous = tuple(version for version in rollout.previous if version not in numbers_to_drop)
    versions = {version: note for version, note in state.notes.versions.items() if version not in numbers_to_drop}
    state = _with_rollout(state, structs.replace(rollout, previous=previous))
    return replace(state, notes=structs.replace(state.notes, versions=versions))


def _with(state: NameState, **changes: object) -> NameState:
    return _with_rollout(state, structs.replace(state.rollout, **changes))


def _with_rollout(state: NameState, rollout: Rollout) -> NameState:
    return replace(state, current=replace(state.current, rollout=rollout.json()))


def _noted(notes: NameNotes, version: int, note: VersionNote) -> NameNotes:
    if note == VersionNote():
        return notes
    return structs.replace(notes, versions={**notes.versions, version: note})


def check_integrity(state: NameState) -> None:
    """Raises AssertionError if an invariant is broken."""
    rollout = state.rollout
    versions = [facts.version for facts in rollout.others]
    assert versions == sorted(set(versions)) and state.current.version not in versions
    all_versions = {*versions, state.current.version}
    assert {*rollout.invocations, *rollout.own_texts} <= {*versions}, "of versions that are gone"
    assert rollout.pointed_to() <= all_versions, "something points to a version that is gone"
    assert len(versions) < MAX_VERSIONS + len(rollout.pointed_to()) + 1 and len(rollout.aliases) <= MAX_ALIASES
    for trial in (rollout.canary, rollout.shadow):
        assert trial is None or trial.version != state.current.version
        assert trial is None or version_of(state.current, trial.version) is not None
    assert set(state.notes.versions) <= all_versions
    assert 0 <= rollout.pinned_gangs <= MAX_PINNED_GANGS


# What a change of a name's state has changed, for the audit log: a pure function of both states.


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
        "versions": sorted(adapter.version for adapter in versions_of(state.current)),
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
