"""LoRA over pages: checked against float64, timed against its floor and against gathering plus batched products."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from motet.adapters.adapter import MODULES, BaseShape
from motet.adapters.packing.layout import AdapterLayout
from motet.benchmarks.gpu.machine import Machine, Row, relative_error
from motet.kernels.backend import Kernels
from motet.kernels.lora import LoraBatch, LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
GROUPS = {"qkv": (0, 1, 2), "o": (3,), "gate+up": (4, 5), "down": (6,)}
LLAMA = (4096, 1024, 14336, 32768)  # hidden, K or V, intermediate, slab
TINY = (64, 32, 96, 256)


class LoraCase:
    """Adapters in pages of random order; everything else in the pool is NaN. Weights are as large as trained ones."""

    def __init__(
        self, machine: Machine, ranks: Sequence[int], sizes: tuple[int, int, int, int], num_layers: int, seed: int
    ) -> None:
        hidden, kv, wide, slab = sizes
        sides = dict.fromkeys(MODULES, (hidden, hidden))
        sides |= {
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
        }
        sides["down_proj"] = (wide, hidden)
        layout = AdapterLayout(BaseShape(num_layers, sides), slab, "bfloat16")
        self.sides = tuple(sides[module] for module in MODULES)
        self.geometry = LoraGeometry(num_layers, slab, layout.tile, self.sides)
        counts = [layout.num_pages(dict.fromkeys(MODULES, rank)) for rank in ranks]
        free = list(range(sum(counts) + 5))
        random.Random(seed).shuffle(free)
        generator = torch.Generator(machine.device).manual_seed(seed)
        self.pool = torch.full((len(free), num_layers, slab), torch.nan, dtype=machine.dtype, device=machine.device)
        self.adapters = []
        for rank, count in zip(ranks, counts, strict=True):
            pages = tuple(free.pop() for _ in range(count))
            content = torch.randn(
                (count, num_layers, slab), dtype=machine.dtype, device=machine.device, generator=generator
            )
            self.pool[torch.tensor(pages, device=machine.device)] = content * 0.05
            at = layout.offsets(dict.fromkeys(MODULES, rank))
            slices = tuple(ModuleSlice(at[m].rank, at[m].rank, at[m].a, at[m].b) for m in MODULES)
            self.adapters.append(PagedAdapter(pages, slices))

    def matrices(self, adapter: PagedAdapter, module: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A `[rank, in]` and B `[rank, out]`, copied out of the pages."""
        array = self.pool[torch.tensor(adapter.pages, device=self.pool.device), layer].flatten()
        at, (num_in, num_out) = adapter.modules[module], self.sides[module]
        a, b = array[at.a : at.a + at.rank * num_in], array[at.b : at.b + at.rank * num_out]
        return a.view(at.rank, num_in), b.view(at.rank, num_out)

    def reference(
        self, x: torch.Tensor, y: torch.Tensor, segments: Sequence[LoraSegment], modules: tuple[int, ...], layer: int
    ) -> torch.Tensor:
        """What is added, in float64."""
        added, column = torch.zeros(y.shape, dtype=torch.float64, device=y.device), 0
        for module in modules:
            width = self.sides[module][1]
            for segment in segments:
                a, b = self.matrices(segment.adapter, module, layer)
                rows = slice(segment.start, segment.end)
                added[rows, column : column + width] = x[rows].double() @ a.double().t() @ b.double()
            column += width
        return added


def check_lora(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """Ranks 1 to 256 mixed, rows of the base between, segments short and long."""
    ranks = [1, 8, 16, 33, 64, 256] if not machine.is_dry else [1, 8, 17]
    case = LoraCase(machine, ranks, TINY if machine.is_dry else LLAMA, 2, random.randrange(1 << 30))
    for lengths in ((1, 2, 3, 1, 7, 4), (1, 300, 64, 5, 65, 17)):
        segments, start = [], 2  # the first rows are the base's
        for adapter, length in zip(case.adapters, lengths, strict=False):
            segments.append(LoraSegment(start, start + length, adapter))
            start += length + 1
        for name, modules in GROUPS.items():
            error = _error(machine, kernels, case, segments, modules, start)
            yield Row("LoRA", f"{name}, mixed ranks, {start} rows", error, TOLERANCE[machine.dtype])


def time_lora(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """Rank 16 on Llama-3-8B. The floor is x and the adapters read, y read and written."""
    counts = [(1, 1), (64, 8), (64, 64), (2048, 1)] if not machine.is_dry else [(4, 2)]
    layers = 4 if not machine.is_dry else 1
    sizes = TINY if machine.is_dry else LLAMA
    case = LoraCase(machine, [16] * max(count for _, count in counts), sizes, layers, 7)
    for rows, count in counts:
        share = rows // count
        segments = [LoraSegment(i * share, (i + 1) * share, case.adapters[i]) for i in range(count)]
        batch = kernels.lora.prepare(segments, case.geometry, machine.device)
        total_s, total_floor_s, total_other_s = 0.0, 0.0, 0.0
        for name, modules in GROUPS.items():
            error = _error(machine, kernels, case, segments, modules, rows)
            num_in, num_out = case.sides[modules[0]][0], sum(case.sides[m][1] for m in modules)
            x = torch.randn(rows, num_in, dtype=machine.dtype, device=machine.device)
            y = torch.randn(rows, num_out, dtype=machine.dtype, device=machine.device)

            def call(
                layer: int,
                x: torch.Tensor = x,
                y: torch.Tensor = y,
                batch: LoraBatch = batch,
                modules: tuple[int, ...] = modules,
            ) -> None:
                shrunk = kernels.lora.shrink(x, case.pool, layer, batch, modules).unsqueeze(0)
                kernels.lora.expand(y, shrunk, case.pool, layer, batch, modules)

            time_s = machine.time_s([lambda layer=layer, call=call: call(layer) for layer in range(layers)])  # type: ignore[misc]
            weights = count * 16 * sum(sum(case.sides[m]) for m in modules)
            num_bytes = (weights + x.numel() + 2 * y.numel()) * x.element_size()
            flops = 2 * rows * 16 * sum(sum(case.sides[m]) for m in modules)
            floor_s, others = machine.floor_s(num_bytes, flops), {}
            other_s = _bmm_time_s(machine, case, modules, x, y, count) if share == 1 else None
            if other_s is not None:
                others["stacked A, B and bmm"] = other_s
                total_other_s += other_s
            what = f"{name}, {rows} rows, {count} adapters"
            yield Row("LoRA", what, error, TOLERANCE[machine.dtype], time_s, floor_s, others)
            total_s, total_floor_s = total_s + (time_s or 0.0), total_floor_s + (floor_s or 0.0)
        if not machine.is_dry:
            others = {"stacked A, B and bmm": total_other_s} if total_other_s else {}
            yield Row("LoRA", f"a layer, {rows} rows, {count} adapters", None, None, total_s, total_floor_s, others)


def _error(
    machine: Machine,
    kernels: Kernels,
    case: LoraCase,
    segments: Sequence[LoraSegment],
    modules: tuple[int, ...],
    rows: int,
) -> float:
    """Of what is added; y's own rounding is taken out by starting from zeros, and untouched rows must stay so."""
    x = torch.randn(rows, case.sides[modules[0]][0], dtype=machine.dtype, device=machine.device)
    y = torch.zeros(rows, sum(case.sides[m][1] for m in modules), dtype=machine.dtype, device=machine.device)
    batch = kernels.lora.prepare(segments, case.geometry, machine.device)
    shrunk = kernels.lora.shrink(x, case.pool, 0, batch, modules).unsqueeze(0)
    kernels.lora.expand(y, shrunk, case.pool, 0, batch, modules)
    return relative_error(y, case.reference(x, y, segments, modules, 0))


def _bmm_time_s(
    machine: Machine, case: LoraCase, modules: tuple[int, ...], x: torch.Tensor, y: torch.Tensor, count: int
) -> float | None:
    """Times the way without special kernels: each row's matrices gathered from stacked slots, two batched products."""
    if machine.is_dry:
        return None
    slots = torch.arange(count, device=x.device)
    held = [
        (
            torch.randn(count, case.sides[m][0], 16, dtype=x.dtype, device=x.device),
            torch.randn(count, 16, case.sides[m][1], dtype=x.dtype, device=x.device),
        )
        for m in modules
    ]

    def call() -> None:
        column = 0
        for a, b in held:
            width = b.shape[2]
            y[:, column : column + width] += torch.bmm(torch.bmm(x.unsqueeze(1), a[slots]), b[slots]).squeeze(1)
            column += width

    return machine.time_s([call, call])
