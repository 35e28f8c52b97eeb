"""A router's spool: what it has counted, on disk until Redis has it.

Room for an answer's last line is set aside before the answer is made, so writing it cannot fail.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections import deque
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from .segment import Segment
from .spool_lines import Kind, line_of

SEGMENT_BYTES: Final = 4 << 20
_WASTE_BYTES: Final = 4 << 10  # at most, of a segment's end: the longest line
LOCK_SUFFIX: Final = ".lock"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Spool:
    """Files `<name>.<number>.log` in a folder, of one process, and `<name>.lock`, which it holds as long as it lives.

    Everything belongs to one event loop.
    """

    def __init__(self, folder: Path, max_bytes: int, min_free_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`max_bytes`: of all its files. `min_free_bytes`: that they leave on the disk."""
        self.name = token_hex(8)
        self._folder, self._max_bytes, self._min_free_bytes = folder, max_bytes, min_free_bytes
        self._segment_bytes = segment_bytes
        self._lock = -1
        self._number = 0  # of the newest segment
        self._segments: deque[Segment] = deque()  # the oldest first; lines go to one of them, those behind are empty
        self._spares: deque[Segment] = deque()
        self._num_reserved = 0  # bytes
        self._preparing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError where there is no room for a first file."""
        self._lock = await asyncio.to_thread(self._take_lock)
        self._segments.append(await asyncio.to_thread(self._new_segment))
        with suppress(OSError):  # another is tried when it is needed
            self._spares.append(await asyncio.to_thread(self._new_segment))

    async def close(self) -> None:
        """Removes its files if all that they hold has arrived; else the files stay for the router that adopts them."""
        if self._preparing is not None:
            await asyncio.wait([self._preparing])
        is_empty = all(segment.is_acknowledged for segment in self._segments)
        for segment in (*self._segments, *self._spares):
            await asyncio.to_thread(segment.close, remove=is_empty)
        if is_empty:
            self.lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    @property
    def lock_path(self) -> Path:
        return self._folder / f"{self.name}{LOCK_SUFFIX}"

    @property
    def current_number(self) -> int:
        """The number of the segment that lines are written to."""
        return self._segments[-1].number

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of lines that are not acknowledged."""
        return sum(segment.end - segment.acknowledged for segment in self._segments)

    @property
    def num_segments(self) -> int:
        """Segments that hold lines."""
        return len(self._segments)

    def reserve(self, num_bytes: int) -> bool:
        """Sets room aside for a line; False: there is none."""
        room = self._segments[-1].num_free_bytes + sum(spare.num_free_bytes - _WASTE_BYTES for spare in self._spares)
        room -= _WASTE_BYTES
        if room - self._num_reserved - num_bytes < self._segment_bytes // 2:
            self._prepare()
        if self._num_reserved + num_bytes > room:
            self._prepare()
            return False
        self._num_reserved += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Gives back room that was set aside."""
        self._num_reserved -= num_bytes

    def append(self, kind: Kind, payload: bytes) -> None:
        """Writes a line, which must fit into what was set aside for it. It outlives this process."""
        self._append(line_of(kind, payload))

    def append_if_room(self, kind: Kind, payload: bytes) -> bool:
        """Writes a line for which no room was set aside, unless it would take some that was. Whether it did."""
        line = line_of(kind, payload)
        if not self.reserve(len(line)):
            return False
        self._append(line)
        self.release(len(line))
        return True

    def oldest_unacknowledged(self) -> Segment | None:
        """The segment whose lines should be sent next; None: all have arrived."""
        return next((segment for segment in self._segments if not segment.is_acknowledged), None)

    async def drop_before(self, number: int) -> None:
        """Removes segments before this one all lines of which have arrived, the oldest first.

        If no new file can be made one of them is used again, so a full disk does not stop answers while
        Redis takes their lines.
        """
        while len(self._segments) > 1 and self._segments[0].number < number and self._segments[0].is_acknowledged:
            if self._preparing is not None:
                await asyncio.wait([self._preparing])
            segment = self._segments.popleft()
            if self._spares:
                await asyncio.to_thread(segment.close, remove=True)
            else:
                self._preparing = asyncio.get_running_loop().create_task(self._use_again(segment))
                await asyncio.shield(self._preparing)

    async def sync(self) -> None:
        """Returns once all lines that have not arrived survive a crash of the machine."""
        for segment in [*self._segments]:
            if not segment.is_acknowledged:
                await asyncio.to_thread(segment.sync)

    def touch(self) -> None:
        """Shows other machines that this process lives. Blocks."""
        os.utime(self.lock_path)

    def _append(self, line: bytes) -> None:
        if self._segments[-1].num_free_bytes < len(line):
            self._segments.append(self._spares.popleft())
            self._prepare()
        self._segments[-1].append(line)

    def _prepare(self) -> None:
        """Has another segment made, unless one is being made or the disk is used up."""
        num_segments = len(self._segments) + len(self._spares)
        if self._preparing is None and (num_segments + 1) * self._segment_bytes <= self._max_bytes:
            self._preparing = asyncio.get_running_loop().create_task(self._make_spare())

    async def _make_spare(self) -> None:
        try:
            self._spares.append(await asyncio.to_thread(self._new_segment))
        except OSError:
            pass  # the caller finds no room, retries and reports it
        finally:
            self._preparing = None

    async def _use_again(self, segment: Segment) -> None:
        try:
            self._number += 1
            await asyncio.to_thread(segment.use_again, self._path(self._number), self._number)
            self._spares.append(segment)
        finally:
            self._preparing = None

    def _path(self, number: int) -> Path:
        return self._folder / f"{self.name}.{number:08}.log"

    def _new_segment(self) -> Segment:
        if shutil.disk_usage(self._folder).free < self._min_free_bytes + self._segment_bytes:
            raise OSError(f"less than {self._min_free_bytes} bytes would be free on the disk of {self._folder}")
        self._number += 1
        return Segment(self._path(self._number), self._number, self._segment_bytes)

    def _take_lock(self) -> int:
        """The lock is taken before others can see it, so no router adopts the spool of one that is starting."""
        self._folder.mkdir(parents=True, exist_ok=True)
        hidden = self._folder / f"{self.name}.new"
        lock = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, boot_id().encode())
        os.rename(hidden, self.lock_path)
        return lock


def boot_id() -> str:
    """Names the kernel that this process runs on: all processes with the same one see each other's locks at once."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename
