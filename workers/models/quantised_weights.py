"""The weights of a base whose files are quantised: which tensors a linear has, and what they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from ...kernels.quantised import QuantisedWeight
from .quantised_config import Quantisation, WeightFormat
from .stored_tensor import rows_of_parts
from .weights import Checkpoint, Progress, TensorPlace

# The tensors of one linear.


class _Axis(NamedTuple):
    """An axis of a stored tensor."""

    of: Literal["rows", "columns", "all"]  # outputs or inputs; all: it is read whole, and has `per` elements
    per: int  # outputs or inputs for each element


@dataclass(frozen=True)
class _Part:
    """One stored tensor of a linear."""

    suffix: str  # of its name, after the linear's
    dtypes: tuple[str, ...]
    axes: tuple[_Axis, ...]
    is_needed: bool = True

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        sizes = {"rows": shape[0], "columns": shape[1]}
        return tuple(axis.per if axis.of == "all" else -(-sizes[axis.of] // axis.per) for axis in self.axes)


_FLOAT_SCALES: Final = ("F32", "BF16", "F16", "F8_E8M0")
_INTS: Final = ("I32", "I64")
_UNUSED: Final = (".input_scale", ".activation_scale", ".input_zero_point", ".output_scale", ".weight_observer")


def _parts(stored: WeightFormat, shape: tuple[int, int]) -> tuple[_Part, ...]:
    """The tensors of a linear `[out, in]`, the codes first, then scales, zero points and all else."""
    num_in = shape[1]
    row, column = _Axis("rows", 1), _Axis("columns", 1)
    group = _Axis("columns", stored.group_size or num_in)
    packed = 32 // stored.bits
    if stored.is_reordered:  # an input may be of any group
        group = _Axis("all", -(-num_in // (stored.group_size or num_in)))
    scale: tuple[_Axis, ...] = (row, group)
    if stored.per_tensor:
        scale = (_Axis("all", 1),)
    elif stored.block is not None:
        scale = (_Axis("rows", stored.block[0]), _Axis("columns", stored.block[1]))
    match stored.layout:
        case "fp8":
            scales = _Part(".weight_scale_inv", (*_FLOAT_SCALES, "U8"), scale)
            return _Part(".weight", ("F8_E4M3",), (row, column)), scales
        case "naive":
            codes = _Part(".weight", ("F8_E4M3",) if stored.is_float else ("I8",), (row, column))
            zeros = _Part(".weight_zero_point", ("I8",), scale, stored.has_zeros)
            return codes, _Part(".weight_scale", _FLOAT_SCALES, scale), zeros
        case "packed":
            words = _Part(".weight_packed", ("I32",), (row, _Axis("columns", packed)))
            zero_axes = (_Axis("rows", packed), group)
            order = _Part(".weight_g_idx", _INTS, (column,), stored.is_reordered)
            shapes = _Part(".weight_shape", ("I64", "I32"), (_Axis("all", 2),), False)
            zeros = _Part(".weight_zero_point", ("I32",), zero_axes, stored.has_zeros)
            return words, _Part(".weight_scale", _FLOAT_SCALES, scale), zeros, order, shapes
        case "mxfp4-packed":
            return (
                _Part(".weight_packed", ("U8",), (row, _Axis("columns", 2))),
                _Part(".weight_scale", ("U8", "F8_E8M0"), (row, group)),
            )
        case "gptq":
            return (
                _Part(".qweight", ("I32",), (_Axis("columns", packed), row)),
                _Part(".scales", _FLOAT_SCALES, (group, row)),
                _Part(".qzeros", ("I32",), (group, _Axis("rows", packed))),
                _Part(".g_idx", _INTS, (column,), stored.is_reordered),
            )
        case "awq":
            return (
                _Part(".qweight", ("I32",), (column, _Axis("rows", packed))),
                _Part(".scales", _FLOAT_SCALES, (group, row)),
                _Part(".qzeros", ("I32",), (group, _Axis("rows", packed))),
            )
        case "mxfp4-blocks":  # of all experts of a layer, whose outputs are rows of one weight
            return (
                _Part("_blocks", ("U8",), (row, _Axis("columns", 2))),
                _Part("_scales", ("U8",), (row, group)),
            )


# What they stand for.

Read = Callable[[str], torch.Tensor | None]  # a tensor by its suffix; None: there is none


def decode(stored: WeightFormat, shape: tuple[int, int], read: Read) -> QuantisedWeight:
    """The weight `[out, in]` of tensors that cover it from its first row and column on."""
    num_out, num_in = shape
    parts = [read(part.suffix) for part in _parts(stored, shape)]
    codes, scales = parts[0], parts[1]
    zeros = parts[2] if len(parts) > 2 else None
    assert codes is not None and scales is not None, "codes and scales are needed parts"
    order = parts[3] if len(parts) > 3 else None
    group_of = order.long() if order is not None and stored.is_reordered else None
    scales = _wide(scales)
    group_size = stored.group_size or num_in
    if stored.per_tensor:
        scales = scales.reshape(1, 1).expand(num_out, 1)
    elif stored.block is not None:
        scales = scales.repeat_interleave(stored.block[0], 0)[:num_out]
        group_size = stored.block[1]
    if stored.layout in ("gptq", "awq"):
        assert zeros is not None, "zero points are needed parts"
        reverse = _AWQ_PLACES if stored.layout == "awq" else None
        axis = 0 if stored.layout == "gptq" else 1
        values = _unpacked(codes, stored.bits, axis, reverse).t()[:num_out, :num_in]
        points = _unpacked(zeros, stored.bits, 1, reverse)[:, :num_out].t().float() + stored.zero_offset
        numbers: Literal["uint4", "uint8"] = "uint4" if stored.bits == 4 else "uint8"
        return QuantisedWeight(values, numbers, scales.t(), points, group_size, group_of=group_of)
    if stored.layout == "packed":
        middle = float(1 << (stored.bits - 1))  # added to all numbers and zero points, so that they are positive
        values = _unpacked(codes, stored.bits, 1)[:, :num_in]
        points = torch.full_like(scales, middle)
        if zeros is not None and stored.has_zeros:
            points = _unpacked(zeros, stored.bits, 0)[:num_out].float()
        numbers = "uint4" if stored.bits == 4 else "uint8"
        return QuantisedWeight(values, numbers, scales, points, group_size, group_of=group_of)
    if stored.layout in ("mxfp4-packed", "mxfp4-blocks"):
        return QuantisedWeight(_nibbles(codes)[:, :num_in], "float4", scales, None, group_size)
    own_points = None if zeros is None or not stored.has_zeros else zeros.float().expand_as(scales)
    kind: Literal["float8", "int8"] = "float8" if stored.is_float else "int8"
    return QuantisedWeight(codes, kind, scales, own_points, group_size, stored.rounds_inputs and not stored.is_float)


def _wide(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float32. Of bytes those are exponents of two, more by 127."""
    return torch.exp2(scales.float() - 127.0) if scales.dtype == torch.uint8 else scales.float()


_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # in an int32, of each of eight outputs


def _unpacked(words: torch.Tensor, bits: int, axis: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """The codes in int32 words, uint8, side by side along `axis`: the lowest bits first, or by their `places`."""
    count = 32 // bits
    order = torch.tensor(places or range(count), device=words.device)
    shape = [1] * (words.dim() + 1)
    shape[axis + 1] = count
    codes = (words.unsqueeze(axis + 1) >> (order * bits).view(shape)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(axis, axis + 1)


def _nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Codes of four bits, of which each byte has two, the lower one first."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


# Tensors that say of which group each input is, and what the config says where that is not their order.
_ORDERS: Final = {".g_idx": "desc_act = true", ".weight_g_idx": "actorder = 'group'"}


# A model folder.


class _Linear(NamedTuple):
    """A weight in the file, or some of its rows."""

    module: str  # as the model calls it
    stored: WeightFormat
    places: Mapping[str, TensorPlace]  # by suffix
    rows: tuple[int, int] | None = None
    num_rows: int = 0  # of the whole weight, where these are some of them


class QuantisedCheckpoint(Checkpoint):
    """The tensors of a model folder in which linears are quantised. What `take` returns is dequantised."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantisation: Quantisation,
        on_progress: Progress | None = None,
    ) -> None:
        """Raises ValueError for a damaged file, and where scales or zero points are missing."""
        super().__init__(folder, dtype, device, on_progress)
        self._linears: dict[str, _Linear] = {}  # by the name of the weight that they stand for
        self._find_linears(quantisation)
        self._modules = {linear.module for linear in self._linears.values()}
        self._total = len(self._where) + len(self._linears)

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        *,
        in_floats: bool = False,
    ) -> torch.Tensor:
        if len(shape) == 3 and name in self._linears:
            assert columns is None, "experts are read whole"
            return self._experts(name, shape, rows or (0, shape[0]))
        quantised = self.take_quantised(name, shape, rows, columns)
        if quantised is None:
            return super().take(name, shape, rows, columns, in_floats=in_floats)
        return quantised.dequantised().to(torch.float32 if in_floats else self._dtype)

    def _experts(self, name: str, shape: tuple[int, ...], experts: tuple[int, int]) -> torch.Tensor:
        """Some experts of a layer `[num_experts, in, out]`, as they are stored in 16 bits: in four outputs are rows."""
        linear, (num_experts, num_in, num_out) = self._linears.pop(name), shape
        first, all_experts = (0, num_experts) if linear.rows is None else (linear.rows[0], linear.num_rows)
        rows = ((first + experts[0]) * num_out, (first + experts[1]) * num_out)
        weight = self._read(linear, (all_experts * num_out, num_in), rows, (0, num_in)).dequantised()
        return weight.to(self._dtype).view(-1, num_out, num_in).transpose(1, 2)

    def take_quantised(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> QuantisedWeight | None:
        """See `WeightSource.take_quantised`. Reads the whole groups and packed words that have these rows."""
        linear = self._linears.pop(name, None)
        if linear is None:
            return None
        num_out, num_in = shape
        first, whole_shape = 0, (num_out, num_in)
        if linear.rows is not None:
            first, whole_shape = linear.rows[0], (linear.num_rows, num_in)
            if linear.rows[1] - first != num_out:
                raise ValueError(f"{name!r} has {linear.rows[1] - first} rows: config.json needs {num_out}")
        start, stop = rows or (0, num_out)
        weight = self._read(linear, whole_shape, (first + start, first + stop), columns or (0, num_in))
        if self._on_progress is not None:
            self._on_progress("loading weights", self._total - len(self._where) - len(self._linears), self._total)
        return weight

    def split(self, name: str, num_rows: Mapping[str, int]) -> None:
        linear = self._linears.pop(name, None)
        if linear is None:
            return super().split(name, num_rows)
        whole = sum(num_rows.values())  # what is read is compared with the files' shapes
        for part, rows in rows_of_parts(name, (whole,), num_rows).items():
            self._linears[part] = linear._replace(rows=rows, num_rows=whole)
        self._total += len(num_rows) - 1

    def __contains__(self, name: str) -> bool:
        return name in self._linears or super().__contains__(name)

    def drop(self, *, prefix: str = "", suffix: str = "") -> None:
        super().drop(prefix=prefix, suffix=suffix)
        for name in [name for name in self._linears if name.startswith(prefix) and name.endswith(suffix)]:
            del self._linears[name]

    def finish(self) -> None:
        if self._linears:
            names = ", ".join(sorted(self._linears)[:5])
            raise ValueError(
                f"{self._folder} has {len(self._linears)} weights that this model has no place for: {names}"
            )
        for name in [name for name in self._where if name.removesuffix(".bias") in self._modules]:
            place = self._where[name]
            if not place.file.get_tensor(place.name).any():  # type: ignore[no-untyped-call]
                del self._where[name]  # AutoGPTQ wrote zeros for linears that have no bias
        super().finish()

    def _find_linears(self, quantisation: Quantisation) -> None:
        """Takes the tensors of quantised linears out of those that are read as they are."""
        for name in [name for name in self._where if name.endswith(_UNUSED)]:
            del self._where[name]  # of the inputs, which stay in 16 bits
        for module in dict.fromkeys(
            name.removesuffix(suffix) for name in self._where for suffix in _CODES if name.endswith(suffix)
        ):
            codes = next(place for suffix in _CODES if (place := self._where.get(module + suffix)) is not None)
            stored_slice = codes.file.get_slice(codes.name)  # type: ignore[no-untyped-call]
            if codes.name.endswith(".weight") and stored_slice.get_dtype() not in ("F8_E4M3", "I8"):
                continue  # as modules that are not to be converted are
            stored = quantisation.format_of(_module_of(codes.name))
            places = {}
            for part in _parts(stored, (1, 1)):
                place = self._where.get(module + part.suffix)
                if place is None and part.is_needed:
                    raise ValueError(
                        f"{self._folder} has no tensor {module + part.suffix!r}: quantization_config says "
                        f"{quantisation.summary}, and {codes.name!r} is there, which means nothing without it"
                    )
                if place is not None:
                    places[part.suffix] = place
                    del self._where[module + part.suffix]
            name = module if stored.layout == "mxfp4-blocks" else f"{module}.weight"
            self._linears[name] = _Linear(module, stored, places)

    def _read(
        self, linear: _Linear, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> QuantisedWeight:
        """These rows and columns of a weight of this shape."""
        parts = {part.suffix: part for part in _parts(linear.stored, shape) if part.suffix in linear.places}
        axes = [axis for part in parts.values() for axis in part.axes]
        spans, read = {"rows": rows, "columns": columns}, {}
        for of, size in (("rows", shape[0]), ("columns", shape[1])):
            unit = math.lcm(*(axis.per for axis in axes if axis.of == of))
            start, stop = spans[of]
            read[of] = (start // unit * unit, min(-(-stop // unit) * unit, size))
        (row, row_stop), (column, column_stop) = read["rows"], read["columns"]

        def tensor(suffix: str) -> torch.Tensor | None:
            part = parts.get(suffix)
            return None if part is None else self._sliced(linear, part, shape, read)

        for suffix, needed in _ORDERS.items():
            if (order := tensor(suffix)) is None:
                continue
            group_size, name = linear.stored.group_size or shape[1], linear.places[suffix].name
            num_groups = -(-shape[1] // group_size)
            if linear.stored.is_reordered and not (order.min() >= 0 and order.max() < num_groups):
                raise ValueError(
                    f"tensor {name!r} has a group that is not: numbers from 0 to {num_groups - 1} are needed"
                )
            in_order = torch.arange(column, column_stop, device=self._device) // group_size
            is_unset = suffix == ".weight_g_idx" and bool((order == -1).any())  # which is no order
            if not linear.stored.is_reordered and not is_unset and not torch.equal(order.long(), in_order):
                raise ValueError(
                    f"tensor {name!r} has another order than that of the inputs, and quantization_config does not say "
                    f"so: {needed} is needed"
                )
        weight = decode(linear.stored, (row_stop - row, column_stop - column), tensor)
        weight = weight.rows(slice(rows[0] - row, rows[1] - row))
        return weight.columns(columns[0] - column, columns[1] - column)

    def _sliced(
        self, linear: _Linear, part: _Part, shape: tuple[int, int], read: Mapping[str, tuple[int, int]]
    ) -> torch.Tensor:
        place = linear.places[part.suffix]
        stored = place.file.get_slice(place.name)  # type: ignore[no-untyped-call]
        stored_shape, needed, dtype = tuple(stored.get_shape()), part.shape(shape), stored.get_dtype()
        if dtype not in part.dtypes:
            raise ValueError(f"tensor {place.name!r} has the dtype {dtype}: {', '.join(part.dtypes)} are accepted")
        is_blocks = (  # experts, their outputs, and blocks of inputs, of codes also with 16 bytes of each
            linear.stored.layout == "mxfp4-blocks"
            and math.prod(stored_shape[:2]) == needed[0]
            and stored_shape[2:] in (needed[1:], (needed[1] // 16, 16))
        )
        is_same = [size for size in stored_shape if size != 1] == [size for size in needed if size != 1]
        if not (is_same or is_blocks):
            raise ValueError(
                f"tensor {place.name!r} has shape {stored_shape}: config.json and its quantization_config need {needed}"
            )
        slices = tuple(
            slice(None) if axis.of == "all" else slice(read[axis.of][0] // axis.per, -(-read[axis.of][1] // axis.per))
            for axis in part.axes
        )
        if stored_shape != needed:  # a scale for a tensor or a row, which may have axes of one element more or less
            whole: torch.Tensor = place.file.get_tensor(place.name)  # type: ignore[no-untyped-call]
            return whole.reshape(needed)[slices].to(self._device)
        tensor: torch.Tensor = stored[slices]
        return tensor.to(self._device)


def _module_of(name: str) -> str:
    """The module in the file that a tensor of codes belongs to."""
    return next(name.removesuffix(suffix) for suffix in _CODES if name.endswith(suffix))


_CODES: Final = (".weight_packed", ".qweight", ".weight", "_blocks")
