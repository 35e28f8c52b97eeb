"""kill -9 of the router that works off a batch: another one takes it over, and each line is answered once.

Routers are processes of their own, on one Redis and one disk. It takes some ten seconds of CPU, most of it their start.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from motet.adapters.registry.batches.records import BatchRecord
from motet.adapters.registry.ledger.entry import Stage
from motet.router.tenancy.account import AnswerRequest, Ending
from motet.router.usage import usage as usage_module
from motet.tests.rigs.batch_client import BatchClient, line
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.quota_rig import until
from motet.tests.rigs.real_front import OWNER, RealFront, real_front
from motet.tests.rigs.router_rig import text_service
from motet.tests.rigs.usage_reconciliation import ledger_entries

NUM_LINES, MOST_LINES = 60, 4  # of the batch; under way at once


class ComputedLines:
    """An accountant that notes in a file, line by line, what was computed to its end.

    After `most` lines it lets none begin until there is a file `go`, so that its router can be killed in their midst.
    """

    def __init__(self, folder: Path, name: str, most: int) -> None:
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._go, self._left = folder / "go", most

    async def open(self, request: AnswerRequest) -> _Line:
        await asyncio.sleep(random.uniform(0, 0.01))
        while self._left <= 0 and not self._go.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._left -= 1
        return _Line(self._file, request.user)


class _Line:
    headers = ()

    def __init__(self, file: int, custom_id: str) -> None:
        self._file, self._custom_id = file, custom_id

    def settle(self, ending: Ending) -> None:
        if not (ending.error or ending.is_cancelled):
            os.write(self._file, f"{self._custom_id}\n".encode())


def router_process(redis_url: str, folder: Path, lines: Path, name: str, most: int) -> None:
    """A router that works off batches, until it is killed."""
    usage_module.PROGRESS_INTERVAL_S = 0.05  # type: ignore[misc]
    usage_module.ADOPT_INTERVAL_S = 0.2  # type: ignore[misc]

    async def run() -> None:
        accountants = [ComputedLines(lines, name, most)]
        async with real_front(redis_url, folder, text_service(), accountants=accountants, is_first=False) as front:
            front.config.now = replace(front.config.now, max_batch_lines=MOST_LINES)
            front.batches.start()
            await asyncio.Event().wait()

    asyncio.run(run())


@dataclass
class Routers:
    """`computed`: the lines that each has computed, by its name."""

    lines: Path
    processes: dict[str, BaseProcess]

    def computed(self, name: str) -> list[str]:
        file = self.lines / name
        return file.read_text().split() if file.exists() else []

    def kill(self, name: str) -> None:
        self.processes[name].kill()  # with SIGKILL
        self.processes[name].join()


@contextmanager
def two_routers(redis_url: str, folder: Path, lines: Path, most: int) -> Iterator[Routers]:
    context, names = multiprocessing.get_context("spawn"), ("one", "two")
    given = {name: (redis_url, folder, lines, name, most) for name in names}
    routers = Routers(lines, {name: context.Process(target=router_process, args=given[name]) for name in names})
    for process in routers.processes.values():
        process.start()
    try:
        yield routers
    finally:
        for name in names:
            routers.kill(name)


async def test_a_batch_outlives_the_router_that_works_it_off(
    redis_url: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    most = random.Random(pytestconfig.getoption("first_seed")).randrange(1, NUM_LINES - MOST_LINES)
    lines = tmp_path / "lines"
    lines.mkdir()
    # This one takes the batch and runs nothing of it.
    async with real_front(redis_url, tmp_path / "data", text_service()) as front:
        owner = BatchClient(front)
        work = [line(f"id-{number}", user=f"id-{number}") for number in range(NUM_LINES)]
        batch_id = await owner.create(await owner.upload(work))
        with two_routers(redis_url, tmp_path / "data", lines, most) as routers:
            await eventually(lambda: any(len(routers.computed(name)) >= most for name in routers.processes))
            killed, other = sorted(routers.processes, key=routers.computed, reverse=True)
            assert not routers.computed(other), "one router works off a batch"
            routers.kill(killed)
            await front.expire_lease(batch_id)
            batch = await owner.batch(batch_id)
            assert batch["status"] == "in_progress"
            acknowledged = await on_disk(front, batch_id)
            assert batch["request_counts"]["completed"] <= len(acknowledged) < NUM_LINES
            (lines / "go").touch()
            batch = await owner.ended(batch_id)
            assert batch["status"] == "completed" and batch["error_file_id"] is None
            assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
            results = await owner.lines(batch["output_file_id"])
            assert Counter(one["custom_id"] for one in results) == Counter(f"id-{one}" for one in range(NUM_LINES))
            assert [one["custom_id"] for one in results][: len(acknowledged)] == acknowledged

            # What was under way may be computed, and charged, once more; what has a result may not.
            before, after = routers.computed(killed), routers.computed(other)
            assert {*acknowledged} <= {*before} and not {*acknowledged} & {*after}
            assert {*before} | {*after} == {f"id-{one}" for one in range(NUM_LINES)}
            assert NUM_LINES <= len(before) + len(after) <= NUM_LINES + MOST_LINES
            await until(lambda: is_charged(front, results, NUM_LINES + MOST_LINES))


async def on_disk(front: RealFront, batch_id: str) -> list[str]:
    """The lines that have results; one that was being written when its router was killed has none."""
    record = await front.batches.batches.get(OWNER, batch_id)
    assert isinstance(record, BatchRecord)
    *whole, _ = front.batches.store.path(OWNER, record.output_file_id).read_bytes().split(b"\n")
    return [json.loads(one)["custom_id"] for one in whole]


async def is_charged(front: RealFront, results: list[Any], most: int) -> bool:
    """Whether the ledger has all that the results say, and no more answers than so many."""
    entries = await ledger_entries(front.redis, [OWNER])
    complete = {one.id: one for one in entries.values() if one.stage is Stage.COMPLETE}
    bodies = {one["response"]["body"]["id"]: one["response"]["body"]["usage"] for one in results}
    assert len(entries) <= most
    if not bodies.keys() <= complete.keys():
        return False
    for answer, usage in bodies.items():
        charged = complete[answer]
        assert (charged.prompt_tokens, charged.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    return True
