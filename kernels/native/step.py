"""A step as one program in C++ (`cpp/step.h`): lays out its operations and the arguments of a step."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from functools import singledispatchmethod

import torch

from ..attention import AttentionBatch
from ..huge_pages import zeros_in_huge_pages
from ..step import AddLora, AddNorm, Attend, Embed, Gated, Heads, Linear, Norm, Operation, Program, WriteKV
from .attention import MOST_DIMS, MOST_GROUPED, HostBatch
from .linear import PackedWeight
from .lora import NativeLoraBatch, parts_of

_NUM_FIELDS = 14  # of an operation in cpp/step.h
_KINDS = (Embed, AddNorm, Norm, Linear, AddLora, WriteKV, Attend, Gated)  # in the order of `StepKind`


class NativeStepKernels:
    """`step.StepKernels` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._dtype, self._num_threads = dtype, num_threads
        name = str(dtype).removeprefix("torch.")
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run = library[f"run_step_{name}"]
        self._run.argtypes, self._run.restype = [pointer, number, pointer], None

    def why_not(self, heads: Sequence[Heads]) -> str | None:
        for each in heads:
            if each.head_dim > MOST_DIMS or each.num_heads // each.num_kv_heads > MOST_GROUPED:
                group = each.num_heads // each.num_kv_heads
                return f"heads of {each.head_dim} in groups of {group}: at most {MOST_DIMS} and {MOST_GROUPED}"
        return None

    def prepare(self, program: Program, pool: torch.Tensor) -> NativeStep:
        return NativeStep(program, pool, self._dtype, self._num_threads, self._run)


class NativeStep:
    """`step.Step`."""

    def __init__(
        self,
        program: Program,
        pool: torch.Tensor,
        dtype: torch.dtype,
        num_threads: int,
        run: ctypes._NamedFuncPointer,
    ) -> None:
        assert pool.dtype == dtype and pool.stride(2) == 1, "slabs are contiguous and of the kernels' dtype"
        self._program, self._pool, self._dtype, self._num_threads = program, pool, dtype, num_threads
        self._run = run
        self._groups: dict[tuple[int, ...], int] = {}  # modules that share an input, in the order of `LoraGroup`s
        self._kept: list[torch.Tensor] = []  # copies that operations point to
        rows = [self._encoded(operation) for operation in program.operations]
        self._operations = array("q", [number for row in rows for number in row])
        self._registers: list[torch.Tensor] = []
        self._addresses = array("q")
        self._grow(1)

    def run(self, token_ids: torch.Tensor, attention: AttentionBatch, lora: NativeLoraBatch | None) -> torch.Tensor:
        """See `step.Step`."""
        num_rows = len(token_ids)
        if num_rows > len(self._registers[0]):
            self._grow(num_rows)
        host, pool = HostBatch.make(attention), self._pool
        token_ids = token_ids.to(torch.int64).contiguous()
        assert len(host.positions) == num_rows, "a position for each row"
        groups = array("q")
        if lora is not None:
            for modules in self._groups:
                parts = parts_of(lora, modules)
                groups.extend((parts.table.data_ptr(), len(parts.table), parts.length))
        call = array(
            "q",
            (
                *(self._addresses.buffer_info()[0], num_rows, token_ids.data_ptr()),
                *(host.positions.data_ptr(), host.row_pages.data_ptr(), host.row_slots.data_ptr()),
                *(len(host.page_starts), host.query_starts.data_ptr(), host.context_lens.data_ptr()),
                *(host.pages.data_ptr(), host.page_starts.data_ptr()),
                *(pool.data_ptr(), pool.stride(0), pool.stride(1)),
                *((0, 0, 0) if lora is None else (lora.geometry.slab, lora.pages.data_ptr(), groups.buffer_info()[0])),
                self._num_threads,
            ),
        )
        self._run(self._operations.buffer_info()[0], len(self._program.operations), call.buffer_info()[0])
        return self._registers[self._program.output][:num_rows]

    def _grow(self, num_rows: int) -> None:
        """Registers of at least so many rows. Twice as many as there were, so that they soon stay."""
        num_rows = max(num_rows, 2 * len(self._registers[0]) if self._registers else 64)
        room = zeros_in_huge_pages(num_rows * sum(self._program.widths), self._dtype)
        parts = room.split([num_rows * width for width in self._program.widths])
        self._registers = [part.view(num_rows, -1) for part in parts]
        self._addresses = array("q", [register.data_ptr() for register in self._registers])

    def _encoded(self, operation: Operation) -> list[int]:
        fields = [_KINDS.index(type(operation)), getattr(operation, "x", 0), getattr(operation, "to", 0)]
        fields += self._fields(operation)
        return fields + [0] * (_NUM_FIELDS - len(fields))

    @singledispatchmethod
    def _fields(self, operation: Operation) -> list[int]:
        raise TypeError(f"no such operation: {operation}")

    @_fields.register
    def _(self, op: Embed) -> list[int]:
        return [self._address(op.table), op.table.shape[1], _bits(op.scale)]

    @_fields.register
    def _(self, op: AddNorm) -> list[int]:
        residual = -1 if op.residual is None else op.residual
        return [residual, self._width(op.x), *self._weight(op.weight), _bits(op.eps)]

    @_fields.register
    def _(self, op: Norm) -> list[int]:
        width = self._width(op.x)
        assert op.column + op.count * len(op.weight) <= width, "normed columns are the register's"
        return [width, op.column, op.count, len(op.weight), *self._weight(op.weight), _bits(op.eps)]

    @_fields.register
    def _(self, op: Linear) -> list[int]:
        weight = op.weight
        assert isinstance(weight, PackedWeight), "a weight in the layout of native linears"
        assert (self._width(op.x), self._width(op.to)) == (weight.num_in, weight.num_out), "registers fit the weight"
        bias = 0 if op.bias is None else self._address(op.bias)
        return [self._address(weight.panels), bias, weight.num_in, weight.num_out]

    @_fields.register
    def _(self, op: AddLora) -> list[int]:
        group = self._groups.setdefault(op.modules, len(self._groups))
        return [op.layer, group, self._width(op.x), self._width(op.to)]

    @_fields.register
    def _(self, op: WriteKV) -> list[int]:
        heads = op.heads
        assert op.rotary.dtype == torch.float32, "cosines and sines are float32"
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
        return [self._kv_address(op.kv), self._address(op.rotary), *sizes, *op.kv.stride()[:3]]

    @_fields.register
    def _(self, op: Attend) -> list[int]:
        heads, kv = op.heads, op.kv
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, *kv.stride()[:3], kv.shape[2], op.window or 0)
        return [self._kv_address(kv), *sizes, _bits(op.scale), _bits(op.softcap or 0.0)]

    @_fields.register
    def _(self, op: Gated) -> list[int]:
        return [self._width(op.to), op.activation == "silu"]

    def _width(self, register: int) -> int:
        return self._program.widths[register]

    def _weight(self, weight: torch.Tensor) -> tuple[int, bool]:
        return self._address(weight), weight.dtype == torch.float32

    def _address(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        assert tensor.dtype in (self._dtype, torch.float32), "tensors have the kernels' dtype or float32"
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _kv_address(self, kv: torch.Tensor) -> int:
        assert kv.dtype == self._dtype and kv.stride(-1) == 1, "heads are contiguous and of the kernels' dtype"
        assert kv.stride(3) == kv.shape[4], "the heads of a token lie side by side in its page"
        return kv.data_ptr()


def _bits(number: float) -> int:
    """The bits of a double as an int64."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits
