"""One file of a router's spool: lines behind a header with the offset up to which they are acknowledged.

The file is allocated in full when it is made, and memory-mapped: writing a line is a copy into memory that survives a
kill of this process, makes no system call that a slow disk could delay, and cannot fail because the disk is full.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from zlib import crc32

from .spool_lines import read_lines

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
    found = []
    for start in (0, _SLOT_BYTES):
        if len(head) < start + _OFFSET.size:
            found.append(0)
            continue
        offset, checksum = _OFFSET.unpack_from(head, start)
        found.append(offset if checksum == crc32(offset.to_bytes(8, "little")) else 0)
    return found[0], found[1]
