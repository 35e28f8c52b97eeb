"""The store of the registry's records: what it compares, counts and bounds, against a real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from motet.adapters.errors import QuotaExceeded, RegistryFull, RegistryUnavailable
from motet.adapters.registry import store as record_store
from motet.adapters.registry.registry_keys import EVENT_NUMBER, EVENTS, PREFIX
from motet.adapters.registry.store import Bound, Numbered, Snapshot, Store, Transaction, reply_text

KEY, OTHER = PREFIX + "test", PREFIX + "other"


@pytest.fixture
def store(redis_client: Redis) -> Store:
    return Store(redis_client)


async def test_changes_that_conflict_are_computed_again_and_none_is_lost(store: Store) -> None:
    num_computed = 0

    def longer(rows: Snapshot) -> Transaction:
        nonlocal num_computed
        num_computed += 1
        return Transaction(writes=[("SET", KEY, (rows["GET", KEY] or "") + "x")])

    await asyncio.gather(*(store.change(longer, [("GET", KEY)]) for _ in range(20)))
    assert await store.read(("GET", KEY)) == ["x" * 20]
    assert num_computed > 20


async def test_a_row_that_was_not_read_is_read_when_it_is_not_empty(store: Store, redis_client: Redis) -> None:
    await redis_client.hset(KEY, "a", "1")
    seen = []

    def change(rows: Snapshot) -> Transaction:
        seen.append((rows["HGET", KEY, "a"], rows["HGET", KEY, "b"]))
        return Transaction(writes=[("HSET", KEY, "b", "2")])

    await store.change(change, [])
    assert seen == [(None, None), ("1", None)]


async def test_one_that_conflicts_for_ever_gives_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "MAX_TRIES", 3)
    with pytest.raises(RegistryUnavailable, match="this thing keeps changing: try again"):
        await store.change(
            lambda rows: Transaction(value=rows["TIME",], writes=[("SET", KEY, 1)]), [("TIME",)], "this thing keeps"
        )
    assert await store.read(("GET", KEY)) == [None]


async def test_counters_do_not_conflict_and_keep_their_bound(store: Store, redis_client: Redis) -> None:
    num_computed = 0

    def refuse(num: int) -> None:
        raise QuotaExceeded(f"{num} are there")

    def one_more(_: Snapshot) -> Transaction:
        nonlocal num_computed
        num_computed += 1
        counters = [(2, "HGET", KEY, "a"), (1, "HGET", OTHER, "a")]
        return Transaction(increases=[(KEY, "a", 0, 7)], bounds=[Bound(100 - 7, counters, refuse)])

    await redis_client.hset(OTHER, "a", "30")
    done = await asyncio.gather(*(store.change(one_more, []) for _ in range(20)), return_exceptions=True)
    assert Counter(str(one) for one in done if isinstance(one, Exception)) == {"100 are there": 10}
    assert await redis_client.hget(KEY, "a") == "0 70"
    assert num_computed == 20


numbers = st.lists(st.integers(-(2**52), 2**52), min_size=1, max_size=3)


@given(st.lists(numbers, min_size=1, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_counts_are_sums_and_vanish_with_zero(
    store: Store, redis_client: Redis, increases: list[list[int]]
) -> None:
    await redis_client.delete(KEY)
    total = [0, 0, 0]
    for increase in increases:
        if any(abs(a + b) > 2**53 for a, b in zip(total, increase, strict=False)):
            continue  # Lua's numbers are exact up to there
        total = [a + b for a, b in zip(total, [*increase, 0, 0], strict=False)]
        await store.change(lambda _, increase=increase: Transaction(increases=[(KEY, "a", *increase)]), [])  # type: ignore[misc]
        text: Any = await redis_client.hget(KEY, "a")
        assert (text is None) == (not any(total))
        assert text is None or [int(number) for number in [*text.split(), 0, 0]][:3] == total


async def test_texts_have_the_numbers_of_their_events(store: Store, redis_client: Redis) -> None:
    await redis_client.set(EVENT_NUMBER, 41)
    change = Transaction(
        writes=[("HSET", KEY, "a", Numbered("<", ">", 2)), ("ZADD", OTHER, Numbered(""), "b")],
        events=[("one", "a", "1"), ("two", "b", Numbered("v "))],
    )
    assert (await store.change(lambda _: change, [])).last_event == 41
    assert await redis_client.hget(KEY, "a") == "<43>"
    assert await redis_client.zscore(OTHER, "b") == 42
    events: Any = await redis_client.xrange(EVENTS)
    assert [tuple(fields.values()) for _, fields in events] == [("42", "one", "a", "1"), ("43", "two", "b", "v 42")]


async def test_a_command_is_called_for_each_word_of_an_earlier_reply(store: Store, redis_client: Redis) -> None:
    mapping: Any = {f"f{number}": str(number) for number in range(10_000)}
    await redis_client.hset(KEY, mapping=mapping)
    await redis_client.zadd(OTHER, dict.fromkeys([*mapping, "missing"], 0))
    fields, values = await store.read(("ZRANGE", OTHER, 0, -1), ("HGET", KEY, (1,)))
    assert dict(zip(fields, values, strict=True)) == {**mapping, "missing": None}
    assert await store.read(("ZRANGE", "nothing", 0, -1), ("HGET", KEY, (1,))) == [[], []]


async def test_replies_of_all_kinds_are_compared(store: Store, redis_client: Redis) -> None:
    await redis_client.hset(KEY, mapping={"a": "1", "b": ""})
    await redis_client.zadd(OTHER, {"x": 1234567890123, "y": 0.5})
    rows: list[Any] = [
        ("HGETALL", KEY),
        ("HMGET", KEY, "a", "missing", "b"),
        ("HLEN", KEY),
        ("ZMSCORE", OTHER, "x", "", "y"),
    ]
    rows += [("HEXISTS", KEY, "a"), ("GET", PREFIX + "nothing"), ("ZRANGE", OTHER, 0, -1, "WITHSCORES")]
    num_computed = 0

    def change(read: Snapshot) -> Transaction:
        nonlocal num_computed
        num_computed += 1
        return Transaction(value=[read[row] for row in rows], writes=[("SET", PREFIX + "done", 1)])

    replies = (await store.change(change, rows)).value
    assert num_computed == 1
    assert [reply_text(reply) for reply in replies[1:4]] == ["1\n\n", "2", "1234567890123\n\n0.5"]


async def test_what_frees_memory_is_written_while_redis_is_full(store: Store, redis_client: Redis) -> None:
    await redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await redis_client.set("a", "b")
        with pytest.raises(RegistryFull):
            await store.change(lambda _: Transaction(writes=[("SET", KEY, 1)], when_full=False), [("GET", KEY)])
        await store.change(lambda _: Transaction(writes=[("SET", KEY, 2)]), [("GET", KEY)])
        assert await store.read(("GET", KEY)) == ["2"]
    finally:
        await redis_client.config_set("maxmemory", 0)
