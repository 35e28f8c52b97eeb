"""Turns an adapter's matrices into the pages that the pool holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..adapter import END_MODULES, HEAD, NUM_OUTPUT_VECTORS, OUTER, BaseShape, family_of_module
from ..errors import AdapterInvalid
from ..format.content import AdapterContent, LoraMatrices, OutputVectors
from ..format.products import ProductMatrices
from ..format.tensor_file import BFLOAT16, Tensor, is_finite
from .layout import ID_BASE, NUM_ID_DIGITS, AdapterLayout, ModuleOffsets, ModulePart

PAGE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}
CHUNK_BYTES = 4 << 20  # of pages that are packed at once


@dataclass(frozen=True)
class _Placed:
    """An entry of the base's modules, or one of its experts', and where it lies."""

    name: str  # of the module whose matrices these are
    layers: Collection[int]
    part: ModulePart
    at: ModuleOffsets
    end: int  # of its B, and of the vectors of its outputs
    outputs: Tensor | None  # which outputs its rows are, in order; None: those of `part`
    scales: Tensor | None  # what its rows are multiplied by; None: nothing
    shifts: bool  # it is not a partial sum whose shift another worker adds


def pack(content: AdapterContent, layout: AdapterLayout) -> Tensor:
    """All of the adapter's pages, as `packed_chunks` gives them."""
    num_pages = layout.num_pages(content.module_ranks)
    pages = np.empty((num_pages, layout.shape.num_layers, layout.slab), PAGE_DTYPES[layout.dtype])
    start = 0
    for chunk in packed_chunks(content, layout):
        pages[start : start + len(chunk)] = chunk
        start += len(chunk)
    return pages


def packed_chunks(content: AdapterContent, layout: AdapterLayout, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Tensor]:
    """The adapter's pages `[n, num_layers, slab]` in the layout's dtype, one run of them after the other.

    Slab i of layer l is `[i, l]`. B is multiplied by the scaling in float32, so that kernels need no scaling. Elements
    outside all matrices are zero. A run takes `chunk_bytes`, or one page. Raises AdapterInvalid if the adapter does not
    fit the layout's base, or its numbers do not fit the dtype.
    """
    _check_fit(content, layout.shape)
    slab, num_pages = layout.slab, layout.num_layer_pages(content.module_ranks)
    step = max(chunk_bytes // layout.page_bytes, 1)
    placed = list(_placed(content, layout))
    for first in range(0, num_pages, step):
        last = min(first + step, num_pages)
        overlapping = [each for each in placed if each.end > first * slab and each.at.a < last * slab]
        chunk = np.empty((last - first, layout.shape.num_layers, slab), PAGE_DTYPES[layout.dtype])
        for layer in range(layout.shape.num_layers):
            array = np.zeros((last - first) * slab, chunk.dtype)
            for each in overlapping:
                if layer not in each.layers:
                    continue
                if (lora := content.matrices.get((layer, each.name))) is not None:
                    _fill(array, first * slab, lora, each)
                if (vectors := content.outputs.get((layer, each.name))) is not None:
                    _fill_outputs(array, first * slab, vectors, each)
            if not is_finite(array):
                raise AdapterInvalid(f"layer {layer} overflows {layout.dtype} once scaled: its numbers are too large")
            chunk[:, layer] = array.reshape(last - first, slab)
        yield chunk
    num_pages, page = layout.num_pages(content.module_ranks) - num_pages, layout.page_elements
    tables = list(_end_tables(content, layout))
    for first in range(0, num_pages, step):
        last = min(first + step, num_pages)
        array = np.zeros((last - first) * page, PAGE_DTYPES[layout.dtype])
        for table in tables:
            _fill_rows(array, table.at - first * page, table.width, table.num_rows, table.rows)
        if not is_finite(array):
            raise AdapterInvalid(f"embedding or head overflow {layout.dtype} once scaled: their numbers are too large")
        yield array.reshape(last - first, layout.shape.num_layers, slab)


def _placed(content: AdapterContent, layout: AdapterLayout) -> Iterator[_Placed]:
    for name, at in layout.offsets(content.module_ranks).items():
        module = family_of_module(name)
        part = layout.part(module)
        order = layout.output_order(module)
        outputs = None if order is None else np.array(order, np.intp)
        end = at.b + (at.rank + (0 if at.outputs is None else NUM_OUTPUT_VECTORS)) * part.widths[1]
        runs, scales = layout.shape.output_scales.get(module), None
        if runs is not None:
            factors = np.repeat([factor for _, factor in runs], [count for count, _ in runs]).astype(np.float32)
            scales = factors[slice(*part.outputs[0]) if outputs is None else outputs]
        sharding = layout.sharding
        shifts = sharding is None or sharding.rank == 0 or module not in sharding.inputs
        layers = layout.shape.layers_of(module)
        yield _Placed(layout.shape.source(name), layers, part, at, end, outputs, scales, shifts)


def _fill(array: Tensor, start: int, lora: LoraMatrices | ProductMatrices, placed: _Placed) -> None:
    """Packs the rows of A and B that lie in `array`, the elements from `start` on of a layer's virtual array."""
    part, at = placed.part, placed.at
    a_width, b_width = part.widths
    outputs = slice(*part.outputs[0]) if placed.outputs is None else placed.outputs

    def rows_of_b(rows: slice) -> Tensor:
        return _rows_of_b(lora, outputs, rows, placed.scales, part.padding)

    _fill_rows(array, at.a - start, a_width, lora.rank, lambda rows: lora.rows_of_a(rows, slice(*part.inputs)))
    _fill_rows(array, at.b - start, b_width, lora.rank, rows_of_b)


def _rows_of_b(
    lora: LoraMatrices | ProductMatrices, outputs: slice | Tensor, rows: slice, scales: Tensor | None, padding: int
) -> Tensor:
    """Rows of B transposed `[n, out and padding]` in float32, scaled."""
    b = lora.columns_of_b(outputs, rows).astype(np.float32)
    with np.errstate(over="ignore"):  # overflows are checked afterwards
        b *= np.float32(lora.scaling)
        if scales is not None:
            b *= scales[:, None]
    return (np.pad(b, ((0, padding), (0, 0))) if padding else b).T


@dataclass(frozen=True)
class _EndTable:
    """A table of rows in the end pages."""

    at: int  # of its first element
    width: int
    num_rows: int
    rows: Callable[[slice], Tensor]


def _end_tables(content: AdapterContent, layout: AdapterLayout) -> Iterator[_EndTable]:
    for module, at in layout.end_offsets(content.module_ranks).items():
        num_in, num_out = layout.shape.sides(OUTER, module) or (0, 0)
        if (lora := content.matrices.get((OUTER, module))) is not None:
            yield _EndTable(at.a, *_rows_of_a(lora, module, num_in))
            padding = layout.shape.padding(HEAD) if module == HEAD else 0
            rows_of_b = partial(_rows_of_b, lora, slice(0, num_out), scales=None, padding=padding)
            yield _EndTable(at.b, num_out + padding, lora.rank, rows_of_b)
        if (trained := content.token_rows.get(module)) is not None:
            yield _EndTable(at.token_ids, at.num_rows, NUM_ID_DIGITS, partial(_digits, trained.token_ids))
            yield _EndTable(at.rows, trained.rows.shape[1], at.num_rows, trained.rows.__getitem__)


def _rows_of_a(
    lora: LoraMatrices | ProductMatrices, module: str, num_in: int
) -> tuple[int, int, Callable[[slice], Tensor]]:
    """Of a table: the width, the number of rows, and these."""
    if module == HEAD:
        return num_in, lora.rank, lambda rows: lora.rows_of_a(rows, slice(0, num_in))
    return lora.rank, num_in, lambda tokens: lora.rows_of_a(slice(0, lora.rank), tokens).T


def _digits(token_ids: Tensor, rows: slice) -> Tensor:
    """`[n, num_ids]`."""
    digits: Tensor = np.stack([token_ids // ID_BASE**place % ID_BASE for place in range(rows.start, rows.stop)])
    return digits


def _fill_outputs(array: Tensor, start: int, vectors: OutputVectors, placed: _Placed) -> None:
    """Packs what of the vectors lies in `array`, as `_fill`."""
    assert placed.at.outputs is not None, "the layout has room for what the adapter has"
    outputs = slice(*placed.part.outputs[0]) if placed.outputs is None else placed.outputs
    gain, shift = vectors.gain[outputs], vectors.shift[outputs]
    with np.errstate(over="ignore"):
        rows = np.stack([gain, shift if placed.shifts else np.zeros_like(shift)]).astype(array.dtype)
    _copy_within(array, placed.at.outputs - start, rows)


def _fill_rows(array: Tensor, at: int, width: int, num_rows: int, rows_of: Callable[[slice], Tensor]) -> None:
    """Packs what lies in `array` of `num_rows` rows of this width, the first of which begins at `at`."""
    rows = _rows_within(at, width, num_rows, len(array))
    if rows.start < rows.stop:
        with np.errstate(over="ignore"):  # overflows are checked afterwards
            packed = rows_of(rows).astype(array.dtype)
        _copy_within(array, at + rows.start * width, packed)


def _rows_within(at: int, width: int, num_rows: int, length: int) -> slice:
    """Which of `num_rows` rows, the first of which begins at `at`, lie at least in part in `0 : length`."""
    first, last = max(-at // width, 0), min(-((at - length) // width), num_rows)
    return slice(first, max(first, last))


def _copy_within(array: Tensor, at: int, rows: Tensor) -> None:
    """Copies those elements of `rows` into the array that lie in it, where the first one's place is `at`."""
    low, high = max(at, 0), min(at + rows.size, len(array))
    if low < high:
        array[low:high] = rows.reshape(-1)[low - at : high - at]


def _check_fit(content: AdapterContent, shape: BaseShape) -> None:
    for (layer, module), lora in content.matrices.items():
        sides = shape.sides(layer, module)
        if sides != lora.sides:
            num_in, num_out = lora.sides
            raise AdapterInvalid(
                f"{module} of layer {layer} with {num_in} inputs and {num_out} outputs does not fit the base: it has "
                f"{shape.num_layers} layers, and {sides} there"
            )
    for module, trained in content.token_rows.items():
        ends = shape.ends if module in END_MODULES else None
        ids, num_rows = trained.token_ids, len(trained.token_ids)
        if ends is None or trained.rows.shape != (num_rows, ends.hidden_size):
            raise AdapterInvalid(f"{module} has no rows of this shape in this base: {list(trained.rows.shape)}")
        if num_rows and not (ids[0] >= 0 and ids[-1] < ends.vocab_size and (np.diff(ids) > 0).all()):
            raise AdapterInvalid(f"tokens of {module} are not in ascending order below {ends.vocab_size}")
    for (layer, module), vectors in content.outputs.items():
        sides = shape.sides(layer, module)
        if sides is None or (sides[1],) != vectors.gain.shape:
            raise AdapterInvalid(f"{module} of layer {layer} has not {len(vectors.gain)} outputs in this base: {sides}")
