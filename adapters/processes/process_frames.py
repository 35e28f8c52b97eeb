"""Lists of byte strings through a pipe: their number, the length of each, then the bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import IO, Final

LAST: Final = b"last"  # the first frame of an answer: the process answers no other question
NOT_LAST: Final = b""

_NUMBER: Final = struct.Struct("<Q")


def write_frames(sink: IO[bytes], frames: Sequence[bytes | bytearray]) -> None:
    """Blocking. Raises OSError if the other end is closed."""
    sink.write(b"".join(map(_NUMBER.pack, (len(frames), *map(len, frames)))))
    for frame in frames:
        sink.write(frame)
    sink.flush()


def read_frames(source: IO[bytes]) -> list[bytes]:
    """The frames that were written together; empty at the end. Blocking. Raises EOFError if they are cut off."""
    start = source.read(_NUMBER.size)
    if not start:
        return []
    num_frames = _number(start)
    lengths = [_number(source.read(_NUMBER.size)) for _ in range(num_frames)]
    frames = [source.read(length) for length in lengths]
    if list(map(len, frames)) != lengths:
        raise EOFError("the frames were cut off")
    return frames


def _number(data: bytes) -> int:
    if len(data) < _NUMBER.size:
        raise EOFError("the frames were cut off")
    (number,) = _NUMBER.unpack(data)
    return int(number)
