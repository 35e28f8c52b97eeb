"""The file of a packed adapter, which one read brings into host memory, or several into a part of it.

The format: `MOTETPK2`, 4 bytes with the length of a JSON header, the header, 4 bytes with the CRC-32 of header and
pages, the pages. The checksum is checked at each load and finds damage. It is not SHA-256, which took most of the time
of a load; the digest of the content was checked when the adapter was packed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..format.tensor_file import Tensor, tensor_bytes
from .layout import AdapterLayout
from .packing import PAGE_DTYPES

_MAGIC = b"MOTETPK2"
_MAX_HEADER_BYTES = 1 << 16
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class PagesPart:
    """Pages `start : stop` of an adapter that has `num_pages` in all."""

    start: int
    stop: int
    num_pages: int


class PackedFileDamaged(Exception):  # noqa: N818
    """The file was changed since it was written, or belongs to another adapter or layout. The message says which."""


def write_packed(file: BinaryIO, digest: str, layout: AdapterLayout, num_pages: int, chunks: Iterable[Tensor]) -> None:
    """Writes the pages of the adapter `digest`: `num_pages` of them in all, in runs `[n, num_layers, slab]`.

    The file is empty, and can be sought in.
    """
    shape = [num_pages, layout.shape.num_layers, layout.slab]
    header = json.dumps({**_identity(digest, layout), "shape": shape}).encode()
    prefix = _MAGIC + len(header).to_bytes(4, "little") + header
    file.write(prefix + bytes(_CHECKSUM_BYTES))
    checksum = zlib.crc32(header)
    for chunk in chunks:
        body = tensor_bytes(chunk)
        checksum = zlib.crc32(body, checksum)
        file.write(body)
    file.seek(len(prefix))
    file.write(checksum.to_bytes(_CHECKSUM_BYTES, "little"))


def read_packed(path: Path, digest: str, layout: AdapterLayout) -> Tensor:
    """The pages that `write_packed` wrote. Raises PackedFileDamaged, or OSError if the file cannot be read."""
    with path.open("rb", buffering=0) as file:
        header = _read_header(file, path.stat().st_size, digest, layout)
        body = _read(file, header.num_pages * layout.page_bytes)
    header.check(zlib.crc32(tensor_bytes(body), header.own_checksum))
    return _as_pages(body, layout)


def read_packed_part(path: Path, digest: str, layout: AdapterLayout, part: PagesPart) -> Tensor:
    """As `read_packed`, these pages alone. With the part that begins at 0 all are verified, piece by piece."""
    with path.open("rb", buffering=0) as file:
        header = _read_header(file, path.stat().st_size, digest, layout)
        if part.num_pages != header.num_pages:
            raise PackedFileDamaged(f"it has {header.num_pages} pages, and {part.num_pages} are wanted")
        begin, checksum = file.tell(), header.own_checksum
        if part.start == 0:
            for page in range(0, header.num_pages, part.stop):
                num_pages = min(part.stop, header.num_pages - page)
                checksum = zlib.crc32(tensor_bytes(_read(file, num_pages * layout.page_bytes)), checksum)
            header.check(checksum)
        file.seek(begin + part.start * layout.page_bytes)
        return _as_pages(_read(file, (part.stop - part.start) * layout.page_bytes), layout)


@dataclass(frozen=True)
class _Header:
    num_pages: int
    own_checksum: int  # of the header alone
    checksum: bytes  # of header and pages, as the file has it

    def check(self, checksum: int) -> None:
        if checksum.to_bytes(_CHECKSUM_BYTES, "little") != self.checksum:
            raise PackedFileDamaged("its checksum does not match")


def _read_header(file: RawIOBase, num_bytes: int, digest: str, layout: AdapterLayout) -> _Header:
    """The header of a file of `num_bytes`, which is then read up to its pages."""
    prefix = bytes(_read(file, min(12, num_bytes)))
    header_bytes = int.from_bytes(prefix[8:], "little")
    if not prefix.startswith(_MAGIC) or header_bytes > min(_MAX_HEADER_BYTES, num_bytes):
        raise PackedFileDamaged("it is not a packed adapter")
    header = bytes(_read(file, header_bytes))
    num_pages = _num_pages(header, digest, layout)
    expected = len(prefix) + header_bytes + _CHECKSUM_BYTES + num_pages * layout.page_bytes
    if num_bytes != expected:
        raise PackedFileDamaged(f"its {num_pages} pages end at byte {expected}, and the file has {num_bytes}")
    return _Header(num_pages, zlib.crc32(header), bytes(_read(file, _CHECKSUM_BYTES)))


def _read(file: RawIOBase, num_bytes: int) -> Tensor:
    body = np.empty(num_bytes, np.uint8)
    target, filled = tensor_bytes(body), 0
    while filled < num_bytes:
        count = file.readinto(target[filled:])
        if not count:
            raise PackedFileDamaged("it is cut short")
        filled += count
    return body


def _as_pages(body: Tensor, layout: AdapterLayout) -> Tensor:
    pages: Tensor = body.view(PAGE_DTYPES[layout.dtype]).reshape(-1, layout.shape.num_layers, layout.slab)
    return pages


def _identity(digest: str, layout: AdapterLayout) -> dict[str, Any]:
    modules = {module: list(sides) for module, sides in layout.shape.modules.items()}
    return {"digest": digest, "layout": layout.key, "modules": modules}


def _num_pages(header: bytes, digest: str, layout: AdapterLayout) -> int:
    try:
        facts = json.loads(header)
        num_pages, num_layers, slab = facts.pop("shape")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackedFileDamaged("its header is not readable") from error
    if facts != _identity(digest, layout):
        raise PackedFileDamaged("it was packed for another adapter, layout or base")
    if type(num_pages) is not int or num_pages < 1 or (num_layers, slab) != (layout.shape.num_layers, layout.slab):
        raise PackedFileDamaged(f"its header promises pages of shape {[num_pages, num_layers, slab]}")
    return num_pages
