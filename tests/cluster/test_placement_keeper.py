"""Placement groups of dead gangs, which Serve has lost sight of, and those of living ones, which must stay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.cluster.replicas import serve_watch
from motet.cluster.replicas.serve_watch import PlacementKeeper, ownerless

GANG = "SERVE_REPLICA::motet#gang#"


def table(*names: str, state: str = "CREATED") -> dict[str, dict[str, Any]]:
    return {f"id of {name}": {"name": name, "state": state} for name in names}


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(serve_watch, "remove_placement", found.append)
    return found


def test_only_what_a_gang_has_left_is_ownerless() -> None:
    of_others = ["SERVE_REPLICA::motet#router#a", "SERVE_REPLICA::other#gang#a", "SERVE_REPLICA::gang#a", "mine", ""]
    there = table(f"{GANG}dead", f"{GANG}lives", *of_others)
    gone = table(f"{GANG}gone", state="REMOVED")
    waits = table(f"{GANG}waits", state="PENDING")
    found = ownerless(there | gone | waits, {f"{GANG}lives"}, GANG)
    assert found == {f"{GANG}dead": f"id of {GANG}dead", f"{GANG}waits": f"id of {GANG}waits"}


def test_the_prefix_is_that_of_serves_own_names() -> None:
    from ray.serve._private.common import DeploymentID, ReplicaID

    prefix = ReplicaID("", DeploymentID(name="gang", app_name="motet")).to_full_id_str()
    assert prefix == GANG
    assert ReplicaID("abc", DeploymentID(name="gang", app_name="motet")).to_full_id_str() == f"{GANG}abc"


def test_what_a_dead_gang_holds_is_freed_at_the_second_look(removed: list[str]) -> None:
    found = {"dead": "1"}
    keeper = PlacementKeeper("motet", "gang", lambda: found)
    keeper.keep()
    assert removed == []
    keeper.keep()
    assert removed == ["1"]


def test_one_that_cannot_be_removed_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []

    def remove(placement_id: str) -> None:
        if placement_id == "1":
            raise RuntimeError("Ray does not know it")
        removed.append(placement_id)

    monkeypatch.setattr(serve_watch, "remove_placement", remove)
    keeper = PlacementKeeper("motet", "gang", lambda: {"a": "1", "b": "2"})
    keeper.keep()
    keeper.keep()
    assert removed == ["2"]


@given(looks=st.lists(st.sets(st.sampled_from("abcd")), max_size=12))
def test_what_has_an_owner_at_every_other_look_stays(looks: list[set[str]]) -> None:
    """Serve makes a placement group before its actor: one look may fall between the two."""
    removed: list[str] = []
    left = iter([{name: name for name in look} for look in looks])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_watch, "remove_placement", removed.append)
        keeper = PlacementKeeper("motet", "gang", lambda: next(left))
        for _ in looks:
            keeper.keep()
    assert sorted(removed) == sorted(name for before, after in pairwise(looks) for name in before & after)
