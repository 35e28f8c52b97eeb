"""The ledger's archive: several archivists of one tenant lose nothing, and a damaged file stops none."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.ledger.archive import LedgerArchive
from motet.adapters.registry.ledger.entry import Entry
from motet.adapters.registry.ledger.ledger import Ledger
from motet.adapters.registry.registry import connect
from motet.tests.rigs.patience import PATIENCE_S


def entries(count: int, tenant: str = "acme") -> list[Entry]:
    now = int(datetime.now(UTC).timestamp())
    return [
        Entry(id=f"cmpl-{n}", tenant=tenant, began_at=now, key_id="k", adapter="a", requests=1) for n in range(count)
    ]


def archived(root: Path, tenant_id: str) -> list[str]:
    (path,) = root.glob(f"*/{tenant_id}.jsonl.gz")
    return sorted(json.loads(line)["e"]["id"] for line in gzip.decompress(path.read_bytes()).splitlines())


class SlowLedger(Ledger):
    """Waits after its first page until another one has trimmed, or waits for a lock."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client, kept_days=0, timeout_s=PATIENCE_S)
        self.has_page, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def entries_of(self, tenant_id: str, day: date) -> AsyncIterator[list[Entry]]:
        async for page in super().entries_of(tenant_id, day):
            yield page
            self.has_page.set()
            await self.may_go_on.wait()


@pytest.mark.parametrize("has_locks", [True, False])
async def test_an_incarnation_that_is_retired_twice_loses_nothing(
    redis_url: str, redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    refused = asyncio.Event()
    loop, flock = asyncio.get_running_loop(), fcntl.flock

    def reported(file: Any, how: int) -> None:
        if not has_locks:
            raise OSError(95, "Operation not supported")
        try:
            flock(file, how)
        except BlockingIOError:
            loop.call_soon_threadsafe(refused.set)
            raise

    monkeypatch.setattr(fcntl, "flock", reported)
    client = connect(redis_url, PATIENCE_S)
    slow, fast, now = SlowLedger(client), Ledger(redis_client, 0, PATIENCE_S), datetime.now(UTC)
    taken = entries(1500)
    await fast.take(taken)
    first = asyncio.create_task(LedgerArchive(slow, tmp_path).retire("acme", now))
    await asyncio.wait_for(slow.has_page.wait(), PATIENCE_S)
    second = asyncio.create_task(LedgerArchive(fast, tmp_path).retire("acme", now))
    waited = [second, asyncio.create_task(refused.wait())]
    await asyncio.wait(waited, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert second.done() != has_locks
    slow.may_go_on.set()
    await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)
    waited[1].cancel()
    assert archived(tmp_path, "acme") == sorted(one.id for one in taken)
    await client.aclose()


@pytest.mark.parametrize("damage", ["cut off", "no gzip", "no JSON"])
async def test_a_damaged_file_is_kept_aside_and_the_rest_goes_on(
    redis_client: Redis, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(redis_client, kept_days=0)
    archive, now = LedgerArchive(ledger, tmp_path), datetime.now(UTC)
    await ledger.take([*entries(3), *entries(1, "zeta")])
    (day,) = [pending.day for pending in await ledger.pending_days("acme")]
    lines = b"".join(b'{"n":"1-%d","e":{"id":"old-%03d"}}\n' % (n, n) for n in range(300))
    damaged = {"cut off": gzip.compress(lines)[:-20], "no gzip": b"broken", "no JSON": gzip.compress(b"{\n" + lines)}[
        damage
    ]
    path = archive.path("acme", day)
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    assert await archive.archive_all(now + timedelta(days=2)) == 2
    assert archived(tmp_path, "zeta") == ["cmpl-0"]
    found = archived(tmp_path, "acme")
    assert found[:3] == ["cmpl-0", "cmpl-1", "cmpl-2"]
    old = found[3:]
    assert old == [f"old-{n:03}" for n in range(len(old))]
    assert {"cut off": 0 < len(old) <= 300, "no gzip": not old, "no JSON": len(old) == 300}[damage]
    (aside,) = path.parent.glob("*.damaged")
    assert aside.read_bytes() == damaged and str(aside) in caplog.text
    await archive.retire("acme", now)  # ends
    assert await ledger.tenant_ids() == ["zeta"]


async def test_one_that_cannot_be_archived_does_not_stop_those_behind_it(redis_client: Redis, tmp_path: Path) -> None:
    ledger = Ledger(redis_client, kept_days=0)
    archive, now = LedgerArchive(ledger, tmp_path), datetime.now(UTC)
    await ledger.take([*entries(1), *entries(1, "zeta")])
    (day,) = [pending.day for pending in await ledger.pending_days("acme")]
    archive.path("acme", day).mkdir(parents=True)
    with pytest.raises(OSError, match="1 ledgers could not be archived, such as those of acme"):
        await archive.archive_all(now + timedelta(days=2))
    assert archived(tmp_path, "zeta") == ["cmpl-0"]
    assert [pending.day for pending in await ledger.pending_days("acme")] == [day]  # nothing is lost


async def test_a_days_file_is_never_whole_in_memory(redis_client: Redis, tmp_path: Path) -> None:
    """Of each entry that it holds its number is kept, and no more. A line without an end is no reason, either."""
    ledger = Ledger(redis_client, kept_days=0)
    archive = LedgerArchive(ledger, tmp_path)
    await ledger.take(entries(3))
    (day,) = [pending.day for pending in await ledger.pending_days("acme")]
    path, num_lines, filler = archive.path("acme", day), 6000, "x" * 2000
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(num_lines):
            file.write(b'{"n":"1-%d","e":{"id":"old-%04d","adapter":"%s"}}\n' % (number, number, filler.encode()))
        for _ in range(num_lines):
            file.write(b" " * len(filler))
    tracemalloc.start()
    try:
        await archive.archive("acme", datetime.now(UTC) + timedelta(days=2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < num_lines * len(filler) / 2
    assert archived(tmp_path, "acme") == ["cmpl-0", "cmpl-1", "cmpl-2", *(f"old-{n:04}" for n in range(num_lines))]
