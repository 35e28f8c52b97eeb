"""The file of a packed adapter, which one read brings into host memory.

The format: `MOTETPK2`, 4 bytes with the length of a JSON header, the header, 4 bytes with the CRC-32 of header and
pages, the pages. The checksum is checked at each load and finds damage. It is not SHA-256, which took most of the time
of a load; the digest of the content was checked when the adapter was packed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..format.tensor_file import Tensor, tensor_bytes
from .layout import AdapterLayout
from .packing import PAGE_DTYPES

_MAGIC = b"MOTETPK2"
_MAX_HEADER_BYTES = 1 << 16
_CHECKSUM_BYTES = 4


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
        num_bytes = path.stat().st_size
        prefix = file.read(12)
        header_bytes = int.from_bytes(prefix[8:], "little")
        if not prefix.startswith(_MAGIC) or header_bytes > _MAX_HEADER_BYTES:
            raise PackedFileDamaged("it is no packed adapter")
        header = file.read(header_bytes)
        checksum = file.read(_CHECKSUM_BYTES)
        shape = _shape(header, digest, layout)
        dtype = PAGE_DTYPES[layout.dtype]
        body_bytes = prod(shape) * dtype.itemsize
        if num_bytes != len(_MAGIC) + 4 + header_bytes + _CHECKSUM_BYTES + body_bytes:
            raise PackedFileDamaged(f"its pages take {body_bytes} bytes, and the file has {num_bytes} in all")
        body = np.empty(body_bytes, np.uint8)
        target = tensor_bytes(body)
        filled = 0
        while filled < body_bytes and (count := file.readinto(target[filled:])):
            filled += count
    if filled < body_bytes or _checksum(header, target) != checksum:
        raise PackedFileDamaged("its checksum does not match")
    pages: Tensor = body.view(dtype).reshape(shape)
    return pages


def _checksum(header: bytes, body: memoryview) -> bytes:
    return zlib.crc32(body, zlib.crc32(header)).to_bytes(_CHECKSUM_BYTES, "little")


def _identity(digest: str, layout: AdapterLayout) -> dict[str, Any]:
    modules = {module: list(sides) for module, sides in layout.shape.modules.items()}
    return {"digest": digest, "layout": layout.key, "modules": modules}


def _shape(header: bytes, digest: str, layout: AdapterLayout) -> tuple[int, int, int]:
    try:
        facts = json.loads(header)
        num_pages, num_layers, slab = facts.pop("shape")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackedFileDamaged("its header is not readable") from error
    if facts != _identity(digest, layout):
        raise PackedFileDamaged("it was packed for another adapter, layout or base")
    if type(num_pages) is not int or num_pages < 1 or (num_layers, slab) != (layout.shape.num_layers, layout.slab):
        raise PackedFileDamaged(f"its header promises pages of shape {[num_pages, num_layers, slab]}")
    return num_pages, num_layers, slab
