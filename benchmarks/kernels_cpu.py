"""The native CPU kernels against what they replace, at the shapes of SmolLM2-135M and Llama-3.2-1B, bfloat16, one thread.

Each pair is timed in turn, call by call, and the best time of each counts, so that what disturbs the machine disturbs
both. Pools are larger than the caches, and each call reads another layer, as the engine's steps do. One last line of
JSON: LoRA on qkv with 64 rows of 64 adapters (ranks 8 to 32) over the base's product; decode attention (64 sequences,
512 tokens) against index_select + SDPA; the least and each ratio of a twin's time over its kernel's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from motet.adapters.adapter import MODULES, BaseShape
from motet.adapters.layout import AdapterLayout
from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import native_kernels, torch_kernels
from motet.kernels.lora import LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.kernels.native_build import load_library
from motet.workers.execution.inputs import make_inputs
from motet.workers.memory.pool import PoolGeometry, kv_view, make_pool
from motet.workers.models.rotary import RotaryConfig, rotary_table
from motet.workers.scheduling.plan import SequencePlan, StepPlan

CPU = torch.device("cpu")
QKV, OUTPUT, GATE_UP, DOWN = (0, 1, 2), (3,), (4, 5), (6,)
BLOCK_SIZE = 16
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A base's layer; the pool has as many layers as make it larger than the caches."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    num_layers: int = 4

    @property
    def sides(self) -> dict[str, tuple[int, int]]:
        kv = self.num_kv_heads * self.head_dim
        sides = [(self.hidden, self.hidden), (self.hidden, kv), (self.hidden, kv), (self.hidden, self.hidden)]
        wide = [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return dict(zip(MODULES, sides + wide, strict=True))

    def geometry(self, num_pages: int) -> PoolGeometry:
        slab = BLOCK_SIZE * 2 * self.num_kv_heads * self.head_dim
        kv = self.num_kv_heads, self.head_dim
        return PoolGeometry(num_pages, self.num_layers, slab, BLOCK_SIZE, *kv, torch.bfloat16)


SHAPES = (Shape("SmolLM2-135M", 576, 1536, 9, 3), Shape("Llama-3.2-1B", 2048, 8192, 32, 8, num_layers=2))


def best_times(calls: dict[str, Call], repetitions: int) -> dict[str, float]:
    """The shortest time of each in seconds, taken in turn; each is called once before."""
    best = dict.fromkeys(calls, float("inf"))
    for repetition in range(repetitions + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repetition:
                best[name] = min(best[name], time.perf_counter() - started)
    return best


class Bench:
    """Prints a line for each pair and keeps its ratio."""

    def __init__(self, repetitions: int) -> None:
        self._repetitions = repetitions
        self.over_twin: dict[str, float] = {}
        library = load_library(1)
        self.native, self.twin = native_kernels(torch.bfloat16, 1, library), torch_kernels()

    def against(self, what: str, kernel: Call, other: Call, name: str = "twin") -> float:
        """The other's time over the kernel's."""
        best = best_times({"kernel": kernel, "other": other}, self._repetitions)
        ratio = best["other"] / best["kernel"]
        times = f"{best['kernel'] * 1e6:10.1f} {best['other'] * 1e6:10.1f}"
        print(f"{what:56} {times} {ratio:8.2f}  {name}", flush=True)
        if name == "twin":
            self.over_twin[what] = round(ratio, 2)
        return ratio


def attention(bench: Bench, shape: Shape, generator: torch.Generator) -> float:
    """All of attention; gives what decode at 512 tokens is over index_select + SDPA."""
    over_sdpa = 0.0
    cases = {
        "decode 64 x 512": [(511, 1)] * 64,
        "decode 16 x 128": [(127, 1)] * 16,
        "decode 1 x 2048": [(2047, 1)],
        "prefill 8 x 60": [(0, 60)] * 8,
        "prefill 1 x 512": [(0, 512)],
        "prefill 256 after 768": [(768, 256)],
    }
    for name, sequences in cases.items():
        batch, kv, table = _paged(shape, sequences, generator)
        num_rows, scale = batch.query_starts[-1], shape.head_dim**-0.5
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        qkv = torch.randn(num_rows, sum(heads), shape.head_dim, generator=generator).bfloat16()
        q, k, v = qkv.split(heads, dim=1)
        rotary = rotary_table(RotaryConfig(10000.0, "default", {}), shape.head_dim, 4096)
        layers = cycle(range(shape.num_layers))

        def attend(kernels: object, q=q, kv=kv, batch=batch, scale=scale, layers=layers) -> object:
            return kernels.paged_attention(q, kv[:, next(layers)], batch, scale, None)  # type: ignore[attr-defined]

        def write(kernels: object, q=q, k=k, v=v, rotary=rotary, kv=kv, batch=batch, layers=layers) -> object:
            return kernels.write_kv(q, k, v, rotary, kv[:, next(layers)], batch)  # type: ignore[attr-defined]

        def gathered(q=q, kv=kv, table=table, shape=shape, layers=layers) -> object:
            pages = kv[:, next(layers)].index_select(0, table.flatten()).view(len(table), -1, *kv.shape[2:])
            keys, values = (pages[:, :, i].flatten(1, 2).transpose(1, 2) for i in (0, 1))
            grouped = q.unsqueeze(2)  # [sequences, heads, 1, dim]
            return scaled_dot_product_attention(grouped, keys, values, enable_gqa=True)

        bench.against(f"{shape.name} attention {name}", lambda: attend(bench.native), lambda: attend(bench.twin))
        bench.against(f"{shape.name} write KV {name}", lambda: write(bench.native), lambda: write(bench.twin))
        if name == "decode 64 x 512":
            over_sdpa = bench.against(
                f"{shape.name} attention {name}", lambda: attend(bench.native), gathered, "index_select + SDPA"
            )
    return over_sdpa


def _paged(
    shape: Shape, sequences: list[tuple[int, int]], generator: torch.Generator
) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
    """A batch with its KV in pages of random order; and the page table of its sequences."""
    counts = [-(-(old + new) // BLOCK_SIZE) for old, new in sequences]
    geometry = shape.geometry(sum(counts))
    pool = make_pool(geometry, CPU)
    pool.normal_(generator=generator)
    free = torch.randperm(sum(counts), generator=generator).tolist()
    pages = [tuple(free.pop() for _ in range(count)) for count in counts]
    plans = [
        SequencePlan(i, (0,) * new, old, own, None, None)
        for i, ((old, new), own) in enumerate(zip(sequences, pages, strict=True))
    ]
    batch = make_inputs(StepPlan(1, tuple(plans), (), ()), {}, BLOCK_SIZE, CPU).attention
    return batch, kv_view(pool, geometry), batch.page_table


def lora(bench: Bench, shape: Shape, generator: torch.Generator) -> float:
    """Mixed adapters; gives what LoRA on qkv with 64 rows of 64 adapters takes over the base's product."""
    over_base = float("inf")
    layout = AdapterLayout(BaseShape(shape.num_layers, shape.sides), shape.geometry(1).slab, "bfloat16")
    sides = tuple(shape.sides[module] for module in MODULES)
    geometry = LoraGeometry(shape.num_layers, layout.slab, layout.tile, sides)
    ranks = [(8, 16, 24, 32)[i % 4] for i in range(64)]
    counts = [layout.num_pages(dict.fromkeys(MODULES, rank)) for rank in ranks]
    pool = make_pool(shape.geometry(sum(counts)), CPU)
    pool.normal_(0, 0.05, generator=generator)
    free = torch.randperm(sum(counts), generator=generator).tolist()
    adapters = []
    for rank, count in zip(ranks, counts, strict=True):
        at = layout.offsets(dict.fromkeys(MODULES, rank))
        slices = tuple(ModuleSlice(at[m].rank, at[m].a_rows, at[m].a, at[m].b) for m in MODULES)
        adapters.append(PagedAdapter(tuple(free.pop() for _ in range(count)), slices))
    layers = cycle(range(shape.num_layers))
    for num_adapters, rows in ((64, 1), (16, 4), (1, 64), (1, 1), (1, 512)):
        segments = [LoraSegment(i * rows, (i + 1) * rows, adapters[i]) for i in range(num_adapters)]
        for name, modules in (("qkv", QKV), ("o", OUTPUT), ("gate_up", GATE_UP), ("down", DOWN)):
            x = torch.randn(num_adapters * rows, sides[modules[0]][0], generator=generator).bfloat16()
            num_out = sum(sides[m][1] for m in modules)
            y = torch.zeros(len(x), num_out, dtype=torch.bfloat16)
            prepared = {id(k): k.lora.prepare(segments, geometry, CPU) for k in (bench.native, bench.twin)}

            def add(kernels, x=x, y=y, modules=modules, prepared=prepared) -> None:  # type: ignore[no-untyped-def]
                layer, batch = next(layers), prepared[id(kernels)]
                shrunk = kernels.lora.shrink(x, pool, layer, batch, modules).unsqueeze(0)
                kernels.lora.expand(y, shrunk, pool, layer, batch, modules)

            what = f"{shape.name} LoRA {name}, {num_adapters} x {rows} rows"
            bench.against(what, lambda: add(bench.native), lambda: add(bench.twin))
            if (num_adapters, rows, name) == (64, 1, "qkv"):
                weight = torch.randn(num_out, x.shape[1], generator=generator).bfloat16()
                packed = [bench.native.pack_linear(weight.clone()) for _ in range(8)]
                weights = cycle(packed)
                base = bench.against(
                    what, lambda: add(bench.native), lambda x=x: bench.native.linear(x, next(weights), None), "base"
                )
                over_base = 1 / base
    return over_base


def rows(bench: Bench, shape: Shape, generator: torch.Generator) -> None:
    """Norms, activations and linears."""
    weight = torch.ones(shape.hidden, dtype=torch.bfloat16)
    for num_rows in (1, 16, 64, 512):
        x = torch.randn(num_rows, shape.hidden, generator=generator).bfloat16()
        gate_up = torch.randn(num_rows, 2 * shape.intermediate, generator=generator).bfloat16()
        matrix = torch.randn(shape.hidden, shape.hidden, generator=generator).bfloat16()
        packed, native, twin = bench.native.pack_linear(matrix), bench.native, bench.twin
        pairs: dict[str, tuple[Call, Call]] = {
            "norm": (lambda: native.rms_norm(x, weight, 1e-5), lambda: twin.rms_norm(x, weight, 1e-5)),
            "add + norm": (
                lambda: native.add_rms_norm(x, x, weight, 1e-5),
                lambda: twin.add_rms_norm(x, x, weight, 1e-5),
            ),
            "silu * mul": (lambda: native.silu_mul(gate_up), lambda: twin.silu_mul(gate_up)),
            "gelu * mul": (lambda: native.gelu_tanh_mul(gate_up), lambda: twin.gelu_tanh_mul(gate_up)),
            "linear": (lambda: native.linear(x, packed, None), lambda: linear(x, matrix)),
        }
        for name, (kernel, other) in pairs.items():
            bench.against(f"{shape.name} {name}, {num_rows} rows", kernel, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=30, help="of each call (default 30)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench, generator = Bench(arguments.repetitions), torch.Generator().manual_seed(0)
    print(f"{'one thread, bfloat16':56} {'kernel us':>10} {'other us':>10} {'ratio':>8}")
    over_base, over_sdpa = {}, {}
    for shape in SHAPES:
        with torch.inference_mode():
            over_sdpa[shape.name] = round(attention(bench, shape, generator), 2)
            over_base[shape.name] = round(lora(bench, shape, generator), 3)
            rows(bench, shape, generator)
    results = {
        "benchmark": "kernels_cpu",
        "lora_qkv_64_adapters_time_over_base": over_base,
        "decode_attention_over_index_select_sdpa": over_sdpa,
        "least_over_twin": min(bench.over_twin.values()),
        "slower_than_twin": {what: ratio for what, ratio in bench.over_twin.items() if ratio < 1},
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
