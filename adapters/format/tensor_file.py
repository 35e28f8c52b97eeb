"""Reads and writes tensors in the safetensors format, and checks every byte of the header.

A file that is mapped takes no memory before its tensors are read, however large an upload is. The format: 8 bytes with
the header's length, a JSON header, then the tensors without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import AdapterInvalid, quote
from .strict_json import parse_object

Tensor = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DTYPES_TO_READ = {**DTYPES, "F64": np.dtype(np.float64)}  # which becomes float32
_INFINITIES = {np.dtype(np.float16): 0x7C00, BFLOAT16: 0x7F80}  # as bits; NaNs are above them, all else below
MAX_HEADER_BYTES = 32 << 20
MAX_DIMENSIONS = 8
_OTHER_FORMATS = {  # by their first bytes
    b"version ": "a pointer of Git LFS to one: fetch the file itself with `git lfs pull`",
    b"PK\x03\x04": "one of torch.save (pickle), which is never read: save it with safe_serialization=True",
    b"\x80\x02": "a pickle, which is never read: save it with safe_serialization=True",
    b"\x80\x04": "a pickle, which is never read: save it with safe_serialization=True",
    b"<!DOCTYP": "a web page: download the file itself",
    b"\x1f\x8b": "a gzip archive: send the file in it",
}
_FINITE_ELEMENTS = 1 << 20  # checked at once, so that a large tensor needs little memory


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `start` and `end` in bytes of the data that follow the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """A file whose header holds: known dtypes, shapes that fit their bytes, no gaps, no overlaps, nothing left over.

    Tensors are views of the file's bytes, not to be written, and keep them; but of float64 they are copies in float32.
    Raises AdapterInvalid, naming `label`.
    """

    def __init__(
        self,
        path: Path,
        label: str,
        mapped: bool = True,
        max_header_bytes: int = MAX_HEADER_BYTES,
        name_of: Callable[[str], str] = str,
    ) -> None:
        """`mapped`: else the file is read at once, so a failing disk raises OSError and does not end the process.

        `name_of`: what a tensor is called here, by its name in the file.
        """
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            header_bytes = _header_length(file.read(9), num_bytes, label, max_header_bytes)
            file.seek(8)
            header = parse_object(file.read(header_bytes), f"the header of {label}")
            self._start = 8 + header_bytes
            entries = _entries(header, num_bytes - self._start, label)
            self.entries: Mapping[str, TensorEntry] = {name_of(name): entry for name, entry in entries.items()}
            if len(self.entries) < len(entries):
                (name, _), *_ = Counter(map(name_of, entries)).most_common(1)
                raise AdapterInvalid(f"{label} has {quote(name, 160)} under two names: each tensor may be there once")
            if mapped:
                self._bytes: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            else:
                file.seek(0)
                self._bytes = file.read()
                if len(self._bytes) != num_bytes:
                    raise AdapterInvalid(f"{label} is truncated: it has {len(self._bytes)} bytes, and had {num_bytes}")

    def tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        offset = self._start + entry.start
        raw = np.frombuffer(self._bytes, np.uint8, count=entry.end - entry.start, offset=offset)
        if offset % entry.dtype.itemsize:  # the format does not promise alignment
            raw = raw.copy()
        tensor = raw.view(entry.dtype).reshape(entry.shape)
        if entry.dtype in DTYPE_NAMES:
            return tensor
        with np.errstate(over="ignore"):  # what is too large becomes infinity, which callers look for
            return tensor.astype(np.float32)

    def finite(self, name: str) -> Tensor:
        """The same. Raises AdapterInvalid for a tensor with NaN or infinity."""
        tensor = self.tensor(name)
        if not is_finite(tensor):
            raise AdapterInvalid(f"{name} holds NaN or infinity: only finite numbers are accepted")
        return tensor


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors in the order of their names: equal tensors make equal files."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in sorted(tensors.items()):
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in sorted(tensors.items()):
        file.write(tensor_bytes(tensor))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row after row, without a copy if it is contiguous."""
    raw: Any = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return memoryview(raw)


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. `tensor` is contiguous, of one of DTYPES, and holds something."""
    flat = tensor.reshape(-1)
    parts = (flat[start : start + _FINITE_ELEMENTS] for start in range(0, len(flat), _FINITE_ELEMENTS))
    return all(map(_part_is_finite, parts))


def _part_is_finite(part: Tensor) -> bool:
    if part.dtype == np.float32:
        return bool(np.isfinite(part).all())
    magnitudes = part.view(np.uint16) & 0x7FFF  # ten times faster than numpy's own way for 16 bits
    return int(magnitudes.max()) < _INFINITIES[part.dtype]


def _header_length(prefix: bytes, num_bytes: int, label: str, max_bytes: int) -> int:
    """`prefix`: the length, and the first byte of the header, which is an object: a length may look like a format."""
    if len(prefix) < 8:
        raise AdapterInvalid(f"{label} is truncated: {num_bytes} bytes are not a safetensors file")
    for beginning, name in _OTHER_FORMATS.items():
        if prefix.startswith(beginning) and prefix[8:] != b"{":
            raise AdapterInvalid(f"{label} is not a safetensors file but {name}")
    length = int.from_bytes(prefix[:8], "little")
    if length > max_bytes:
        raise AdapterInvalid(
            f"{label} is not a safetensors file of an adapter of this base: its header would take {length} bytes, "
            f"at most {max_bytes} are accepted (pickle and other formats are not read)"
        )
    if 8 + length > num_bytes:
        raise AdapterInvalid(f"{label} is truncated: its header takes {length} bytes, the file has {num_bytes}")
    return length


def _entries(header: dict[str, Any], data_bytes: int, label: str) -> dict[str, TensorEntry]:
    entries = {name: _entry(name, facts, label) for name, facts in header.items() if name != "__metadata__"}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start != end:
            problem = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise AdapterInvalid(f"{label}: {quote(name)} {problem}: tensors must follow one another")
        end = entry.end
    if end > data_bytes:
        raise AdapterInvalid(f"{label} is truncated: its tensors take {end} bytes, the file has {data_bytes} of them")
    if end < data_bytes:
        raise AdapterInvalid(f"{label} has {data_bytes - end} bytes after its last tensor: nothing may follow it")
    return entries


def _entry(name: str, facts: Any, label: str) -> TensorEntry:
    where = f"{label}: {quote(name, 160)}"
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise AdapterInvalid(f"{where} is described by {quote(facts)}: dtype, shape and data_offsets are needed")
    dtype = _DTYPES_TO_READ.get(facts["dtype"]) if isinstance(facts["dtype"], str) else None
    if dtype is None:
        raise AdapterInvalid(f"{where} has dtype {quote(facts['dtype'])}: {', '.join(_DTYPES_TO_READ)} are accepted")
    shape, offsets = facts["shape"], facts["data_offsets"]
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise AdapterInvalid(f"{where} has shape {quote(shape)}: a list of sizes is needed")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise AdapterInvalid(f"{where} has data_offsets {quote(offsets)}: a begin and an end are needed")
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes == 0:
        raise AdapterInvalid(f"{where} has shape {shape}: it holds nothing")
    if offsets[1] - offsets[0] != num_bytes:
        raise AdapterInvalid(f"{where} has {num_bytes} bytes by its shape and {offsets[1] - offsets[0]} by its offsets")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
