"""The base's own weights and biases, which decide what some adapters compute: norms of DoRA, trained biases.

Of an embedding that was saved in whole they tell the rows that were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import numpy as np

from ..adapter import BaseTensor
from ..errors import AdapterInvalid, quote
from .tensor_file import BFLOAT16, DTYPES, Tensor

_BLOCK_BYTES = 4 << 20  # of a weight in float32, that is read and multiplied at once
_NEAR_ROWS = 8  # from one row to the next that is read with it


class BaseWeights:
    """Reads weights and biases of the base, by their names in a model of text alone."""

    def __init__(
        self, tensors: Mapping[str, BaseTensor], on_read: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """`on_read` gets the bytes of each tensor before it is read."""
        self._tensors, self._on_read = tensors, on_read

    def bias(self, name: str, num_out: int) -> Tensor | None:
        """`[num_out]` float32; None: the linear has none."""
        if name not in self._tensors:
            return None
        return np.concatenate([*self._blocks(name, (num_out,))])

    def row_norms(self, name: str, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """Norms of the rows of `W + scaling * b @ a`, `[out]` float32, W the base's weight: block by block."""
        norms, start, wide_a = np.empty(len(b), np.float32), 0, a.astype(np.float32)
        for rows in self._blocks(name, (len(b), a.shape[1])):
            stop = start + len(rows)
            delta = b[start:stop].astype(np.float32) @ wide_a
            delta *= np.float32(scaling)
            delta += rows
            norms[start:stop] = np.sqrt(np.einsum("ij,ij->i", delta, delta))
            start = stop
        return norms

    def changed_rows(self, name: str, row_ids: Tensor, tensor: Tensor, places: Tensor) -> Tensor:
        """Which of the base's rows `row_ids` `[n]`, ascending, differ from the rows `places` `[n]` of `tensor`: bool.

        Rows are equal if they are so in one of both dtypes: training may have held the base in another one than its
        file does. All differ where the base has no weight of this name, a quantized one, or one of another shape.
        """
        stored, width = self._tensors.get(name), tensor.shape[1]
        changed = np.ones(len(row_ids), np.bool_)
        if stored is None or stored.dtype not in DTYPES or stored.shape[1:] != (width,):
            return changed
        if not len(row_ids) or row_ids[-1] >= stored.shape[0]:
            return changed
        dtype, step, start = DTYPES[stored.dtype], max(_BLOCK_BYTES // (4 * width), 1), 0
        row_bytes, gaps = width * dtype.itemsize, np.diff(row_ids)
        is_far = gaps > _NEAR_ROWS
        self._on_read(int(1 + np.where(is_far, 1, gaps).sum()) * row_bytes)
        stops = np.append(np.flatnonzero(is_far) + 1, len(row_ids))  # of rows that are near one another
        while start < len(row_ids):  # in bounded pieces, with what lies between near rows: a read each is slower
            first = int(row_ids[start])
            near = int(stops[np.searchsorted(stops, start, "right")])
            stop = min(near, int(np.searchsorted(row_ids, first + step)))
            within, rows = row_ids[start:stop] - first, tensor[places[start:stop]]
            size = (int(within[-1]) + 1) * width
            base = np.fromfile(stored.path, dtype, size, offset=stored.start + first * row_bytes)
            if len(base) < size:
                raise OSError(f"{stored.path} is cut short")
            base = base.reshape(-1, width)[within]
            with np.errstate(over="ignore"):
                equal = _are_equal(rows.astype(dtype, copy=False), base) | _are_equal(base.astype(rows.dtype), rows)
            changed[start:stop] = ~equal
            start = stop
        return changed

    def _blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        tensor = self._tensors.get(name)
        if tensor is None or tensor.dtype not in DTYPES:
            raise AdapterInvalid(
                f"the base has no {quote(name)} in {', '.join(DTYPES)}, and what this adapter computes depends on it "
                "(DoRA's norms, trained biases): serve the base that is not quantized, or train plain LoRA"
            )
        if tensor.shape != shape:
            raise AdapterInvalid(f"the base's {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        dtype, num_rows, width = DTYPES[tensor.dtype], shape[0], prod(shape[1:])
        step = max(_BLOCK_BYTES // (4 * width), 1)
        self._on_read(num_rows * width * dtype.itemsize)
        for start in range(0, num_rows, step):
            count = min(step, num_rows - start)
            offset = tensor.start + start * width * dtype.itemsize
            raw = np.fromfile(tensor.path, np.uint16 if dtype == BFLOAT16 else dtype, count * width, offset=offset)
            if len(raw) < count * width:
                raise OSError(f"{tensor.path} is cut short")
            if dtype == BFLOAT16:  # its bits are float32's upper ones: several times faster than numpy's own way
                yield np.left_shift(raw, 16, dtype=np.uint32).view(np.float32).reshape(count, *shape[1:])
            else:
                yield raw.astype(np.float32).reshape(count, *shape[1:])


def _are_equal(rows: Tensor, base: Tensor) -> Tensor:
    """Which rows have the same bits, `[n]` bool."""
    bits = f"u{rows.dtype.itemsize}"
    return np.asarray((rows.view(bits) == base.view(bits)).all(axis=1))
