"""Finds a base's files, and the place of each tensor in them, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

from ...adapters.adapter import EXPERT_MODULES, BaseShape, BaseTensor

_LENGTH_BYTES = 8  # before the header, which is JSON
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound
_PIECE_BYTES = 1 << 20
ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in row-major order, little-endian."""

    path: Path
    name: str
    dtype: str  # the format's name, as in `ITEM_BYTES`
    shape: tuple[int, ...]
    start: int  # of its first byte in the file
    num_bytes: int


def stored_tensors(path: Path) -> list[StoredTensor]:
    """All tensors of a file, from its header. Raises ValueError for a file that is damaged or cut short."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        first = _LENGTH_BYTES + header_bytes
        if num_bytes < _LENGTH_BYTES or header_bytes > _MAX_HEADER_BYTES or first > num_bytes:
            raise ValueError(f"{path} is damaged: it has {num_bytes} bytes, and its header should end at byte {first}")
        header = file.read(header_bytes)
    try:
        described: dict[str, Any] = json.loads(header)
        tensors = [
            _described(path, name, first, meta, num_bytes) for name, meta in described.items() if name != "__metadata__"
        ]
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is damaged: its header is not that of a safetensors file: {error!r}") from error
    return tensors


def _described(path: Path, name: str, first: int, entry: dict[str, Any], num_bytes: int) -> StoredTensor:
    dtype, shape, start, end = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][0], entry["data_offsets"][1]
    is_whole = all(isinstance(number, int) and number >= 0 for number in (*shape, start, end))
    if not is_whole or (dtype in ITEM_BYTES and end - start != math.prod(shape) * ITEM_BYTES[dtype]):
        raise ValueError(
            f"{path} is damaged: tensor {name!r} lies at bytes {start} to {end} of the data, which its shape "
            f"{list(shape)} in {dtype} does not fill"
        )
    if first + end > num_bytes:
        raise ValueError(
            f"{path} is damaged: it has {num_bytes} bytes, and tensor {name!r} ends at byte {first + end}: "
            "the file was not written or copied completely"
        )
    return StoredTensor(path, name, dtype, shape, first + start, end - start)


FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})  # dtypes that weights may have


def check_float(name: str, dtype: str) -> None:
    """Raises ValueError for a tensor of integers: those of a quantized base are weights only with their scales."""
    if dtype not in FLOATS:
        raise ValueError(f"tensor {name!r} has the dtype {dtype}: {', '.join(sorted(FLOATS))} are accepted")


def part_name(part: str, whole: str) -> str:
    """For messages: a part of a tensor that `WeightSource.split` has taken apart."""
    return f"{part} of {whole}"


def rows_of_parts(name: str, shape: Sequence[int], num_rows: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Start and stop of the rows of each part of a tensor. Raises ValueError unless they are all of them."""
    if not shape or shape[0] != sum(num_rows.values()):
        raise ValueError(
            f"tensor {name!r} has shape {tuple(shape)}: config.json needs {sum(num_rows.values())} rows, of "
            f"{', '.join(num_rows)}"
        )
    stops = [*accumulate(num_rows.values())]
    return {part: (stop - num_rows[part], stop) for part, stop in zip(num_rows, stops, strict=True)}


def are_equal(tensor: StoredTensor, other: StoredTensor) -> bool:
    """Whether both have the same shape, dtype and bytes. Reads both, by pieces of a megabyte."""
    if (tensor.shape, tensor.dtype, tensor.num_bytes) != (other.shape, other.dtype, other.num_bytes):
        return False
    with tensor.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(tensor.start)
        second.seek(other.start)
        for done in range(0, tensor.num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, tensor.num_bytes - done)
            if first.read(size) != second.read(size):
                return False
    return True


def shards(folder: Path) -> Iterator[Path]:
    """The safetensors files of a model folder: the single file if there is one, else those of the index, else all.

    So transformers chooses. A file of the index may be missing. Raises ValueError for a damaged index.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        yield single
    elif index.is_file():
        yield from (folder / name for name in _names_in(index))
    else:
        yield from sorted(folder.glob("*.safetensors"))


def _names_in(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: {error!r}") from error
    if outside:
        raise ValueError(f"{index} names a file outside its folder: {outside[0]!r}")
    return names


# Names of a base's tensors: those of a model that was saved without its head, as for embeddings, lack a prefix, and
# those of the text model of one that takes pictures too have another one.

T = TypeVar("T")

HEAD: Final = "lm_head.weight"
_PREFIX: Final = "model."  # of all but the head's, where there may be one
_EMBEDDING: Final = "embed_tokens.weight"
# Of a text model's tensors in the file of a model that takes pictures too, and what a text model has in their place.
_WRAPPED: Final = (
    ("language_model.model.", _PREFIX),
    ("language_model.", ""),
    ("model.language_model.", _PREFIX),
    ("backbone.", _PREFIX),  # of Nemotron-H
)
_OTHER_NAMES: Final = {f"{before}embeddings.weight": f"{before}{_EMBEDDING}" for before in ("", _PREFIX)}  # likewise


def named_in_full(stored: Mapping[str, T]) -> dict[str, T]:
    """The same by the names that a model of text alone has with a head."""
    named = {_text_name(name): value for name, value in stored.items()}
    if _EMBEDDING in named:
        return {name if name == HEAD else _PREFIX + name: value for name, value in named.items()}
    return named


def _text_name(name: str) -> str:
    for prefix, text_prefix in _WRAPPED:
        if name.startswith(prefix):
            name = text_prefix + name.removeprefix(prefix)
            break
    return _OTHER_NAMES.get(name, name)


def lacks_head(stored: Iterable[str]) -> bool:
    """The names are those of a model that was saved without its head."""
    names = {*map(_text_name, stored)} & {_EMBEDDING, HEAD}
    return names == {_EMBEDDING}


def has_other_head(folder: Path) -> bool:
    """Whether a model folder has a head that is not its embedding. Raises ValueError for a damaged file."""
    stored = named_in_full({tensor.name: tensor for path in shards(folder) for tensor in stored_tensors(path)})
    head, embedding = stored.get(HEAD), stored.get(_PREFIX + _EMBEDDING)
    return head is not None and embedding is not None and not are_equal(head, embedding)


def folder_lacks_head(folder: Path) -> bool:
    """The same of a model folder. Raises ValueError for a damaged file."""
    return lacks_head(tensor.name for path in shards(folder) for tensor in stored_tensors(path))


def folder_has_head(folder: Path) -> bool:
    """Whether files of a model folder, which may lack some, have the head. Raises ValueError for a damaged file."""
    paths = filter(Path.is_file, shards(folder))
    return HEAD in named_in_full({tensor.name: tensor for path in paths for tensor in stored_tensors(path)})


def base_tensors(folder: Path, shape: BaseShape) -> dict[str, BaseTensor]:
    """Weights and biases of a model folder's embedding, head and layers' linears, by their names without pictures.

    Raises ValueError for a damaged file.
    """
    stored = named_in_full({tensor.name: tensor for path in shards(folder) for tensor in stored_tensors(path)})
    linears = [shape.path(name) for name in shape.names if name not in EXPERT_MODULES]
    of_layers = (
        f"{_PREFIX}layers.{layer}.{linear}.{part}"
        for layer in range(shape.num_layers)
        for linear in linears
        for part in ("weight", "bias")
    )
    return {
        name: BaseTensor(str(tensor.path), tensor.dtype, tensor.shape, tensor.start)
        for name in (_PREFIX + _EMBEDDING, HEAD, HEAD.replace("weight", "bias"), *of_layers)
        if (tensor := stored.get(name)) is not None
    }
