"""Lines of a spool file: what each holds, and how a reader knows that it is whole.

`<kind><CRC-32, 8 hex digits> <JSON>` and a line feed. A file is zeros behind its last line. A process that was killed
may leave a part of a line, which its checksum shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal
from zlib import crc32

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
