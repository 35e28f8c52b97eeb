"""One batch run by one router: its input checked, its lines asked, its results written, its end noted."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, BinaryIO, Final, TypeVar

from msgspec import structs

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.batches.batch_registry import BatchRegistry
from ...adapters.registry.batches.records import BatchError, BatchRecord, FileRecord
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import KeyRecord, StorageBound, storage_bounds
from ..metrics import Metrics, PauseReason
from ..uploads.adapters_api import DISK_FULL
from .batch_files import EXPIRED, BatchResults, FileStore, InputCheck, Line, LineError, LineReader, Result, digest_of
from .line_call import LineAnswer, LineCaller
from .schema import BatchPace

_FLUSH_BYTES: Final = 1 << 20
_MOST_LOST: Final = 5  # gangs that were lost with a line, before it is believed to be the line
_GANG_LOST: Final = "gang_lost"
_CANCELLED: Final = LineError("batch_cancelled", "The batch was cancelled before this line was run.")
_EXPIRED: Final = LineError(EXPIRED, "This request could not be executed before the completion window expired.")
_OVER_QUOTA: Final = LineError(
    "insufficient_quota", "The results before this line are more than the quota of stored bytes has room for."
)
_log = logging.getLogger(__name__)
T = TypeVar("T")


class BatchGone(Exception):  # noqa: N818
    """The batch was deleted, with its user or its tenant."""


class BatchRunner:
    """Belongs to one event loop. The caller holds the batch's lease, and cancels `run` when it is lost."""

    def __init__(
        self,
        tenant_id: str,
        batch_id: str,
        *,
        batches: BatchRegistry,
        store: FileStore,
        caller: LineCaller,
        view: RegistryView,
        metrics: Metrics,
        pace: BatchPace,
        is_served: Callable[[], bool],
        most_lines: Callable[[], int],
        kept_s: Callable[[], float],
    ) -> None:
        """`is_served`: whether a line may be answered now. `most_lines`: under way at once. `kept_s`: how long the
        files that it makes are kept.
        """
        self.tenant_id, self.batch_id = tenant_id, batch_id
        self.began_at = batches.clock()
        self._batches, self._store, self._caller, self._view = batches, store, caller, view
        self._metrics, self._pace, self._most_lines, self._kept_s = metrics, pace, most_lines, kept_s
        self._is_served = is_served
        self._is_leaving = False  # no further line is begun here
        self._is_over_quota = False
        self._num_without_gang = 0  # lines that wait for one
        self._batch: BatchRecord  # as it was read last
        self._looked_at = 0.0

    def leave(self) -> None:
        """`run` ends when the lines under way have their results: another router goes on, or this one later."""
        self._is_leaving = True

    async def run(self) -> None:
        """Returns when the batch has ended, or after `leave`. Raises BlockingIOError: another process writes it."""
        try:
            batch = await self._look(now=True)
            if batch.has_ended:
                return
            if batch.in_progress_at is None and not await self._begin():
                return
            results = await self._opened_results()
            try:
                try:
                    if not await self._run_lines(results):
                        return
                    error = None
                except FileNotFoundError as missing:
                    error = await self._input_gone(missing)
                await self._end(results, error)
            except BatchGone:
                for file_id in (batch.output_file_id, batch.error_file_id):
                    await asyncio.to_thread(self._store.delete, self.tenant_id, file_id)
                raise
            finally:
                results.close()
        except BatchGone:
            return

    async def _opened_results(self) -> BatchResults:
        """If it is cancelled meanwhile, what the thread opens is closed: its lock would keep out every other runner."""
        opening = asyncio.create_task(asyncio.to_thread(BatchResults, self._store, self._batch))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close)
            raise

    async def _begin(self) -> bool:
        """Checks the input. False: the batch has ended with that, or leaves."""
        check = InputCheck(self._batch.endpoint)
        try:
            async with self._opened_input() as file:
                reader = LineReader(file)
                while (
                    not check.is_over
                    and not (self._is_leaving or self._batch.status == "cancelling")
                    and (lines := await asyncio.to_thread(reader.piece)) is not None
                ):
                    await asyncio.to_thread(check.take, lines, reader.num_read)
                    await self._look()
            check.end()
        except FileNotFoundError as missing:
            check.errors.append(await self._input_gone(missing))
        if self._is_leaving:
            return False

        def start(batch: BatchRecord) -> BatchRecord:
            now = int(self._batches.clock())
            if batch.status == "cancelling":
                return structs.replace(batch, status="cancelled", cancelled_at=now)
            if batch.status != "validating":
                return batch
            batch = structs.replace(batch, model=check.model)
            if check.errors:
                return structs.replace(batch, status="failed", failed_at=now, errors=tuple(check.errors))
            return structs.replace(batch, status="in_progress", in_progress_at=now, num_lines=check.num_lines)

        batch, _ = await self._change(start)
        return not batch.has_ended

    async def _input_gone(self, missing: FileNotFoundError) -> BatchError:
        """Raises `missing` if the tenant's whole folder is away: it may come back."""
        if not await asyncio.to_thread(self._store.is_there, self.tenant_id):
            raise missing
        return BatchError(code="file_not_found", message="The input file is gone.")

    async def _run_lines(self, results: BatchResults) -> bool:
        """False: it left before every line had a result.

        Lines under way, and results that are not written yet, are as many as there may be lines under way: so many at
        most are run again after this router's death.
        """
        lines, under_way = self._lines(results), _LinesUnderWay()
        ready: list[LineAnswer] = []
        num_ready_bytes, waits_since = 0, time.monotonic()
        has_more, is_whole = True, True
        await self._note(results)
        try:
            while True:
                if not under_way and not ready:
                    await self._until_served()
                while (
                    has_more
                    and self._is_served()
                    and len(under_way) + len(ready) < self._most_lines()
                    and not self._is_ended_early()
                ):
                    if (line := await anext(lines, None)) is None:
                        has_more = False
                    else:
                        under_way.begin(self._answer(line))
                if not under_way and not ready:
                    if has_more and not self._is_ended_early():
                        continue  # no gang is there any more
                    break
                if under_way:
                    ended = await under_way.ended(self._pace.flush_s)
                    if ended and not ready:
                        waits_since = time.monotonic()
                    answers = [answer for answer in ended if answer is not None]
                    is_whole &= len(answers) == len(ended)
                    ready += answers
                    num_ready_bytes += _num_bytes(answers)
                is_due = time.monotonic() - waits_since >= self._pace.flush_s or 2 * len(ready) >= self._most_lines()
                if ready and (is_due or not under_way or num_ready_bytes >= _FLUSH_BYTES):
                    await self._write(results, [answer.result for answer in ready])
                    _give_back(ready)
                    ready, num_ready_bytes = [], 0
                await self._look()
            if self._is_leaving and (has_more or not is_whole):
                return False
            if (error := self._error_of_rest()) is not None:
                async for piece in self._pieces(results):
                    await self._write(results, [Result(custom_id=line.custom_id, error=error) for line in piece])
            return True
        finally:
            _give_back(ready)
            _give_back(await under_way.close())
            await lines.aclose()

    async def _answer(self, line: Line) -> LineAnswer | None:
        """The line's final answer, or why it is not run any more; None: this router leaves before it has one."""
        wait_s, num_lost = self._pace.retry_s, 0
        while True:
            answer = await self._caller.call(self._batch, line)
            num_lost += answer.code == _GANG_LOST
            if answer.retry_after_s is None or num_lost >= _MOST_LOST:
                return answer
            answer.room.give_back()
            await self._pause(max(wait_s, min(answer.retry_after_s, self._pace.longest_retry_s)))
            if self._is_ended_early():
                error = self._error_of_rest()
                return None if error is None else answer._replace(result=Result(custom_id=line.custom_id, error=error))
            wait_s = min(2 * wait_s, self._pace.longest_retry_s)

    async def _until_served(self) -> None:
        """Waits until lines can be served, or until the batch ends early."""
        if not self._is_served():
            with self._without_gang():
                while not self._is_served() and not self._is_ended_early():
                    await asyncio.sleep(self._pace.look_s)
                    await self._look()

    async def _pause(self, wait_s: float) -> None:
        """Waits for at least this time, and until a gang runs, unless no line will be tried again."""
        until, step_s = time.monotonic() + wait_s * random.uniform(0.75, 1.25), min(wait_s, self._pace.look_s)
        while time.monotonic() < until and not self._is_ended_early():  # noqa: ASYNC110
            await asyncio.sleep(step_s)
        if not self._is_served():
            with self._without_gang():
                while not self._is_served() and not self._is_ended_early():  # noqa: ASYNC110
                    await asyncio.sleep(step_s)

    async def _end(self, results: BatchResults, error: BatchError | None = None) -> None:
        """Registers the files of results. Those that hold nothing are deleted. `error`: why it ends early."""
        await self._note(results, is_finalizing=True)
        sizes = results.sizes
        expires_at = int(self._batches.clock() + min(self._kept_s(), self._batch.output_kept_s or math.inf))

        def ended(batch: BatchRecord) -> BatchRecord:
            if batch.has_ended:
                return batch
            now, has_output, has_errors = int(self._batches.clock()), sizes[0] > 0, sizes[1] > 0
            final_batch = structs.replace(batch, has_output=has_output, has_errors=has_errors)
            if batch.status == "cancelling":
                return structs.replace(final_batch, status="cancelled", cancelled_at=now)
            if error is not None:
                return structs.replace(final_batch, status="failed", failed_at=now, errors=(error,))
            if results.has_expired:
                return structs.replace(final_batch, status="expired", expired_at=now)
            return structs.replace(final_batch, status="completed", completed_at=now)

        def files(batch: BatchRecord) -> Sequence[FileRecord]:
            return [
                FileRecord(
                    id=file_id,
                    tenant=batch.tenant,
                    incarnation=batch.incarnation,
                    user=batch.user,
                    key_id=batch.key_id,
                    filename=f"{batch.id}_{kind}.jsonl",
                    num_bytes=num_bytes,
                    purpose="batch_output",
                    created_at=int(self._batches.clock()),
                    expires_at=expires_at,
                )
                for file_id, kind, num_bytes in (
                    (batch.output_file_id, "output", sizes[0]),
                    (batch.error_file_id, "error", sizes[1]),
                )
                if num_bytes
            ]

        batch, _ = await self._change(ended, files=files)
        for file_id, num_bytes in zip((batch.output_file_id, batch.error_file_id), sizes, strict=True):
            if not num_bytes:
                await asyncio.to_thread(self._store.delete, self.tenant_id, file_id)

    async def _write(self, results: BatchResults, ready: Sequence[Result]) -> None:
        """Waits while the disk is full. A result that is written is not made again, whatever becomes of this router."""
        before, pending, is_paused = results.written, list(ready), False
        with ExitStack() as pause:
            while pending:
                try:
                    await asyncio.to_thread(results.append, pending)
                    pending = []
                except OSError as error:
                    if error.errno not in DISK_FULL:
                        raise
                    if not is_paused:
                        _log.warning("batches pause: the disk has no room for results")
                        pause.enter_context(self._paused("disk"))
                    is_paused = True
                    pending = [result for result in pending if digest_of(result.custom_id) not in results.answered]
                    await asyncio.sleep(self._pace.disk_s)
        results.has_expired |= any(result.error is not None and result.error.code == EXPIRED for result in ready)
        now = results.written
        self._metrics.batch_lines["completed"] += now.num_completed - before.num_completed
        self._metrics.batch_lines["failed"] += now.num_failed - before.num_failed
        await self._note(results)

    async def _note(self, results: BatchResults, *, is_finalizing: bool = False) -> None:
        """Has the record say what is written, and counts its bytes."""
        written = results.written

        def noted(batch: BatchRecord) -> BatchRecord:
            if batch.has_ended:
                return batch
            counts = structs.replace(
                batch,
                num_completed=written.num_completed,
                num_failed=written.num_failed,
                num_bytes=written.num_bytes,
                tokens=written.tokens,
            )
            if is_finalizing and batch.status == "in_progress":
                return structs.replace(counts, status="finalizing", finalizing_at=int(self._batches.clock()))
            return counts

        _, is_over = await self._change(noted, bounds=self._bounds() if written.num_bytes else ())
        self._is_over_quota |= is_over

    def _bounds(self) -> tuple[StorageBound, ...]:
        batch = self._batch
        entry = self._view.keys.key_with_id(batch.key_id)
        key = KeyRecord(key_id=batch.key_id, tenant=batch.tenant) if entry is None else entry[1]
        return storage_bounds(self._view.tenant(batch.tenant), key, batch.user)

    async def _look(self, *, now: bool = False) -> BatchRecord:
        """The current record of the batch, maybe a moment old."""
        if now or time.monotonic() - self._looked_at >= self._pace.look_s:
            record = await self._patiently(lambda: self._batches.get(self.tenant_id, self.batch_id))
            self._took(record)
        return self._batch

    async def _change(
        self,
        make: Callable[[BatchRecord], BatchRecord],
        *,
        bounds: Sequence[StorageBound] = (),
        files: Callable[[BatchRecord], Sequence[FileRecord]] = lambda batch: (),
    ) -> tuple[BatchRecord, bool]:
        kept_until = self._batches.clock() + self._kept_s()  # if it ends with this
        changed, is_over = await self._patiently(
            lambda: self._batches.change(
                self.tenant_id, self.batch_id, make, bounds=bounds, files=files, kept_until=kept_until
            )
        )
        return self._took(changed), is_over

    def _took(self, record: BatchRecord | None) -> BatchRecord:
        if record is None:
            raise BatchGone
        self._batch, self._looked_at = record, time.monotonic()
        return record

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Waits while Redis is away: nothing is begun meanwhile."""
        with ExitStack() as pause:
            is_paused = False
            while True:
                try:
                    return await ask()
                except RegistryUnavailable:
                    if not is_paused:
                        pause.enter_context(self._paused("registry"))
                    is_paused = True
                    await asyncio.sleep(self._pace.look_s)

    @contextmanager
    def _without_gang(self) -> Iterator[None]:
        """The batch pauses while one of its lines, or all of it, waits for a gang."""
        self._num_without_gang += 1
        self._metrics.paused_batches["gang"] += self._num_without_gang == 1
        try:
            yield
        finally:
            self._num_without_gang -= 1
            self._metrics.paused_batches["gang"] -= self._num_without_gang == 0

    @contextmanager
    def _paused(self, reason: PauseReason) -> Iterator[None]:
        self._metrics.paused_batches[reason] += 1
        try:
            yield
        finally:
            self._metrics.paused_batches[reason] -= 1

    def _error_of_rest(self) -> LineError | None:
        """Why lines without a result are not run any more; None: they are."""
        if self._batch.status == "cancelling":
            return _CANCELLED
        if self._batches.clock() >= self._batch.expires_at:
            return _EXPIRED
        return _OVER_QUOTA if self._is_over_quota else None

    def _is_ended_early(self) -> bool:
        return self._is_leaving or self._error_of_rest() is not None

    async def _lines(self, results: BatchResults) -> AsyncGenerator[Line, None]:
        """Those without a result."""
        async for piece in self._pieces(results):
            for line in piece:
                yield line

    async def _pieces(self, results: BatchResults) -> AsyncGenerator[list[Line], None]:
        async with self._opened_input() as file:
            reader = LineReader(file)
            while (piece := await asyncio.to_thread(reader.checked_piece)) is not None:
                if lines := [line for line in piece if digest_of(line.custom_id) not in results.answered]:
                    yield lines

    @asynccontextmanager
    async def _opened_input(self) -> AsyncIterator[BinaryIO]:
        file = await asyncio.to_thread(self._store.open, self.tenant_id, self._batch.input_file_id)
        with file:
            yield file


class _LinesUnderWay:
    """Lines that are being answered. What has ended is found without a look at all that has not."""

    def __init__(self) -> None:
        self._tasks = set[asyncio.Task[LineAnswer | None]]()
        self._ended = list[asyncio.Task[LineAnswer | None]]()
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """With those that have ended and were not taken."""
        return len(self._tasks)

    def begin(self, answer: Coroutine[Any, Any, LineAnswer | None]) -> None:
        task = asyncio.create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[LineAnswer | None]) -> None:
        self._ended.append(task)
        self._news.set()

    async def ended(self, wait_s: float) -> list[LineAnswer | None]:
        """Takes those that have ended. Waits for one, but not for longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        self._news.clear()
        ended, self._ended = self._ended, []
        self._tasks.difference_update(ended)
        return [task.result() for task in ended]

    async def close(self) -> list[LineAnswer]:
        """Ends all. Returns the answers that came meanwhile, which are dropped."""
        tasks = [*self._tasks]
        await end_tasks(*tasks)
        ended = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        return [answer for answer in ended if answer is not None]


def _close(opening: asyncio.Task[BatchResults]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _num_bytes(answers: Sequence[LineAnswer]) -> int:
    return sum(len(memoryview(answer.result.response.body)) for answer in answers if answer.result.response is not None)


def _give_back(answers: Sequence[LineAnswer]) -> None:
    """Their room: the answers are written, or dropped."""
    for answer in answers:
        answer.room.give_back()
