"""What the edge of this node has refused, by HAProxy's statistics: for a router's metrics and its log."""

from __future__ import annotations

import asyncio
import csv
import fcntl
import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Final

from ...adapters.ended_tasks import end_tasks
from .edge_config import FRONT
from .error_answers import LAST, REASONS, TABLE

READ_S: Final = 10.0  # how often it is read
LOG_S: Final = 60.0  # least time between two lines of the log
ANSWER_TIMEOUT_S: Final = 5.0
_FRONT: Final = FRONT.removeprefix("frontend ")
_QUESTION: Final = f"show table {TABLE};show stat {_FRONT} 1 -1;get var {LAST}\n"
# Columns of HAProxy's statistics, for what it refuses before there is a request that a directive could count.
_OF_STATISTICS: Final = {"http": "ereq", "connection": "dcon"}

_log = logging.getLogger(__name__)


class EdgeWatch:
    """Belongs to one event loop. Of the routers of one node one watches at a time, so that sums over routers are right.

    `refused`: requests by each of `REASONS`, since this HAProxy has started; empty: another router watches, or HAProxy
    does not answer.
    """

    def __init__(self, socket_path: str) -> None:
        self.refused: Mapping[str, int] = {}
        self._socket_path = socket_path
        self._lock: int | None = None  # the file descriptor that makes this router the one that watches
        self._logged: Mapping[str, int] = {}  # as of the last line of the log
        self._logged_at = 0.0  # time.monotonic()
        self._has_failed = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._read_forever(), name="edge watch")

    async def stop(self) -> None:
        await end_tasks(self._task)
        if self._lock is not None:
            os.close(self._lock)
            self._lock, self.refused = None, {}

    async def read(self) -> None:
        """Updates `refused`, and logs a line if it has grown, at most one every LOG_S."""
        try:
            if not self._watches():
                return
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                refused, last = parsed(await _answer(self._socket_path))
        except (OSError, ValueError) as error:
            self.refused = {}
            if not self._has_failed:
                _log.warning("HAProxy's statistics cannot be read, so motet_edge_refused_total is left out: %s", error)
            self._has_failed = True
            return
        self.refused, self._has_failed = refused, False
        self._log_refusals(refused, last)

    def _watches(self) -> bool:
        """Whether no other router of the node watches. The kernel ends the lock with its process."""
        if self._lock is None:
            lock = os.open(f"{self._socket_path}.watch", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def _log_refusals(self, refused: Mapping[str, int], last: str) -> None:
        before, now = self._logged, time.monotonic()
        if sum(refused.values()) < sum(before.values()):  # another HAProxy has taken over
            self._logged = before = {}
        more = {reason: count - before.get(reason, 0) for reason, count in refused.items()}
        more = {reason: count for reason, count in more.items() if count > 0}
        if not more or now - self._logged_at < LOG_S:
            return
        self._logged, self._logged_at = refused, now
        by_reason = ", ".join(f"{reason} {count}" for reason, count in more.items())
        _log.info("the edge has refused %d requests (%s); one of them: %s", sum(more.values()), by_reason, last or "-")

    async def _read_forever(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(READ_S)


async def _answer(socket_path: str) -> str:
    reader, writer = await asyncio.open_unix_connection(socket_path)
    try:
        writer.write(_QUESTION.encode())
        return (await reader.read()).decode(errors="replace")
    finally:
        writer.close()


def parsed(answer: str) -> tuple[dict[str, int], str]:
    """Counts by reason, and the last refusal (reason, source, request id; empty: none). Raises ValueError."""
    lines = answer.splitlines()
    counts = dict.fromkeys(REASONS, 0)
    begins = next((number for number, line in enumerate(lines) if line.startswith("# pxname,")), None)
    if begins is None or f"# table: {TABLE}," not in answer:
        raise ValueError(f"it answered {answer[:200]!r}")
    for key, count in re.findall(r"\bkey=(\w+) .*\bhttp_req_cnt=(\d+)", answer):
        if key in counts:
            counts[key] = int(count)
    row: Mapping[str, str | None] = next(csv.DictReader(lines[begins : begins + 2]), {})
    for reason, column in _OF_STATISTICS.items():
        if (count := row.get(column)) is None:
            raise ValueError(f"its answer ends early: {answer[-200:]!r}")
        counts[reason] = int(count)
    last = re.search(rf"^{re.escape(LAST)}: type=\w+ value=<(.*)>$", answer, re.MULTILINE)
    return counts, "" if last is None else last[1]
