"""A step as one program in C++ (`cpp/step.h`): lays out its operations and the arguments of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import singledispatchmethod

import torch

from ..attention import AttentionBatch
from ..huge_pages import zeros_in_huge_pages
from ..lora import PagedAdapter
from ..norms import UNGATED, ClampedSwiglu, Ungated
from ..plain.expert_lora import HostExpertLoraBatch
from ..recurrence import StateBatch
from ..step import (
    Activate,
    Add,
    AddExpertLora,
    AddGated,
    AddLora,
    AddNarrowLora,
    AddNorm,
    Affine,
    Attend,
    ChooseExperts,
    CombinePairs,
    Embed,
    ExpertLinear,
    Gated,
    Heads,
    JoinEmbedding,
    Linear,
    MultiplyGate,
    Norm,
    Operation,
    Program,
    Recur,
    TakePairs,
    WriteKV,
)
from ..windows import as_number
from .attention import MOST_DIMS, MOST_GROUPED, HostBatch
from .build import kernel
from .experts import PackedExperts
from .linear import PackedWeight
from .lora import NativeLoraBatch, NativeOutputBatch, parts_of
from .quantised_linear import PackedBytes, PackedCodes, PackedExpertCodes
from .recurrence import KERNELS, BatchTable, LayerTable, float_bits
from .rows import gated_kernel

_NUM_FIELDS = 15  # of an operation in cpp/step.h
_KINDS = (  # in the order of `StepKind`
    *(Embed, AddNorm, Norm, Linear, AddLora, WriteKV, Attend, Gated),
    *(ChooseExperts, TakePairs, ExpertLinear, AddExpertLora, CombinePairs, AddGated),
    MultiplyGate,
    *KERNELS,  # a `Recur` whose rule it is
    Add,
    JoinEmbedding,
    AddNarrowLora,
    *(PackedBytes, PackedCodes, PackedExpertCodes),  # a `Linear` or an `ExpertLinear` whose weight it is
    Activate,
    Affine,
)


class NativeStepKernels:
    """`step.StepKernels` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._library, self._dtype, self._num_threads = library, dtype, num_threads

    def why_not(self, heads: Sequence[Heads]) -> str | None:
        for each in heads:
            if each.head_dim > MOST_DIMS or each.num_heads // each.num_kv_heads > MOST_GROUPED:
                group = each.num_heads // each.num_kv_heads
                return f"heads of {each.head_dim} in groups of {group}: at most {MOST_DIMS} and {MOST_GROUPED}"
        return None

    def prepare(self, program: Program, pool: torch.Tensor) -> NativeStep:
        return NativeStep(program, pool, self._library, self._dtype, self._num_threads)


class NativeStep:
    """`step.Step`."""

    def __init__(
        self, program: Program, pool: torch.Tensor, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int
    ) -> None:
        assert pool.dtype == dtype and pool.stride(2) == 1, "slabs are contiguous and of the kernels' dtype"
        self._program, self._pool, self._dtype, self._num_threads = program, pool, dtype, num_threads
        self._library, self._run = library, kernel(library, "run_step", "pnp", dtype)
        self._groups: dict[tuple[int, ...], int] = {}  # modules that share an input, in the order of `LoraGroup`s
        self._tensors: list[torch.Tensor] = []  # copies that operations point to
        self._layers: list[LayerTable] = []  # that operations point to
        self._experts: dict[int, tuple[PagedAdapter, array[int]]] = {}  # tables of the last step's, by the adapter's id
        rows = [self._encoded(operation) for operation in program.operations]
        self._operations = array("q", [number for row in rows for number in row])
        self._embedded_width = next(op.table.shape[1] for op in program.operations if isinstance(op, Embed))
        self._registers: list[torch.Tensor] = []
        self._addresses = array("q")
        self._grow(1)

    def run(
        self,
        token_ids: torch.Tensor,
        attention: AttentionBatch,
        lora: NativeLoraBatch | None,
        expert_lora: HostExpertLoraBatch | None = None,
        states: StateBatch | None = None,
        outputs: NativeOutputBatch | None = None,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `step.Step`."""
        assert outputs is None or lora is not None, "adapters that scale outputs are among all adapters"
        num_rows = len(token_ids)
        if num_rows > len(self._registers[0]):
            self._grow(num_rows)
        host, pool = HostBatch.make(attention), self._pool
        token_ids = token_ids.to(torch.int64).contiguous()
        assert len(host.positions) == num_rows, "a position for each row"
        if embedded is not None:
            assert embedded.dtype == self._dtype and embedded.is_contiguous(), "contiguous rows of the kernels' dtype"
            assert embedded.shape == (num_rows, self._embedded_width), "a row for each token"
        groups = array("q")
        if lora is not None:
            for modules in self._groups:
                parts = parts_of(lora, modules)
                scaled = None if outputs is None else outputs.table(modules)
                groups.extend((parts.table.data_ptr(), len(parts.table), parts.length))
                groups.extend((0, 0) if scaled is None else (scaled.data_ptr(), len(scaled)))
        segments, pages = self._expert_segments(expert_lora)
        table = None if states is None else BatchTable(states, pool, num_rows)
        assert table is not None or not self._layers, "layers with states have a batch of them"
        call = array(
            "q",
            (
                *(self._addresses.buffer_info()[0], num_rows, token_ids.data_ptr()),
                *(host.positions.data_ptr(), host.row_pages.data_ptr(), host.row_slots.data_ptr()),
                *(len(host.page_starts), host.query_starts.data_ptr(), host.context_lens.data_ptr()),
                *(host.pages.data_ptr(), host.page_starts.data_ptr()),
                *(pool.data_ptr(), pool.stride(0), pool.stride(1), pool.shape[2]),
                *((0, 0) if lora is None else (lora.pages.data_ptr(), groups.buffer_info()[0])),
                0 if outputs is None else outputs.pages.data_ptr(),
                *(len(segments) // 4, segments.buffer_info()[0], pages.buffer_info()[0]),
                *(self._num_threads, 0 if table is None else table.address),
                0 if embedded is None else embedded.data_ptr(),
            ),
        )
        self._run(self._operations.buffer_info()[0], len(self._program.operations), call.buffer_info()[0])
        return self._registers[self._program.output][:num_rows]

    def _expert_segments(self, batch: HostExpertLoraBatch | None) -> tuple[array[int], array[int]]:
        """The table of `ExpertSegment`s, and the pages of all their adapters."""
        segments, pages = array("q"), array("q")
        if batch is None:
            return segments, pages
        before, self._experts = self._experts, {}
        for segment in batch.segments:
            adapter = segment.adapter
            entry = before.get(id(adapter)) or (adapter, _expert_table(adapter))
            self._experts[id(adapter)] = entry
            segments.extend((segment.start, segment.end, len(pages), entry[1].buffer_info()[0]))
            pages.extend(adapter.pages)
        return segments, pages

    def _grow(self, num_rows: int) -> None:
        """Registers of at least so many rows. Twice as many as there were, so that they soon stay."""
        num_rows = max(num_rows, 2 * len(self._registers[0]) if self._registers else 64)
        room = zeros_in_huge_pages(num_rows * sum(self._program.widths), self._dtype)
        parts = room.split([num_rows * width for width in self._program.widths])
        self._registers = [part.view(num_rows, width) for part, width in zip(parts, self._program.widths, strict=True)]
        self._addresses = array("q", [register.data_ptr() for register in self._registers])

    def _encoded(self, operation: Operation) -> list[int]:
        kind: type = type(operation)
        if isinstance(operation, Linear | ExpertLinear) and isinstance(operation.weight, PackedBytes | PackedCodes):
            kind = type(operation.weight)
        elif isinstance(operation, Recur):
            kind = type(operation.rule)
        fields = [_KINDS.index(kind), getattr(operation, "x", 0), getattr(operation, "to", 0)]
        fields += self._fields(operation)
        return fields + [0] * (_NUM_FIELDS - len(fields))

    @singledispatchmethod
    def _fields(self, operation: Operation) -> list[int]:
        raise TypeError(f"no such operation: {operation}")

    @_fields.register
    def _(self, op: Embed) -> list[int]:
        return [self._address(op.table), op.table.shape[1], float_bits(op.scale)]

    @_fields.register
    def _(self, op: AddNorm) -> list[int]:
        residual = -1 if op.residual is None else op.residual
        return [residual, self._width(op.x), *self._weight(op.weight), float_bits(op.eps), op.is_centred]

    @_fields.register
    def _(self, op: Add) -> list[int]:
        assert self._width(op.x) == self._width(op.to), "registers are as wide"
        return [self._width(op.to), float_bits(op.scale)]

    @_fields.register
    def _(self, op: JoinEmbedding) -> list[int]:
        width = self._width(op.beside)
        assert op.table.dtype == self._dtype and op.table.stride(1) == 1, "rows of the kernels' dtype"
        assert (self._width(op.x), self._width(op.to), op.table.shape[1]) == (width, 2 * width, width), (
            "halves are alike"
        )
        return [op.beside, self._view_address(op.table), op.table.stride(0), width, float_bits(op.scale)]

    @_fields.register
    def _(self, op: Norm) -> list[int]:
        width = self._width(op.x)
        assert op.column + op.count * len(op.weight) <= width, "normed columns are the register's"
        return [width, op.column, op.count, len(op.weight), *self._weight(op.weight), float_bits(op.eps), op.is_centred]

    @_fields.register
    def _(self, op: Affine) -> list[int]:
        parts, width = (op.weight, op.bias), self._width(op.x)
        (count,) = {len(part) for part in parts if part is not None}
        assert op.column + count <= width, "columns are the register's"
        return [width, op.column, count, *(0 if part is None else self._address(part.float()) for part in parts)]

    @_fields.register
    def _(self, op: Linear) -> list[int]:
        weight = op.weight
        assert isinstance(weight, PackedWeight | PackedBytes | PackedCodes), "a weight in a layout of native linears"
        assert (self._width(op.x), self._width(op.to)) == (weight.num_in, weight.num_out), "registers fit the weight"
        bias = 0 if op.bias is None else self._address(op.bias)
        if not isinstance(weight, PackedWeight):
            return self._narrow_fields(weight, bias)
        return [self._address(weight.panels), bias, weight.num_in, weight.num_out]

    def _narrow_fields(self, weight: PackedBytes | PackedCodes, bias: int) -> list[int]:
        self._tensors += [weight.panels, weight.scales]
        panels, sizes = weight.panels.data_ptr(), (weight.num_in, weight.num_out)
        if isinstance(weight, PackedBytes):
            return [panels, weight.scales.data_ptr(), bias, *sizes]
        (scales, exponents), zeros = weight.addresses, 0
        if weight.zeros is not None:
            self._tensors.append(weight.zeros)
            zeros = weight.zeros.data_ptr()
        table = 0 if weight.table is None else self._address(weight.table)
        return [panels, scales, bias, *sizes, exponents, zeros, table, weight.group_size]

    @_fields.register
    def _(self, op: AddLora) -> list[int]:
        group = self._groups.setdefault(op.modules, len(self._groups))
        return [op.layer, group, self._width(op.x), self._width(op.to)]

    @_fields.register
    def _(self, op: AddNarrowLora) -> list[int]:
        group = self._groups.setdefault(op.modules, len(self._groups))
        assert self._width(op.to) <= self._width(op.padded), "the first columns are of the register"
        return [op.layer, group, self._width(op.x), self._width(op.padded), op.padded, self._width(op.to)]

    @_fields.register
    def _(self, op: WriteKV) -> list[int]:
        heads = op.heads
        assert op.rotary.dtype == torch.float32, "cosines and sines are float32"
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
        columns = op.column + (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        assert self._width(op.x) == columns, "q, k and v are the last columns"
        layout = (*op.kv.stride()[:3], op.rotary.shape[1], op.column)
        return [self._kv_address(op.kv), self._address(op.rotary), *sizes, *layout]

    @_fields.register
    def _(self, op: Attend) -> list[int]:
        heads, kv = op.heads, op.kv
        sizes = (
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            *kv.stride()[:3],
            kv.shape[2],
            as_number(op.window),
        )
        sinks = 0 if op.sinks is None else self._address(op.sinks.float())
        return [self._kv_address(kv), *sizes, float_bits(op.scale), float_bits(op.softcap or 0.0), sinks]

    @_fields.register
    def _(self, op: Gated) -> list[int]:
        assert not isinstance(op.activation, Ungated), "an activation of gates"
        width = self._width(op.to) // op.per_row
        assert self._width(op.x) == 2 * width * op.per_row, "gate and up are as wide as their product"
        if isinstance(op.activation, ClampedSwiglu):
            return [width, 0, op.per_row, float_bits(op.activation.alpha), float_bits(op.activation.limit)]
        address = ctypes.cast(gated_kernel(self._library, op.activation, self._dtype), ctypes.c_void_p).value
        assert address is not None, "a function of a loaded library has an address"
        return [width, address, op.per_row]

    @_fields.register
    def _(self, op: ChooseExperts) -> list[int]:
        routing, of_experts = op.routing, (op.bias, op.factors)
        assert all(each is None or each.dtype == torch.float32 for each in of_experts), "scores are float32"
        addresses = [0 if each is None else self._address(each) for each in of_experts]
        numbers = [routing.top_k, routing.is_normalized, routing.scoring == "sigmoid"]
        assert routing.group_best in (1, 2), "the best, or the two best"
        groups = [routing.num_groups, routing.top_groups, routing.group_best]
        return [self._width(op.x), *numbers, *groups, float_bits(routing.scale), float_bits(routing.eps), *addresses]

    @_fields.register
    def _(self, op: TakePairs) -> list[int]:
        assert self._width(op.to) % self._width(op.x) == 0, "a pair is as wide as its row"
        return [self._width(op.x), op.is_scaled]

    @_fields.register
    def _(self, op: CombinePairs) -> list[int]:
        assert self._width(op.x) % self._width(op.to) == 0, "a pair is as wide as its row"
        return [self._width(op.to)]

    @_fields.register
    def _(self, op: ExpertLinear) -> list[int]:
        weight = op.weight
        assert isinstance(weight, PackedExperts | PackedExpertCodes), "weights in a layout of native experts"
        top_k = self._width(op.x) // weight.num_in
        sizes = (top_k * weight.num_in, top_k * weight.num_out)
        assert (self._width(op.x), self._width(op.to)) == sizes, "registers fit the weights"
        bias = 0 if op.bias is None else self._address(op.bias)
        if isinstance(weight, PackedExpertCodes):
            return self._narrow_fields(weight, bias)
        stride = weight.panels.numel() // weight.num_experts
        return [self._address(weight.panels), stride, weight.num_in, weight.num_out, bias]

    @_fields.register
    def _(self, op: AddExpertLora) -> list[int]:
        assert op.modules == tuple(range(op.modules[0], op.modules[-1] + 1)), "modules are neighbours"
        return [op.layer, op.num_modules, op.modules[0], len(op.modules), op.num_in, op.num_out]

    @_fields.register
    def _(self, op: AddGated) -> list[int]:
        assert self._width(op.gate) == 1 and self._width(op.x) == self._width(op.to), "one gate for each row"
        return [op.gate, self._width(op.to)]

    @_fields.register
    def _(self, op: MultiplyGate) -> list[int]:
        width, row = self._width(op.to), self._width(op.gate)
        assert self._width(op.x) == width and op.column + width <= row, "a gate for each column"
        return [op.gate, width, row, op.column]

    @_fields.register
    def _(self, op: Activate) -> list[int]:
        assert self._width(op.x) == self._width(op.to), "one result for each column"
        parameters = map(float_bits, op.activation.parameters)
        return [self._width(op.to), [*UNGATED].index(op.activation.name), *parameters]

    @_fields.register
    def _(self, op: Recur) -> list[int]:
        rule = op.rule
        assert (self._width(op.x), self._width(op.to)) == (rule.width, rule.num_out), "registers fit the rule"
        self._layers.append(LayerTable(rule, op.state))
        return [self._layers[-1].address, rule.width]

    def _width(self, register: int) -> int:
        return self._program.widths[register]

    def _weight(self, weight: torch.Tensor) -> tuple[int, bool]:
        return self._address(weight), weight.dtype == torch.float32

    def _address(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        assert tensor.dtype in (self._dtype, torch.float32), "tensors have the kernels' dtype or float32"
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _view_address(self, tensor: torch.Tensor) -> int:
        """Of rows that need not lie side by side."""
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _kv_address(self, kv: torch.Tensor) -> int:
        assert kv.dtype == self._dtype and kv.stride(-1) == 1, "heads are contiguous and of the kernels' dtype"
        assert kv.stride(3) == kv.shape[4], "the heads of a token lie side by side in its page"
        return kv.data_ptr()


def _expert_table(adapter: PagedAdapter) -> array[int]:
    """`[experts, modules, 4]`: rank, rows of A, and where A and B begin."""
    modules = (module for expert in adapter.experts for module in expert.modules)
    return array("q", [number for at in modules for number in (at.rank, at.a_rows, at.a, at.b)])
