"""What the audit log says of a change of a name: what differs, from what to what."""

from __future__ import annotations

import pytest

from motet.adapters.adapter import AdapterVersion
from motet.adapters.registry.versions import name_state
from motet.adapters.registry.versions.name_state import NameState, VersionNote, changed_fields, with_upload


def uploaded(state: NameState | None, number: int, *, activate: bool = True) -> NameState:
    version = AdapterVersion("acme", "x", number, f"{number:064x}", {"q_proj": 8}, 1000, 1.0)
    return with_upload(state, version, VersionNote(f"secret {number}"), activate=activate, now=2.0)


@pytest.fixture
def state() -> NameState:
    """Versions 1 to 3, of which 2 is current."""
    return uploaded(uploaded(uploaded(None, 1), 2), 3, activate=False)


def test_an_upload(state: NameState) -> None:
    assert changed_fields(None, uploaded(None, 1)) == {
        "current": {"from": None, "to": 1},
        "versions": {"from": None, "to": [1]},
    }
    assert changed_fields(state, uploaded(state, 4)) == {
        "current": {"from": 2, "to": 4},
        "versions": {"from": [1, 2, 3], "to": [1, 2, 3, 4]},
        "notes": [4],
    }


def test_promoting_and_going_back(state: NameState) -> None:
    promoted = name_state.promoted(state, "3", 3.0)
    assert changed_fields(state, promoted) == {"current": {"from": 2, "to": 3}}
    assert changed_fields(promoted, name_state.rolled_back(promoted, 4.0)) == {"current": {"from": 3, "to": 2}}


def test_aliases(state: NameState) -> None:
    one = name_state.with_alias(state, "prod", "1")
    assert changed_fields(state, one) == {"aliases": {"prod": {"from": None, "to": 1}}}
    other = name_state.with_alias(name_state.with_alias(one, "test", "3"), "prod", "2")
    assert changed_fields(one, other) == {"aliases": {"prod": {"from": 1, "to": 2}, "test": {"from": None, "to": 3}}}
    assert changed_fields(other, name_state.with_alias(other, "prod", None)) == {
        "aliases": {"prod": {"from": 2, "to": None}}
    }


def test_a_canary_and_how_it_ends(state: NameState) -> None:
    running = name_state.with_canary(state, "3", 0.1, "c", 3.0)
    assert changed_fields(state, running) == {"canary": {"from": None, "to": {"version": 3, "share": 0.1}}}
    more = name_state.with_canary(running, "3", 0.5, "d", 3.0)
    assert changed_fields(running, more) == {
        "canary": {"from": {"version": 3, "share": 0.1}, "to": {"version": 3, "share": 0.5}}
    }
    back = name_state.without_canary(more, "rolled_back", "answers that failed: 9 of 20", 4.0)
    assert changed_fields(more, back) == {
        "canary": {"from": {"version": 3, "share": 0.5}, "to": None},
        "canary_ended": {"version": 3, "state": "rolled_back", "reason": "answers that failed: 9 of 20"},
    }


def test_a_shadow(state: NameState) -> None:
    seen = name_state.with_shadow(state, "3", 1.0, "s")
    assert changed_fields(state, seen) == {"shadow": {"from": None, "to": {"version": 3, "share": 1.0}}}
    assert changed_fields(seen, name_state.with_shadow(seen, None, 0.0)) == {
        "shadow": {"from": {"version": 3, "share": 1.0}, "to": None}
    }


def test_a_note_is_not_recorded(state: NameState) -> None:
    noted = name_state.with_note(state, "1", "a secret")
    assert changed_fields(state, noted) == {"notes": [1]}
    assert changed_fields(state, state) == {}
