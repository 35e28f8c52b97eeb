"""What a router has counted, on disk: lines, room for them, and what is left of them when the router is killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.adapters.registry.ledger.entry import Entry, Stage
from motet.router.tenancy.metering import Metering
from motet.router.tenancy.spool import FINAL, PARTIAL, Spool, line_of, read_lines
from motet.router.usage import usage
from motet.router.usage.usage import LEDGERS_PART, LedgerKeeper, entries_in, orphaned_spool
from motet.tests.rigs.loop_holds import measured_holds
from motet.tests.rigs.patience import PATIENCE_S, eventually, eventually_in_loop

SEGMENT = 16 << 10


def entry(number: int, *, stage: Stage = Stage.COMPLETE, output_tokens: int = 1) -> Entry:
    return Entry(id=f"cmpl-{number}", tenant="acme", began_at=1, stage=stage, output_tokens=output_tokens)


def payload(number: int, **reported: object) -> bytes:
    return msgspec.json.encode(entry(number, **reported))  # type: ignore[arg-type]


def spool_in(folder: Path, max_bytes: int = 8 * SEGMENT) -> Spool:
    return Spool(folder, max_bytes, min_free_bytes=0, segment_bytes=SEGMENT)


def write(spool: Spool, number: int) -> None:
    assert spool.reserve(200)
    spool.append(FINAL, payload(number))
    spool.release(200)


@given(st.lists(st.binary(max_size=40).filter(lambda text: b"\n" not in text)), st.data())
def test_lines_are_read_as_they_were_written_however_the_file_ends(payloads: list[bytes], data: st.DataObject) -> None:
    text = b"".join(line_of(FINAL, one) for one in payloads)
    assert [(kind, one) for kind, one, _ in read_lines(text + bytes(9))] == [(FINAL, one) for one in payloads]
    cut = data.draw(st.integers(0, len(text)))
    whole = text[:cut].count(b"\n")
    assert [one for kind, one, _ in read_lines(text[:cut] + bytes(9)) if kind] == payloads[:whole]
    if text:
        place = data.draw(st.integers(0, len(text) - 1))
        damaged = text[:place] + bytes([text[place] ^ 0x55]) + text[place + 1 :]
        assert all(one in payloads for kind, one, _ in read_lines(damaged) if kind)


def killed(folder: Path, ready: object) -> None:
    """A process that writes, and holds its spool until it is killed."""
    import asyncio

    async def run() -> None:
        spool = spool_in(folder)
        await spool.start()
        for number in range(300):  # over several files
            if not spool.reserve(200):
                await eventually_in_loop(lambda: spool.reserve(200))
            spool.append(FINAL, payload(number))
            spool.release(200)
        segment = spool.oldest_unacknowledged()
        assert segment is not None
        for _ in range(3):
            segment.acknowledge(len(line_of(FINAL, payload(5))))  # of the first three, which are as long
        assert spool.append_if_room(PARTIAL, payload(7, stage=Stage.UNDER_WAY, output_tokens=5))
        assert spool.append_if_room(PARTIAL, payload(1000, stage=Stage.UNDER_WAY, output_tokens=5))
        assert spool.append_if_room(PARTIAL, payload(1000, stage=Stage.UNDER_WAY, output_tokens=8))
        spool._segments[-1].append(line_of(FINAL, payload(2000))[:40])  # it is killed in the middle of a line
        ready.set()  # type: ignore[attr-defined]
        await asyncio.sleep(PATIENCE_S)

    asyncio.run(run())


async def test_what_was_written_outlives_kill_9_and_is_taken_over_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=killed, args=(tmp_path, ready))
    process.start()
    own = spool_in(tmp_path)
    await own.start()
    try:
        eventually(lambda: ready.is_set() or not process.is_alive())
        with orphaned_spool(tmp_path, own.lock_path) as files:
            assert files is None  # it lives
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with orphaned_spool(tmp_path, own.lock_path) as files:
            assert files is not None and len(files) > 2
            found = [*entries_in(files)]
            with orphaned_spool(tmp_path, own.lock_path) as others:
                assert others is None  # it is being taken
        assert [one.id for one in found if one.stage is Stage.COMPLETE] == [f"cmpl-{n}" for n in range(3, 300)]
        # How far answers had come that did not end; the one that did end has its end.
        assert [(one.id, one.output_tokens) for one in found[297:] if one.id != "cmpl-7"] == [("cmpl-1000", 8)]
        with orphaned_spool(tmp_path, own.lock_path) as files:
            assert files is None  # it is gone
        assert {name.split(".")[0] for name in os.listdir(tmp_path)} == {own.name}
    finally:
        process.kill()
        process.join()
        await own.close()


async def test_the_end_of_one_connection_does_not_hide_what_the_next_one_cost(tmp_path: Path) -> None:
    """A stream is resumed while its first connection still waits for its gang's report."""
    dead, own = spool_in(tmp_path), spool_in(tmp_path)
    await dead.start()
    await own.start()
    assert dead.append_if_room(PARTIAL, payload(1, stage=Stage.UNDER_WAY, output_tokens=5))
    assert dead.append_if_room(PARTIAL, payload(1, stage=Stage.UNDER_WAY, output_tokens=9))
    assert dead.append_if_room(FINAL, payload(1, stage=Stage.CUT_OFF, output_tokens=6))
    assert dead.append_if_room(PARTIAL, payload(2, stage=Stage.UNDER_WAY, output_tokens=5))
    assert dead.append_if_room(FINAL, payload(2, stage=Stage.CUT_OFF, output_tokens=6))
    await dead.close()
    with orphaned_spool(tmp_path, own.lock_path) as files:
        assert files is not None
        found = [(one.id, one.stage, one.output_tokens) for one in entries_in(files)]
    assert found == [("cmpl-1", Stage.CUT_OFF, 6), ("cmpl-2", Stage.CUT_OFF, 6), ("cmpl-1", Stage.UNDER_WAY, 9)]
    await own.close()


async def test_what_could_not_be_taken_over_is_there_for_the_next(tmp_path: Path) -> None:
    dead, own = spool_in(tmp_path), spool_in(tmp_path)
    await dead.start()
    await own.start()
    write(dead, 1)
    await dead.close()  # with a line that did not arrive
    with pytest.raises(ZeroDivisionError), orphaned_spool(tmp_path, own.lock_path) as files:
        raise ZeroDivisionError
    with orphaned_spool(tmp_path, own.lock_path) as files:
        assert files is not None
        assert [one.id for one in entries_in(files)] == ["cmpl-1"]
    await own.close()
    assert os.listdir(tmp_path) == []


async def test_a_spool_of_another_machine_is_taken_when_it_was_not_touched_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock may not be seen here."""
    dead, own = spool_in(tmp_path), spool_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("motet.router.tenancy.spool.boot_id", lambda: "another machine")
        await dead.start()
    await own.start()
    write(dead, 1)
    await dead.close()
    with orphaned_spool(tmp_path, own.lock_path) as files:
        assert files is None
    past = own.lock_path.stat().st_mtime - usage.SILENT_S - 1
    os.utime(dead.lock_path, (past, past))
    with orphaned_spool(tmp_path, own.lock_path) as files:
        assert files is not None
    await own.close()


async def test_room_that_was_set_aside_is_there_and_no_more_is_promised_than_the_disk_may_hold(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, max_bytes=3 * SEGMENT)
    await spool.start()
    num_promised = 0
    while True:
        if spool.reserve(1000):
            num_promised += 1
        elif spool._preparing is not None:
            await spool._preparing
        else:
            break
    assert not spool.append_if_room(PARTIAL, b"x" * 1000)
    assert num_promised > 20
    for _ in range(num_promised):
        spool.append(FINAL, b"x" * 900)
        spool.release(1000)
    assert sum(segment.num_bytes for segment in (*spool._segments, *spool._spares)) <= 3 * SEGMENT
    await spool.close()


async def test_a_spool_does_not_begin_where_the_disk_is_full(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="free"):
        await Spool(tmp_path, 8 * SEGMENT, min_free_bytes=1 << 60, segment_bytes=SEGMENT).start()


async def test_files_go_when_all_of_them_has_arrived_and_no_answer_needs_them(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    await spool.start()
    for number in range(400):
        await eventually_in_loop(lambda: spool.reserve(200))
        spool.append(FINAL, payload(number))
        spool.release(200)
    found = []
    while (segment := spool.oldest_unacknowledged()) is not None:
        text = segment.unacknowledged()
        found += [one for _, one, _ in read_lines(text)]
        segment.acknowledge(len(text))
    assert found == [payload(number) for number in range(400)]
    assert spool.num_segments > 2
    await spool.drop_before(2)
    assert spool._segments[0].number == 2
    await spool.drop_before(spool.current_number)
    assert spool.num_segments == 1
    await spool.close()
    assert os.listdir(tmp_path) == []


async def test_lines_of_progress_do_not_hold_the_event_loop(tmp_path: Path) -> None:
    """None of them is sent, and there may be many between two that are."""
    spool = Spool(tmp_path, 1 << 30, min_free_bytes=0)
    await spool.start()
    number = 0
    while spool.append_if_room(PARTIAL, payload(number)):
        number += 1
    unused: Any = None
    keeper = LedgerKeeper(spool, Metering(spool), unused, unused, tmp_path)
    began = time.thread_time()
    with measured_holds() as holds:
        await asyncio.create_task(keeper.ship())
        await asyncio.sleep(0)
    took_s = time.thread_time() - began
    assert spool.num_waiting_bytes == 0
    assert holds.longest_s < took_s / 3, f"{holds.longest_s:.4f} s of {took_s:.4f}, {number} lines: {holds.what}"
    await spool.close()


async def test_lines_are_sent_once_where_two_send_them(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 30, min_free_bytes=0)
    await spool.start()
    sent: list[Entry] = []

    async def take(entries: list[Entry]) -> None:
        await asyncio.sleep(0)
        sent.extend(entries)

    ledger: Any = SimpleNamespace(take=take)
    keeper = LedgerKeeper(spool, Metering(spool), ledger, ledger, tmp_path)
    for number in range(3):
        write(spool, number)
        await asyncio.gather(keeper.ship(), keeper.ship(), keeper.ship())
        assert spool.num_waiting_bytes == 0
    assert sent == [entry(number) for number in range(3)]
    await spool.close()


async def test_a_keeper_stops_though_a_cancellation_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what writes to Redis may lose it: `adapters/ended_tasks.py`."""
    lost = []

    async def loses_one(keeper: LedgerKeeper) -> int:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            lost.append(keeper)
        return 0

    monkeypatch.setattr(LedgerKeeper, "adopt", loses_one)
    spool = Spool(tmp_path, 1 << 30, min_free_bytes=0)
    await spool.start()
    ledger: Any = AsyncMock()
    keeper = LedgerKeeper(spool, Metering(spool), ledger, ledger, tmp_path)
    keeper.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await keeper.stop()
    assert lost == [keeper]


async def test_uploads_that_fill_the_disk_leave_room_for_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads stop at their floor; the ledger, whose floor is a part of that, goes on until it comes to its own."""
    upload_floor, free = 64 * SEGMENT, 64 * SEGMENT
    files = 0

    def disk_usage(folder: Path) -> Any:
        nonlocal files
        files = max(files, len([*tmp_path.glob("*.log")]))
        return SimpleNamespace(free=free - SEGMENT * len([*tmp_path.glob("*.log")]))

    monkeypatch.setattr("motet.router.tenancy.spool.shutil.disk_usage", disk_usage)
    assert LEDGERS_PART > 1
    spool = Spool(tmp_path, 1 << 30, upload_floor // LEDGERS_PART, segment_bytes=SEGMENT)
    await spool.start()
    for number in range(3000):  # answers, while what they cost cannot be sent
        await eventually_in_loop(lambda: spool.reserve(200))
        spool.append(FINAL, payload(number))
        spool.release(200)
    assert spool.num_segments > 10
    while spool.reserve(200):  # and at its own floor answers are refused
        spool.append(FINAL, payload(0))
        spool.release(200)
        await asyncio.sleep(0)
    assert disk_usage(tmp_path).free >= upload_floor // LEDGERS_PART
    await spool.close()
    with pytest.raises(OSError, match="would be free"):
        await Spool(tmp_path, 1 << 30, upload_floor, segment_bytes=SEGMENT).start()  # with the uploads' floor


async def test_at_its_floor_the_ledger_goes_on_with_files_that_have_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Redis takes the lines no new disk is needed."""
    spool = spool_in(tmp_path, max_bytes=1 << 30)
    await spool.start()
    monkeypatch.setattr("motet.router.tenancy.spool.shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    for number in range(1000):
        await eventually_in_loop(lambda: spool.reserve(200))
        spool.append(FINAL, payload(number))
        spool.release(200)
        while (segment := spool.oldest_unacknowledged()) is not None:
            segment.acknowledge(len(segment.unacknowledged()))
        await spool.drop_before(spool.current_number)
    assert spool.num_segments <= 2
    await spool.close()
