"""A router's spool: what it has counted, on disk until Redis has it.

Room for an answer's last line is set aside before the answer is made, so writing it cannot fail.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import shutil
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Final, Literal
from zlib import crc32

# Lines of a spool file: what each holds, and how a reader knows that it is whole.
#
# `<kind><CRC-32, 8 hex digits> <JSON>` and a line feed. A file is zeros behind its last line. A process that was
# killed may leave a part of a line, which its checksum shows.

FINAL: Final = "f"  # an answer that has ended
PARTIAL: Final = "p"  # an answer under way
Kind = Literal["f", "p"]
_NUM_HEAD: Final = 10


def line_of(kind: Kind, payload: bytes) -> bytes:
    """`payload`: without a line feed."""
    return b"%b%08x %b\n" % (kind.encode(), crc32(payload), payload)


def read_lines(data: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Kind and payload of each whole line, and where it ends. A damaged line is passed over, as its kind ""."""
    start = 0
    while start < len(data) and data[start]:
        feed = data.find(b"\n", start)
        if feed < 0:
            return  # cut off
        payload = data[start + _NUM_HEAD : feed]
        kind = data[start : start + 1].decode("ascii", "replace")
        is_whole = data[start + 1 : start + _NUM_HEAD] == b"%08x " % crc32(payload) and kind in (FINAL, PARTIAL)
        start = feed + 1
        yield (kind, payload, start) if is_whole else ("", b"", start)


# One file of a router's spool: lines behind a header with the offset up to which they are acknowledged.
#
# The file is allocated in full when it is made, and memory-mapped: writing a line is a copy into memory that survives
# a kill of this process, makes no system call that a slow disk could delay, and cannot fail because the disk is full.

HEAD_BYTES: Final = 64
_SLOT_BYTES: Final = 32  # two, written in turn: one is whole whenever the process is killed
_OFFSET: Final = struct.Struct("<QI")
_MAX_READ_BYTES: Final = 256 << 10


class Segment:
    def __init__(self, path: Path, number: int, num_bytes: int) -> None:
        """Creates the file, which must not exist. Blocks. Raises OSError where the disk has no room for all of it."""
        self.path, self.number = path, number
        self.end = self.acknowledged = HEAD_BYTES  # offsets: the end of all lines, and of the acknowledged ones
        self._slot = 0  # offset of the header's slot that was written last
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, num_bytes)
            self._map = mmap.mmap(handle, num_bytes)
            self._file = handle
        except BaseException:
            os.close(handle)
            path.unlink()
            raise

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    @property
    def num_free_bytes(self) -> int:
        return len(self._map) - self.end

    @property
    def is_acknowledged(self) -> bool:
        """Whether all lines are acknowledged."""
        return self.acknowledged == self.end

    def append(self, line: bytes) -> None:
        """The line must fit in `num_free_bytes`."""
        end = self.end + len(line)
        self._map[self.end : end] = line
        self.end = end

    def unacknowledged(self) -> bytes:
        """The next lines that are not acknowledged: whole lines, at most 256 KiB."""
        data = self._map[self.acknowledged : min(self.end, self.acknowledged + _MAX_READ_BYTES)]
        return data[: data.rfind(b"\n") + 1]

    def acknowledge(self, num_bytes: int) -> None:
        """Marks the next `num_bytes` of lines as acknowledged. Raises ValueError for 0, or more than there are."""
        if not 0 < num_bytes <= self.end - self.acknowledged:
            raise ValueError(f"{num_bytes} of {self.end - self.acknowledged} bytes cannot be acknowledged: {self.path}")
        self.acknowledged += num_bytes
        self._slot = _SLOT_BYTES - self._slot
        offset = self.acknowledged.to_bytes(8, "little")
        self._map[self._slot : self._slot + _OFFSET.size] = _OFFSET.pack(self.acknowledged, crc32(offset))

    def use_again(self, path: Path, number: int) -> None:
        """Empties the file and renames it. All of its lines must be acknowledged. Blocks.

        Lines are erased before the header is: no acknowledged line reappears, whenever the process is killed.
        """
        self._map[HEAD_BYTES : self.end] = bytes(self.end - HEAD_BYTES)
        self._map[:HEAD_BYTES] = bytes(HEAD_BYTES)
        self.path.rename(path)
        self.path, self.number = path, number
        self.end = self.acknowledged = HEAD_BYTES

    def sync(self) -> None:
        """Returns once the lines so far survive a crash of the machine. Blocks."""
        os.fdatasync(self._file)

    def close(self, *, remove: bool) -> None:
        self._map.close()
        os.close(self._file)
        if remove:
            self.path.unlink(missing_ok=True)


def read_segment(path: Path) -> Iterator[tuple[str, bytes, bool]]:
    """Kind, payload and "has been acknowledged" of each line of a file whose process has ended. Blocks."""
    data = path.read_bytes()
    acknowledged = max(HEAD_BYTES, *_offsets(data[:HEAD_BYTES]))
    for kind, payload, end in read_lines(data[HEAD_BYTES:]):
        yield kind, payload, HEAD_BYTES + end <= acknowledged


def _offsets(head: bytes) -> tuple[int, int]:
    """The offset in each slot; 0: the slot holds no valid one."""
    offsets = []
    for start in (0, _SLOT_BYTES):
        if len(head) < start + _OFFSET.size:
            offsets.append(0)
            continue
        offset, checksum = _OFFSET.unpack_from(head, start)
        offsets.append(offset if checksum == crc32(offset.to_bytes(8, "little")) else 0)
    return offsets[0], offsets[1]


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
