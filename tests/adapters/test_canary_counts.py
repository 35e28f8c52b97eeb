"""What counts of canaries in a real Redis: as the pure policy says, each tenant's own, and how many there may be."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.errors import CallerGone, VersionRefused
from motet.adapters.registry import canary_counts
from motet.adapters.registry.canary_counts import CanaryCounts, Outcome
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_keys import CANARIES, PREFIX, TENANTS
from motet.adapters.registry.tenants.records import Admission
from motet.adapters.registry.versions import name_state
from motet.adapters.registry.versions.canary_policy import counts_still
from motet.adapters.registry.versions.name_state import NameState
from motet.adapters.registry.versions.rollout import MAX_CANARIES


@pytest.fixture
def counts(redis_client: Redis) -> CanaryCounts:
    return CanaryCounts(redis_client)


def outcome(number: int, sticky: str = "", arm: Any = "canary", *counted: str) -> Outcome:
    return Outcome("acme", "acme/x", f"cmpl-{number}", "c", arm, ("answers", *counted), sticky)


async def test_redis_counts_what_the_policy_lets(counts: CanaryCounts) -> None:
    """Random keys, some of them eager; kinds are bounded each by itself, as not every answer is timed."""
    chooser = random.Random(5)
    own: Counter[tuple[str, str]] = Counter()
    every: Counter[str] = Counter()
    outcomes, uncounted, errors = [], 0, 0
    for number in range(3000):
        sticky = f"{0 if chooser.random() < 0.4 else chooser.randrange(1, 150)}"
        is_error, is_timed = chooser.random() < 0.2, chooser.random() < 0.3
        counted = ["errors"] if is_error else ["first_token 3"] if is_timed else []
        outcomes.append(outcome(number, sticky, "canary", *counted))
        for kind in ("answers", *(["first_token"] if counted == ["first_token 3"] else [])):
            if counts_still(own[kind, sticky], every[kind]):
                own[kind, sticky] += 1
                every[kind] += 1
                errors += is_error
            elif kind == "answers":
                uncounted += 1
    for start in range(0, len(outcomes), 500):
        await counts.add(outcomes[start : start + 500])
    found = (await counts.read("c"))["canary"]
    assert (found.answers, found.uncounted, found.errors) == (every["answers"], uncounted, errors)
    assert found.first_token[3] == every["first_token"]
    assert 0 < uncounted < 3000 and found.answers + uncounted == 3000


async def test_thumbs_of_one_key_are_few(counts: CanaryCounts) -> None:
    await counts.add([outcome(number, "a user") for number in range(30)])
    await counts.add([outcome(100 + number, f"{number}") for number in range(30)])
    reported = [await counts.rate("acme", f"cmpl-{number}", is_good=False, comment="bad") for number in range(30)]
    assert sum(reported) == 2
    assert len(await counts.comments("c")) == 2
    assert await counts.rate("acme", "cmpl-100", is_good=True)
    found = (await counts.read("c"))["canary"]
    assert (found.thumbs_down, found.thumbs_up) == (2, 1)


async def test_what_is_kept_of_sticky_keys_is_bounded(
    counts: CanaryCounts, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary_counts, "MAX_STICKY_FIELDS", 50)
    counts = CanaryCounts(redis_client)
    await counts.add([outcome(number, f"user {number}") for number in range(500)])
    assert await redis_client.hlen(PREFIX + "canary_sticky:c") <= 52
    assert (await counts.read("c"))["canary"].answers == 500


async def test_news_is_of_trials_in_which_something_counted_since_it_was_looked_at(counts: CanaryCounts) -> None:
    assert await counts.updated_trials(10) == []
    await counts.add([outcome(1, "a"), outcome(2, "b")])
    (updated,) = await counts.updated_trials(10)
    assert (updated.canary_id, updated.num) == ("c", 2)
    await counts.add([outcome(3, "a")])  # while the judge reads
    await counts.mark_judged([updated])
    (later,) = await counts.updated_trials(10)
    await counts.mark_judged([later])
    assert await counts.updated_trials(10) == []
    assert await counts.rate("acme", "cmpl-1", is_good=True)
    assert [one.canary_id for one in await counts.updated_trials(10)] == ["c"]
    await counts.mark_judged(await counts.updated_trials(10))
    shadow = Outcome("acme", "acme/x", "shadow-1", "s", "shadow", ("answers",))
    await counts.add([shadow])
    assert await counts.updated_trials(10) == []
    (trial,) = await counts.read_many(["c"])
    assert trial.adapter_id == "acme/x"


async def test_answers_of_a_deleted_tenant_are_not_the_next_one_s(counts: CanaryCounts) -> None:
    """They had the same name, and the later one knows the id of an answer."""
    await counts.add([outcome(1, "a")])
    assert not await counts.rate("acme~1", "cmpl-1", is_good=False)
    assert (await counts.read("c"))["canary"].thumbs_down == 0
    assert await counts.rate("acme", "cmpl-1", is_good=False)


async def test_a_tenant_has_a_bounded_number_of_canaries(redis_client: Redis) -> None:
    registry = Registry(redis_client)
    await redis_client.zadd(CANARIES, {f"acme/other-{number}": 0 for number in range(MAX_CANARIES - 1)})
    await redis_client.zadd(CANARIES, {f"acme2/other-{number}": 0 for number in range(10)})
    for name in ("x", "y"):
        for number in (1, 2):
            facts = {"digest": f"{number:064x}", "module_ranks": {"q_proj": 8}, "num_bytes": 1000}
            await registry.names.register("acme", name, **facts)  # type: ignore[arg-type]

    async def start(name: str, share: float) -> None:
        await registry.names.change(
            "acme", name, lambda state, now: name_state.with_canary(state, "1", share, "c", now)
        )

    await start("x", 0.5)
    await start("x", 0.6)  # one that runs may change
    with pytest.raises(VersionRefused, match=f"{MAX_CANARIES} adapters have a canary"):
        await start("y", 0.5)
    await registry.names.change("acme", "x", lambda state, now: name_state.without_canary(state, "stopped", "", now))
    await start("y", 0.5)


async def test_who_was_deleted_changes_nothing_of_the_next_tenant_s(redis_client: Redis) -> None:
    registry = Registry(redis_client)
    facts = {"digest": f"{1:064x}", "module_ranks": {"q_proj": 8}, "num_bytes": 1000}
    await registry.names.register("acme", "x", **facts)  # type: ignore[arg-type]
    await redis_client.hset(TENANTS, "acme", '{"name": "acme", "num_ended": 1}')

    def with_note(state: NameState, now: float) -> NameState:
        return name_state.with_note(state, "1", "mine")

    with pytest.raises(CallerGone):
        await registry.names.change("acme", "x", with_note, admission=Admission(incarnation=0, last_event=1))
    await registry.names.change("acme", "x", with_note, admission=Admission(incarnation=1, last_event=1))
