"""The ledger: each id once, in whatever order its entries come and however often; sums, archive and removal."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry.ledger.archive import LedgerArchive
from motet.adapters.registry.ledger.entry import NUMBERS, OTHER_USERS, OTHERS, Entry, Group, Stage, merged, parse_group
from motet.adapters.registry.ledger.ledger import Ledger
from motet.adapters.registry.registry import connect
from motet.tests.rigs.ledger_entries import bytes_by_kind, realistic_answers
from motet.tests.rigs.patience import PATIENCE_S

NOON = int(datetime(2026, 11, 22, 12, 30, tzinfo=UTC).timestamp())
DAY = date(2026, 11, 22)
PREFIX = "motet:{tenant:acme}:ledger:"


def entry(number: int = 1, **reported: Any) -> Entry:
    return Entry(
        **{"id": f"cmpl-{number}", "tenant": "acme", "began_at": NOON, "key_id": "k", "adapter": "a", **reported}
    )


@st.composite
def stories(draw: st.DrawFn) -> list[Entry]:
    """Entries of a few ids, as several routers may report them."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        number = draw(st.integers(1, 3))
        found.append(
            entry(
                number,
                began_at=NOON + 3600 * number * 9,  # on two days
                stage=draw(st.sampled_from(Stage)),
                key_id=draw(st.sampled_from(["k", "é", "z"])),
                user=draw(st.sampled_from(["", "ann", "k"])),
                adapter=draw(st.sampled_from(["a", "~ann/poet"])),
                version=draw(st.integers(0, 1)),
                requests=1,
                output_tokens=draw(st.integers(0, 5)),
                prompt_tokens=draw(st.sampled_from([3, 5, 1 << 45])),
                cached_tokens=draw(st.integers(0, 3)),
                recomputed_tokens=draw(st.integers(0, 2)),
                error=draw(st.sampled_from(["", "timeout"])),
            )
        )
    return found


def totals(entries: list[Entry]) -> dict[tuple[datetime, Group], tuple[int, ...]]:
    """What the ledger should say by hour."""
    by_id: defaultdict[str, list[Entry]] = defaultdict(list)
    for one in entries:
        by_id[one.id].append(one)
    sums: dict[tuple[datetime, Group], tuple[int, ...]] = {}
    for whole in (reduce(merged, same) for same in by_id.values()):
        hour = datetime.fromtimestamp(whole.began_at, UTC).replace(minute=0)
        before = sums.get((hour, whole.group), (0,) * len(NUMBERS))
        sums[hour, whole.group] = tuple(map(sum, zip(before, whole.numbers, strict=True)))
    return sums


@given(stories(), st.randoms())
def test_what_entries_say_together_depends_neither_on_order_nor_on_repetition(story: list[Entry], rng: Any) -> None:
    again = story + rng.choices(story, k=len(story))
    rng.shuffle(again)
    assert totals(again) == totals(story)
    same = [msgspec.structs.replace(one, id="x", began_at=NOON) for one in story]
    for a, b, c in itertools.islice(itertools.combinations_with_replacement(same, 3), 50):
        assert merged(a, merged(b, c)) == merged(merged(a, b), c)
        assert merged(a, b) == merged(b, a)
        assert merged(a, a) == a


def test_the_latest_stage_says_how_an_answer_ended_and_its_cost_never_shrinks() -> None:
    known = entry(output_tokens=9, prompt_tokens=8, cached_tokens=2, requests=1, cut_off=1, error="timeout")
    end = entry(
        stage=Stage.COMPLETE, output_tokens=7, prompt_tokens=8, cached_tokens=8, recomputed_tokens=3, requests=1
    )
    both = merged(known, end)
    assert (both.stage, both.error, both.requests, both.cut_off) == (Stage.COMPLETE, "", 1, 0)
    # The second one found in the cache what the first one had computed.
    assert (both.prompt_tokens, both.cached_tokens, both.output_tokens, both.recomputed_tokens) == (8, 2, 9, 3)


def test_a_group_is_read_as_it_was_written() -> None:
    for group in (Group("", "some/base", 0, ""), Group("k", "~ann/poet", 2, "ab12", "ann@id.example")):
        assert parse_group(str(group)) == group
    assert parse_group("k\tpoet\t2\tab12") == Group("k", "poet", 2, "ab12")  # as before there were users


async def hours_of(ledger: Ledger) -> dict[tuple[datetime, Group], tuple[int, ...]]:
    return {
        (s.start, s.group): s.numbers
        for day in (21, 22, 23)
        async for page in ledger.hours("acme", date(2026, 11, day))
        for s in page
    }


async def entries_of(ledger: Ledger, day: date, tenant_id: str = "acme") -> AsyncIterator[Entry]:
    async for page in ledger.entries_of(tenant_id, day):
        for one in page:
            yield one


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories(), st.randoms())
def test_redis_sums_as_the_rule_says(redis_url: str, story: list[Entry], rng: Any) -> None:
    async def check() -> None:
        client = connect(redis_url, timeout_s=PATIENCE_S)  # the machine may be busy
        try:
            await client.flushall()
            ledger = Ledger(client, kept_days=3, timeout_s=PATIENCE_S)
            again = story + rng.choices(story, k=len(story))
            rng.shuffle(again)
            for start in range(0, len(again), 3):
                await ledger.take(again[start : start + 3])
            expected = totals(story)
            assert await hours_of(ledger) == {key: numbers for key, numbers in expected.items() if any(numbers)}
            by_day: dict[tuple[date, Group], tuple[int, ...]] = {}
            for (hour, group), numbers in expected.items():
                before = by_day.get((hour.date(), group), (0,) * len(NUMBERS))
                by_day[hour.date(), group] = tuple(map(sum, zip(before, numbers, strict=True)))
            days = [s async for page in ledger.days("acme", DAY) for s in page]
            assert {(s.start.date(), s.group): s.numbers for s in days} == by_day
            by_id: dict[str, Entry] = {}
            for one in story:
                by_id[one.id] = merged(by_id[one.id], one) if one.id in by_id else one
            kept = [e for pending in await ledger.pending_days("acme") async for e in entries_of(ledger, pending.day)]
            assert sorted(kept, key=lambda e: e.id) == sorted(by_id.values(), key=lambda e: e.id)
        finally:
            await client.aclose()

    asyncio.run(check())


async def test_tenants_are_apart_and_named(redis_client: Redis) -> None:
    ledger = Ledger(redis_client, kept_days=3)
    await ledger.take([entry(1, requests=1), entry(1, tenant="zenith", requests=1, output_tokens=5)])
    assert [s.numbers[4] async for page in ledger.hours("acme", DAY) for s in page] == [0]
    assert [s.numbers[4] async for page in ledger.hours("zenith", DAY) for s in page] == [5]
    assert await ledger.tenant_ids() == ["acme", "zenith"]


async def test_all_that_is_kept_expires(redis_client: Redis) -> None:
    await Ledger(redis_client, kept_days=3).take([entry(requests=1)])
    keys = [key async for key in redis_client.scan_iter("motet:{tenant:acme}:ledger:*")]
    lasting = [key for key in keys if await redis_client.ttl(key) < 0]
    # These go when the day has been archived.
    assert sorted(key.removeprefix("motet:{tenant:acme}:ledger:") for key in lasting) == [
        "groups:20261122",
        "pending",
        "records:20261122",
        "records:20261122:",
    ]


async def test_what_cannot_be_reached_is_said(tmp_path: Path) -> None:
    client = connect(f"unix://{tmp_path}/absent.sock")
    with pytest.raises(RegistryUnavailable):
        await Ledger(client, kept_days=3).take([entry()])
    await client.aclose()


def archived(archive: LedgerArchive, day: date, tenant: str = "acme") -> list[str]:
    with gzip.open(archive.path(tenant, day)) as file:
        return [json.loads(line)["e"]["id"] for line in file]


def began_on(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp())


async def test_days_that_passed_are_archived_then_removed(redis_client: Redis, tmp_path: Path) -> None:
    ledger = Ledger(redis_client, kept_days=3)
    archive = LedgerArchive(ledger, tmp_path / "ledger")
    days = [DAY - timedelta(days=number) for number in (6, 5, 2, 0)]
    now = datetime.now(UTC)
    for place, day in enumerate(days):
        numbers = range(place * 2000, place * 2000 + 1500)
        await ledger.take([entry(number, requests=1, began_at=began_on(day)) for number in numbers])
        changed = now - timedelta(days=(DAY - day).days)
        await redis_client.zadd(PREFIX + "pending", {f"{day:%Y%m%d}": int(changed.timestamp() * 1e6)})
    assert await archive.archive_all(now) == 2
    assert sorted(archived(archive, days[0])) == sorted(f"cmpl-{number}" for number in range(1500))
    assert sorted(archived(archive, days[1])) == sorted(f"cmpl-{number}" for number in range(2000, 3500))
    assert [pending.day for pending in await ledger.pending_days("acme")] == days[2:]  # kept as yet
    assert not [key async for key in redis_client.scan_iter(f"{PREFIX}*{days[0]:%Y%m%d}*") if ":hours:" not in key]
    assert await archive.archive_all(now) == 0


async def test_nothing_is_removed_that_is_not_archived(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(redis_client, kept_days=3)
    archive = LedgerArchive(ledger, tmp_path / "ledger")
    later = datetime.now(UTC) + timedelta(days=4)
    await ledger.take([entry(number, requests=1) for number in range(3)])

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("motet.adapters.store.durable_file.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            await archive.archive("acme", later)
    assert not archive.path("acme", DAY).exists()
    # An archivist that died before it removed the day: the next one writes each entry once.
    (pending,) = await ledger.pending_days("acme")
    await archive._archive_day("acme", DAY, lambda: archive._lines_of("acme", DAY))
    # What changes after it was read is not removed.
    await ledger.take([entry(3, requests=1)])
    assert not await ledger.remove_day("acme", pending)
    assert await archive.archive("acme", later) == 1
    assert sorted(archived(archive, DAY)) == ["cmpl-0", "cmpl-1", "cmpl-2", "cmpl-3"]


async def test_a_deleted_tenants_ledger_goes_after_a_last_archive(redis_client: Redis, tmp_path: Path) -> None:
    ledger = Ledger(redis_client, kept_days=3)
    archive = LedgerArchive(ledger, tmp_path / "ledger")
    now = datetime.now(UTC)
    began = int(now.timestamp())
    await ledger.take([entry(1, requests=1, began_at=began), entry(2, tenant="zenith", requests=1, began_at=began)])
    await archive.retire("acme", now)
    files = list((tmp_path / "ledger").rglob("acme.jsonl.gz"))
    assert len(files) == 1
    assert await ledger.tenant_ids() == ["zenith"]
    assert [key async for key in redis_client.scan_iter("motet:{tenant:acme}*")] == []
    # What the tenant still had under way comes to no other tenant, and adds to its file.
    await ledger.take([entry(3, requests=1, began_at=began)])
    await ledger.take([entry(4, requests=1, began_at=began, num_ended=1)])
    today = datetime.fromtimestamp(began, UTC).date()
    own = [s.numbers[0] async for page in ledger.days("acme~1", today) for s in page]
    assert own == [1]
    await archive.retire("acme", now)
    assert await ledger.tenant_ids() == ["acme~1", "zenith"]
    lines = gzip.decompress(files[0].read_bytes()).splitlines()
    assert sorted(json.loads(line)["e"]["id"] for line in lines) == ["cmpl-1", "cmpl-3"]


async def test_what_versions_before_records_left_is_counted_once_and_archived(
    redis_client: Redis, tmp_path: Path
) -> None:
    """As such a version wrote it for one id that was cut off, and whose stream is resumed here."""
    group = "k\ta\t0\t"
    await redis_client.sadd("motet:{ledger}:tenants", "acme")
    await redis_client.hset(PREFIX + "seen:20261122", "cmpl-1", f"1\n{group}\n1 1 30 10 5 700 0")
    await redis_client.hset(PREFIX + "hours:20261122", f"12\t{group}", "2 1 60 20 9 900 0")
    await redis_client.hset(PREFIX + "days:202611", mapping={f"22\t{group}": "2 1 60 20 9 900 0", "22\t": 1})
    midnight_ms = int(datetime(2026, 11, 22, tzinfo=UTC).timestamp() * 1000)
    for number in range(1500):
        text = msgspec.json.encode(entry(number, requests=1))
        await redis_client.xadd(PREFIX + "entries", {"e": text}, id=f"{midnight_ms + number}-0")
    ledger = Ledger(redis_client, kept_days=3)
    await ledger.take([entry(1, requests=1, prompt_tokens=30, cached_tokens=30, output_tokens=8, stage=Stage.COMPLETE)])
    found = await hours_of(ledger)
    assert found == {(datetime(2026, 11, 22, 12, tzinfo=UTC), Group("k", "a", 0, "")): (2, 0, 60, 20, 12, 900, 0, 0, 0)}
    archive = LedgerArchive(ledger, tmp_path)
    assert await archive.archive("acme", datetime.now(UTC)) == 0
    assert archived(archive, DAY) == [f"cmpl-{number}" for number in range(1500)]
    assert not await redis_client.xlen(PREFIX + "entries")
    await ledger.remove("acme", datetime(2026, 11, 23, tzinfo=UTC))
    assert not await redis_client.exists(PREFIX + "seen:20261122")


async def test_an_answer_takes_at_most_100_bytes(redis_client: Redis) -> None:
    """Of Redis, besides the sums; of realistic answers whose ids the server's own parts make."""
    ledger = Ledger(redis_client, kept_days=3)
    answers = realistic_answers(5_000, num_adapters=50)
    await ledger.take(answers)
    num_bytes = await bytes_by_kind(redis_client, "acme")
    assert num_bytes.keys() == {"records", "groups", "pending", "hours", "days"}
    assert sum(num_bytes[kind] for kind in ("records", "groups", "pending")) / len(answers) <= 100
    kept = [one for pending in await ledger.pending_days("acme") async for one in entries_of(ledger, pending.day)]
    assert sorted(kept, key=lambda one: one.id) == sorted(answers, key=lambda one: one.id)


async def test_one_archives_at_a_time(redis_client: Redis) -> None:
    ledger = Ledger(redis_client, kept_days=3)
    assert await ledger.hold_archive("one", 60.0)
    assert not await ledger.hold_archive("other", 60.0)
    assert await ledger.hold_archive("one", 60.0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories(), st.randoms(), st.integers(0, 3))
def test_groups_beyond_the_most_are_counted_together(
    redis_url: str, story: list[Entry], rng: Any, max_groups: int
) -> None:
    async def check() -> None:
        client = connect(redis_url, timeout_s=PATIENCE_S)
        try:
            await client.flushall()
            ledger = Ledger(client, kept_days=3, timeout_s=PATIENCE_S, max_groups=max_groups)
            again = story + rng.choices(story, k=len(story))
            rng.shuffle(again)
            for start in range(0, len(again), 3):
                await ledger.take(again[start : start + 3])
            expected = totals(story)
            found = await hours_of(ledger)
            assert _summed(found) == _summed(expected)  # by hour, exact
            for (hour, group), numbers in found.items():
                own = [one for (at, other), one in expected.items() if at == hour and group in (other, _folded(other))]
                most = map(sum, zip((0,) * len(NUMBERS), *own, strict=True))
                assert group == OTHERS or all(one <= bound for one, bound in zip(numbers, most, strict=True))
            days = [s async for page in ledger.days("acme", DAY) for s in page]
            for day in {s.start for s in days}:
                apart = {s.group for s in days if s.start == day} - {OTHERS}
                assert len(apart) <= max_groups
                assert len({group for group in apart if group.user not in ("", OTHER_USERS)}) <= max_groups // 2
                hours = {group for hour, group in found if hour.date() == day.date()} - {OTHERS}
                assert hours == apart
        finally:
            await client.aclose()

    asyncio.run(check())


def _folded(group: Group) -> Group:
    """That of all users of the adapter."""
    if not group.user:
        return group
    if group.adapter.startswith("~"):
        return Group(OTHER_USERS, "~(other)", 0, "", OTHER_USERS)
    return msgspec.structs.replace(group, user=OTHER_USERS, key_id=OTHER_USERS)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories())
def test_single_users_go_from_the_sums_of_old_months_and_nothing_else_does(redis_url: str, story: list[Entry]) -> None:
    async def check() -> None:
        client = connect(redis_url, timeout_s=PATIENCE_S)
        try:
            await client.flushall()
            ledger = Ledger(client, kept_days=3, timeout_s=PATIENCE_S)
            await ledger.take(story)

            async def days() -> list[tuple[datetime, Group, tuple[int, ...]]]:
                found = [(s.start, s.group, s.numbers) async for page in ledger.days("acme", DAY) for s in page]
                return sorted(found)

            before = await days()
            await ledger.fold_users("acme", date(2026, 12, 31))  # last month's users are still there
            assert await days() == before
            expected: dict[tuple[datetime, Group], tuple[int, ...]] = {}
            for start, group, numbers in before:
                held = expected.get((start, _folded(group)), (0,) * len(NUMBERS))
                expected[start, _folded(group)] = tuple(map(sum, zip(held, numbers, strict=True)))
            for _ in range(2):
                await ledger.fold_users("acme", date(2027, 1, 1))
                assert await days() == sorted((*place, numbers) for place, numbers in expected.items())
            counts = {f"{day:02}\t": 0 for day in {start.day for start, _ in expected}}
            for start, _ in expected:
                counts[f"{start.day:02}\t"] += 1
            fields = await client.hgetall(PREFIX + "days:202611")
            assert {field: int(fields[field]) for field in counts} == counts
        finally:
            await client.aclose()

    asyncio.run(check())


async def test_what_a_million_users_leave_behind_is_bounded(redis_client: Redis, tmp_path: Path) -> None:
    """Thousands of users on one day: a part of the groups is theirs, adapters keep their prices."""
    ledger = Ledger(redis_client, kept_days=3, max_groups=1000)
    users = [
        entry(number, began_at=NOON, user=f"u{number}", key_id=f"k{number}", requests=1, version=number % 3)
        for number in range(3000)
    ]
    private = [
        entry(number, began_at=NOON, user=f"u{number}", adapter=f"~u{number}/poet", requests=1)
        for number in range(3000, 3500)
    ]
    own = [entry(number, began_at=NOON, adapter=f"own-{number}", requests=1) for number in range(3500, 3900)]
    await ledger.take([*users, *private, *own])

    async def days() -> dict[Group, int]:
        return {s.group: s.numbers[0] async for page in ledger.days("acme", DAY) for s in page}

    found = await days()
    assert sum(found.values()) == 3900 and OTHERS not in found
    assert len([group for group in found if group.user.startswith("u")]) == 500
    assert sum(found[Group("k", f"own-{number}", 0, "")] for number in range(3500, 3900)) == 400
    assert found[Group(OTHER_USERS, "~(other)", 0, "", OTHER_USERS)] == 500
    full = (await bytes_by_kind(redis_client, "acme"))["days"]
    archive = LedgerArchive(ledger, tmp_path / "ledger")
    await archive.archive_all(datetime(2027, 1, 1, tzinfo=UTC))
    found = await days()
    assert sum(found.values()) == 3900 and len(found) == 400 + 3 + 1
    assert not [group for group in found if group.user not in ("", OTHER_USERS)]
    assert (await bytes_by_kind(redis_client, "acme"))["days"] < full
    assert await redis_client.ttl(PREFIX + "days:202611") > 0


def _summed(sums: dict[tuple[datetime, Group], tuple[int, ...]]) -> dict[datetime, tuple[int, ...]]:
    found: dict[datetime, tuple[int, ...]] = {}
    for (hour, _), numbers in sums.items():
        before = found.get(hour, (0,) * len(NUMBERS))
        found[hour] = tuple(map(sum, zip(before, numbers, strict=True)))
    return {hour: numbers for hour, numbers in found.items() if any(numbers)}


async def test_a_page_of_sums_is_small_however_many_there_are(redis_client: Redis) -> None:
    ledger = Ledger(redis_client, kept_days=3)
    groups = [f"22\tkey\tadapter-{number:06}\t1\t0123456789ab" for number in range(5000)]
    await redis_client.hset("motet:{tenant:acme}:ledger:days:202611", mapping=dict.fromkeys(groups, "1 0 10 1 20 5"))
    pages = [page async for page in ledger.days("acme", DAY)]
    assert len({one.group for page in pages for one in page}) == sum(map(len, pages)) == 5000
    assert max(map(len, pages)) <= 1000
