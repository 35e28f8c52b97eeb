"""Histories, aliases, promoting and rolling back, in a real Redis and as pure functions."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.adapter import AdapterVersion
from motet.adapters.errors import AdapterInvalid, NameTaken, NoSuchVersion, VersionRefused
from motet.adapters.registry.events import AdapterSet
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_keys import CANARIES, PREFIX
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.registry.versions import name_state
from motet.adapters.registry.versions.name_state import NameState, VersionNote, check_integrity, with_upload
from motet.adapters.registry.versions.rollout import (
    MAX_ALIASES,
    MAX_VERSIONS,
    rollout_of,
    selected,
    version_of,
    versions_of,
)
from motet.tests.rigs.patience import eventually_in_loop as eventually

OLD_RECORD = '3 %s {"module_ranks": {"q_proj": 8}, "num_bytes": 1000, "created_at": 1.5}'


@pytest.fixture
def registry(redis_client: Redis) -> Registry:
    return Registry(redis_client)


def facts(number: int) -> dict[str, Any]:
    return {"digest": f"{number:016x}" * 4, "module_ranks": {"q_proj": 8}, "num_bytes": 1000 + number}


async def upload(registry: Registry, number: int, *, name: str = "x", activate: bool = True) -> AdapterVersion:
    adapter, _, _ = await registry.names.register("acme", name, **facts(number), activate=activate)
    return adapter


async def test_a_history_keeps_versions_and_what_people_say_of_them(registry: Registry) -> None:
    note = VersionNote("more pirates", "key-1")
    await registry.names.register("acme", "x", **facts(1), note=note)
    await upload(registry, 2)
    tried = await upload(registry, 3, activate=False)
    state = await registry.names.get("acme", "x")
    assert (state.current.version, tried.version) == (2, 3)
    assert [one.version for one in versions_of(state.current)] == [3, 2, 1]
    assert state.notes.versions == {1: note}
    assert selected(state.current, "3") == tried
    assert [selected(state.current, wrong) for wrong in ("4", "0", "03", "", "prod", "9" * 99, "٣")] == [None] * 7
    state = await registry.names.change("acme", "x", lambda name, _: name_state.with_note(name, "3", "try me"))
    assert state.notes.versions[3].note == "try me"
    assert (await registry.names.get("acme", "x")).notes == state.notes
    again, current, created = await registry.names.register("acme", "x", **facts(3), activate=False)
    assert (again.version, current.version, created) == (3, 2, False)


async def test_each_version_keeps_its_invocation_and_its_labels(registry: Registry) -> None:
    """Of activated LoRA and classifiers: as the current version, as another one, and as one that is current again."""
    for number in range(1, MAX_VERSIONS + 4):
        ids = (number, 7) if number % 2 else ()
        await registry.names.register(
            *("acme", "x"),
            **facts(number),
            invocation_token_ids=ids,
            num_labels=number % 3,
            activate=number not in (3, 4),
        )
    state = await registry.names.get("acme", "x")
    for change in (lambda name, now: name, lambda name, now: name_state.promoted(name, "9", now)):
        state = await registry.names.change("acme", "x", change)
        check_integrity(state)
        versions = {one.version: one.invocation_token_ids for one in versions_of(state.current)}
        assert versions == {number: (number, 7) if number % 2 else () for number in versions}
        assert {one.version: one.num_labels for one in versions_of(state.current)} == {
            number: number % 3 for number in versions
        }
        assert len(versions) == MAX_VERSIONS
    assert state.current.version == 9
    assert (await registry.names.get("acme", "x")).current.invocation_token_ids == (9, 7)


async def test_a_classifier_stands_trial_beside_classifiers_alone(registry: Registry) -> None:
    """Requests for the name ask it for classes, and another one for text."""
    for number, num_labels in enumerate((0, 3, 2), start=1):
        await registry.names.register("acme", "x", **facts(number), num_labels=num_labels)
    state = await registry.names.get("acme", "x")
    assert name_state.with_canary(state, "2", 0.5, "c", 1.0).rollout.canary is not None
    assert name_state.with_shadow(state, "2", 0.5, "s").rollout.shadow is not None
    refused = "of the versions 1 and 3 of x one is a classifier, and answers other"
    with pytest.raises(VersionRefused, match=refused):
        name_state.with_canary(state, "1", 0.5, "c", 1.0)
    with pytest.raises(VersionRefused, match=refused):
        name_state.with_shadow(state, "1", 0.5, "s")


async def test_the_first_version_of_a_name_is_current(registry: Registry) -> None:
    with pytest.raises(VersionRefused, match="its first one is current"):
        await upload(registry, 1, activate=False)
    with pytest.raises(NoSuchVersion, match="`x` does not exist"):
        await registry.names.get("acme", "x")


async def test_of_uploads_at_once_that_need_a_new_name_one_gets_it(registry: Registry) -> None:
    async def make(number: int) -> int | None:
        try:
            made, _, _ = await registry.names.register("acme", "x", **facts(number), must_be_new=True)
        except NameTaken:
            return None
        return made.version

    assert sorted(await asyncio.gather(*map(make, range(5))), key=str) == [1, None, None, None, None]
    assert await make(9) is None and (await upload(registry, 9)).version == 2
    assert await registry.names.delete("acme", "x") is not None
    assert await make(9) == 3


async def test_promote_and_roll_back_go_there_and_back(registry: Registry) -> None:
    for number in (1, 2, 3):
        await upload(registry, number)
    change = registry.names.change
    state = await change("acme", "x", lambda name, now: name_state.promoted(name, "1", now))
    assert (state.current.version, rollout_of(state.current).previous) == (1, (2, 3))
    for expected in (3, 2):
        state = await change("acme", "x", name_state.rolled_back)
        assert state.current.version == expected
        assert state.current.digest == facts(expected)["digest"]
        check_integrity(state)
    with pytest.raises(VersionRefused, match="no other current version"):
        await change("acme", "x", name_state.rolled_back)
    with pytest.raises(NoSuchVersion, match="x@7 does not exist"):
        await change("acme", "x", lambda name, now: name_state.promoted(name, "7", now))
    assert (await upload(registry, 9)).version == 4  # numbers are never used again


async def test_a_promotion_is_one_event_and_every_view_follows_though_the_number_went_down(registry: Registry) -> None:
    views = [RegistryView(registry) for _ in range(2)]
    for view in views:
        await view.start()
    await upload(registry, 1)
    newest = await upload(registry, 2)
    before = await registry.num_events()
    state = await registry.names.change("acme", "x", name_state.rolled_back)
    assert await registry.num_events() == before + 1
    for view in views:
        await eventually(lambda view=view: view._names.find(("acme", "x"))[1] == state.current)  # type: ignore[misc]
        view.apply(AdapterSet(newest))  # late
        found = await view.resolve("acme", "x")
        assert found == state.current
        assert version_of(found, 2) == newest
        await view.stop()


async def test_aliases(registry: Registry) -> None:
    await upload(registry, 1)
    await upload(registry, 2)
    change = registry.names.change
    state = await change("acme", "x", lambda name, _: name_state.with_alias(name, "prod", "1"))
    assert selected(state.current, "prod") == version_of(state.current, 1)
    state = await change("acme", "x", lambda name, _: name_state.with_alias(name, "staging", "prod"))
    assert rollout_of(state.current).aliases == {"prod": 1, "staging": 1}
    for bad in ("", "1st", "a@b", "a/b", "a" * 65, "é"):
        with pytest.raises(AdapterInvalid, match="alias"):
            name_state.with_alias(state, bad, "1")
    with pytest.raises(NoSuchVersion):
        name_state.with_alias(state, "dev", None)
    for number in range(MAX_ALIASES - 2):
        state = name_state.with_alias(state, f"a{number}", "2")
    with pytest.raises(VersionRefused, match="which is the most"):
        name_state.with_alias(state, "more", "2")


async def test_the_oldest_versions_go_unless_something_points_to_them_and_a_sweep_spares_all_others(
    registry: Registry,
) -> None:
    await upload(registry, 1)
    await registry.names.change("acme", "x", lambda name, _: name_state.with_alias(name, "prod", "1"))
    for number in range(2, MAX_VERSIONS + 6):
        await upload(registry, number)
    state = await registry.names.get("acme", "x")
    newest = MAX_VERSIONS + 5
    kept = [1, *range(newest - MAX_VERSIONS + 1, newest + 1)]
    assert sorted(one.version for one in versions_of(state.current)) == kept
    digests = await registry.digests()
    assert [number for number in range(1, newest + 1) if facts(number)["digest"] in digests] == kept
    await registry.names.change("acme", "x", lambda name, _: name_state.with_alias(name, "prod", None))
    state = await registry.names.get("acme", "x")
    assert 1 not in [one.version for one in versions_of(state.current)]
    assert len(await registry.digests()) <= MAX_VERSIONS


async def test_deleting_a_name_deletes_all_of_it(registry: Registry, redis_client: Redis) -> None:
    await registry.names.register("acme", "x", **facts(1), note=VersionNote("hello"))
    await upload(registry, 2)
    await registry.names.change("acme", "x", lambda name, now: name_state.with_canary(name, "1", 0.5, "c", now))
    assert await redis_client.zrange(CANARIES, 0, -1) == ["acme/x"]
    await registry.names.delete("acme", "x")
    assert len(await registry.digests()) == 0
    assert await redis_client.hgetall(PREFIX + "version_notes") == {}
    assert await redis_client.zrange(CANARIES, 0, -1) == []
    adapter = await upload(registry, 3)
    assert [one.version for one in versions_of(adapter)] == [3]


async def test_a_record_of_before_there_were_histories_is_read_and_goes_on(
    registry: Registry, redis_client: Redis
) -> None:
    digest = "e" * 64
    await redis_client.hset(PREFIX + "adapters", "acme/x", OLD_RECORD % digest)
    await redis_client.hset(PREFIX + "versions", "acme/x", "3")
    await redis_client.zadd(PREFIX + "names", {"acme/x": 0})
    old = await registry.get("acme", "x")
    assert old is not None and (old.version, old.digest, old.order) == (3, digest, (0, 3))
    assert digest in await registry.digests()
    assert (await upload(registry, 4)).version == 4
    state = await registry.names.change("acme", "x", name_state.rolled_back)
    assert state.current == old
    assert digest in await registry.digests()


async def test_changes_at_once_all_happen(registry: Registry) -> None:
    await upload(registry, 1)

    def alias(number: int) -> Any:
        return registry.names.change("acme", "x", lambda name, _: name_state.with_alias(name, f"a{number}", "1"))

    await asyncio.gather(*(alias(number) for number in range(8)), *(upload(registry, n) for n in range(2, 8)))
    state = await registry.names.get("acme", "x")
    assert len(state.rollout.aliases) == 8
    assert sorted(one.version for one in versions_of(state.current)) == list(range(1, 8))


def test_any_history_keeps_its_invariants() -> None:
    chooser = random.Random(3)
    state: NameState | None = None
    last = 0
    for step in range(3000):
        now = float(step)
        known = [1] if state is None else [one.version for one in versions_of(state.current)]
        pick = str(chooser.choice(known))
        try:
            match chooser.randrange(9):
                case 0 | 1 | 2:
                    new = AdapterVersion("acme", "x", last + 1, f"{last + 1:064x}", {"q_proj": 1}, 1, now)
                    note = VersionNote("n" * chooser.randrange(2))
                    state = with_upload(state, new, note, activate=chooser.random() < 0.5, now=now)
                    last += 1
                case 3 if state is not None:
                    state = name_state.promoted(state, chooser.choice([pick, None]), now)
                case 4 if state is not None:
                    state = name_state.rolled_back(state, now)
                case 5 if state is not None:
                    alias = f"a{chooser.randrange(10)}"
                    state = name_state.with_alias(state, alias, chooser.choice([pick, None]))
                case 6 if state is not None:
                    state = name_state.with_canary(state, pick, 0.1, f"c{step}", now)
                case 7 if state is not None:
                    state = name_state.without_canary(state, "stopped", "", now)
                case 8 if state is not None:
                    state = name_state.with_shadow(state, chooser.choice([pick, None]), 0.5, "s")
        except (VersionRefused, NoSuchVersion):
            pass
        if state is not None:
            check_integrity(state)
    assert last > 500


async def test_a_version_keeps_the_form_of_its_answers_and_another_form_makes_another_version(
    registry: Registry,
) -> None:
    async def uploaded(template: str) -> tuple[int, bool]:
        one, _, created = await registry.names.register("acme", "x", **facts(1), response_template=template)
        return one.version, created

    assert [await uploaded(one) for one in ("", "gemma", "gemma", "glm")] == [
        (1, True),
        (2, True),
        (2, False),
        (3, True),
    ]
    current = (await registry.names.get("acme", "x")).current
    assert [one.response_template for one in versions_of(current)] == ["glm", "gemma", ""]


def _promoted(selector: str, state: NameState, now: float) -> NameState:
    return name_state.promoted(state, selector, now)


async def test_a_version_keeps_its_chat_template_and_another_one_makes_another_version(registry: Registry) -> None:
    first, second = "1" * 64, "2" * 64

    async def uploaded(template: str, *, activate: bool = True) -> tuple[int, bool]:
        one, _, created = await registry.names.register("acme", "x", **facts(1), own_text=template, activate=activate)
        return one.version, created

    assert [await uploaded(one) for one in ("", first, first, second)] == [(1, True), (2, True), (2, False), (3, True)]
    assert await uploaded(first, activate=False) == (2, False)

    async def templates() -> list[str]:
        current = (await registry.names.get("acme", "x")).current
        assert (await registry.get_many([("acme", "x")]))[0] == current
        return [one.own_text for one in versions_of(current)]

    assert await templates() == [second, first, ""]
    for version in (1, 2):
        state = await registry.names.change("acme", "x", partial(_promoted, str(version)))
        assert state.current.own_text == ("", first)[version - 1]
        assert await templates() == [second, first, ""]
