"""The native CPU kernels against what they replace: bfloat16, one thread, shapes of SmolLM2-135M and Llama-3.2-1B.

The two of a pair are called in turn, and the best time of each counts, so that other programs on the machine disturb
both alike. Pages are in random order, and calls go through the layers of a pool that is larger than the caches, as
steps do. The last line is JSON:

- LoRA on qkv with 64 rows of 64 adapters (ranks 8 to 32): its time over that of the base's product, for a few layers in
  turn and for one layer again and again;
- GB/s of the LoRA of a whole step, read from memory;
- decode attention of 64 sequences with 512 tokens, against index_select + SDPA;
- a layer's linears, read from memory, by number of rows: against oneDNN on weights packed for it, or against torch
  where oneDNN takes no packed weights;
- experts against their plain twin, by number of rows;
- the least ratio of a twin's time over its kernel's, and all ratios below 1.

To measure as on a laptop with AVX2 on a CPU that has more: `--march x86-64-v3`, with ONEDNN_MAX_CPU_ISA=AVX2,
ATEN_CPU_CAPABILITY=avx2 and MKL_ENABLE_INSTRUCTIONS=AVX2 in the environment, so that oneDNN, torch and MKL use no more
than AVX2 either.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from motet.adapters.adapter import MODULES, BaseShape
from motet.adapters.packing.layout import AdapterLayout
from motet.kernels.attention import AttentionBatch, page_table
from motet.kernels.backend import Kernels, Linear, LinearWeight, native_kernels, plain_kernels
from motet.kernels.lora import LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.kernels.native import onednn_linear
from motet.kernels.native.build import load_library
from motet.kernels.norms import ACTIVATIONS, Activation, ClampedSwiglu
from motet.kernels.sampling import Draw, DrawParams
from motet.workers.execution.device_rows import make_inputs
from motet.workers.memory.page_arrays import PoolGeometry, kv_layers, make_pool
from motet.workers.models.rotary import rotary_table
from motet.workers.models.rotary_config import RotaryConfig
from motet.workers.plan import SequencePlan, StepPlan, packed

CPU = torch.device("cpu")
BLOCK_SIZE = 16
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer of a base. The pool has enough layers to be larger than the caches."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    vocab: int
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


SHAPES = (Shape("SmolLM2-135M", 576, 1536, 9, 3, 49152), Shape("Llama-3.2-1B", 2048, 8192, 32, 8, 128256, num_layers=2))


def best_times(calls: dict[str, Call], repetitions: int) -> dict[str, float]:
    """The shortest time of each call, in seconds. Calls are made in turn, after one of each that is not timed."""
    best = dict.fromkeys(calls, float("inf"))
    for repetition in range(repetitions + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repetition:
                best[name] = min(best[name], time.perf_counter() - started)
    return best


class Bench:
    """Prints a line for each pair, and collects the ratios."""

    def __init__(self, repetitions: int, flags: tuple[str, ...] | None = None) -> None:
        self._repetitions = repetitions
        self.over_twin: dict[str, float] = {}
        self.native, self.twin = native_kernels(torch.bfloat16, 1, load_library(flags=flags)), plain_kernels()
        self.both = (self.native, self.twin)

    def against(self, what: str, kernel: Call, other: Call, name: str = "twin") -> float:
        """The time of the other implementation over the kernel's."""
        best = best_times({"kernel": kernel, "other": other}, self._repetitions)
        ratio = best["other"] / best["kernel"]
        times = f"{best['kernel'] * 1e6:10.1f} {best['other'] * 1e6:10.1f}"
        print(f"{what:56} {times} {ratio:8.2f}  {name}", flush=True)
        if name == "twin":
            self.over_twin[what] = round(ratio, 2)
        return ratio


ATTENTION_CASES = {  # (tokens of old KV, new rows) of each sequence
    "decode 64 x 512": [(511, 1)] * 64,
    "decode 16 x 128": [(127, 1)] * 16,
    "decode 1 x 2048": [(2047, 1)],
    "prefill 8 x 60": [(0, 60)] * 8,
    "prefill 1 x 512": [(0, 512)],
    "prefill 256 after 768": [(768, 256)],
}


def attention(bench: Bench, shape: Shape, name: str, generator: torch.Generator) -> float:
    """Times one of ATTENTION_CASES against its twin. Returns the time of index_select + SDPA over the kernel's.

    None: not all sequences decode with the same context, so SDPA cannot compute them together.
    """
    batch, kv = paged_batch(shape, ATTENTION_CASES[name], generator)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    qkv = torch.randn(batch.query_starts[-1], sum(heads), shape.head_dim, generator=generator).bfloat16()
    q, k, v = qkv.split(heads, dim=1)
    rotary = rotary_table(RotaryConfig(10000.0, "default", {}), shape.head_dim, 4096)
    layers, scale = cycle(range(shape.num_layers)), shape.head_dim**-0.5

    def attend(kernels: Kernels) -> torch.Tensor:
        return kernels.paged_attention(q, kv[next(layers)], batch, scale, None)

    def write(kernels: Kernels) -> torch.Tensor:
        return kernels.write_kv(q, k, v, rotary, kv[next(layers)], batch)

    def gathered() -> torch.Tensor:
        table = page_table(batch, torch.arange(len(batch.context_lens)), batch.most_pages)
        pages = kv[next(layers)].index_select(0, table.flatten()).view(len(table), -1, *kv[0].shape[1:])
        keys, values = (pages[:, :, i].flatten(1, 2).transpose(1, 2) for i in (0, 1))
        return scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True)

    what = f"{shape.name} attention {name}"
    bench.against(what, lambda: attend(bench.native), lambda: attend(bench.twin))
    bench.against(f"{shape.name} write KV {name}", lambda: write(bench.native), lambda: write(bench.twin))
    if not name.startswith("decode"):
        return 0.0
    return bench.against(what, lambda: attend(bench.native), gathered, "index_select + SDPA")


def paged_batch(
    shape: Shape, sequences: list[tuple[int, int]], generator: torch.Generator
) -> tuple[AttentionBatch, tuple[torch.Tensor, ...]]:
    """A batch, and its KV by layer, in pages of random order."""
    counts = [-(-(old + new) // BLOCK_SIZE) for old, new in sequences]
    geometry = shape.geometry(sum(counts))
    pool = make_pool(geometry, CPU)
    pool.normal_(generator=generator)
    free = torch.randperm(sum(counts), generator=generator).tolist()
    pages = [tuple(free.pop() for _ in range(count)) for count in counts]
    plans = [
        SequencePlan(i, (0,) * new, old, packed(own), None, None)
        for i, ((old, new), own) in enumerate(zip(sequences, pages, strict=True))
    ]
    batch = make_inputs(StepPlan(1, tuple(plans), (), ()), {}, BLOCK_SIZE, CPU).attention
    return batch, kv_layers(pool, geometry)


LORA_GROUPS = {"qkv": (0, 1, 2), "o": (3,), "gate_up": (4, 5), "down": (6,)}
LORA_CASES = ((64, 1), (16, 4), (1, 64), (1, 1), (1, 512))  # adapters, rows of each
LORA_RANKS = (8, 16, 24, 32)


class LoraBench:
    """64 adapters in pages of random order."""

    def __init__(self, bench: Bench, shape: Shape, generator: torch.Generator) -> None:
        self._bench, self._shape, self._generator = bench, shape, generator
        layout = AdapterLayout(BaseShape(shape.num_layers, shape.sides), shape.geometry(1).slab, "bfloat16")
        self._sides = tuple(shape.sides[module] for module in MODULES)
        self._geometry = LoraGeometry(shape.num_layers, layout.slab, layout.tile, self._sides)
        ranks = [dict.fromkeys(MODULES, LORA_RANKS[i % 4]) for i in range(64)]
        counts = [layout.num_pages(of) for of in ranks]
        self._pool = make_pool(shape.geometry(sum(counts)), CPU)
        self._pool.normal_(0, 0.05, generator=generator)
        free = torch.randperm(sum(counts), generator=generator).tolist()
        self._adapters = []
        for of, count in zip(ranks, counts, strict=True):
            at = layout.offsets(of)
            slices = tuple(ModuleSlice(at[m].rank, at[m].rank, at[m].a, at[m].b) for m in MODULES)
            self._adapters.append(PagedAdapter(tuple(free.pop() for _ in range(count)), slices))

    def against_twin(self, num_adapters: int, rows: int, group: str) -> None:
        what = f"{self._shape.name} LoRA {group}, {num_adapters} x {rows} rows"
        layers = range(self._shape.num_layers)
        native, twin = (self._call(k, num_adapters, rows, group, layers) for k in self._bench.both)
        self._bench.against(what, native, twin)

    def over_base(self, layers: range) -> float:
        """The time of LoRA on qkv, with 64 rows of 64 adapters, over that of the base's product.

        The base's weights may be in the cache; with one layer the adapters may be, too.
        """
        num_out = sum(self._sides[m][1] for m in LORA_GROUPS["qkv"])
        weight = torch.randn(num_out, self._shape.hidden, generator=self._generator).bfloat16()
        x = torch.randn(64, self._shape.hidden, generator=self._generator).bfloat16()
        native, packed = self._bench.native, self._bench.native.pack_linear(weight)
        what = f"{self._shape.name} LoRA qkv, 64 x 1 rows, {len(layers)} layers in turn"
        call = self._call(native, 64, 1, "qkv", layers)
        return 1 / self._bench.against(what, call, lambda: native.linear(x, packed, None), "base")

    def step_from_memory(self) -> float:
        """GB/s of a decode step that reads all layers and modules of 64 adapters, one row each: the best of five."""
        calls = [self._call(self._bench.native, 64, 1, group, range(self._shape.num_layers)) for group in LORA_GROUPS]
        best_s = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(self._shape.num_layers):
                for call in calls:
                    call()
            best_s = min(best_s, time.perf_counter() - started)
        ranks = sum(LORA_RANKS[i % 4] for i in range(64))
        num_bytes = 2 * ranks * self._shape.num_layers * sum(map(sum, self._sides))
        what = f"{self._shape.name} LoRA, a step of {self._shape.num_layers} layers from memory"
        print(f"{what:56} {1e6 * best_s:10.1f} {num_bytes / best_s / 1e9:10.1f} GB/s", flush=True)
        return num_bytes / best_s / 1e9

    def _call(self, kernels: Kernels, num_adapters: int, rows: int, group: str, layers: range) -> Call:
        modules, pool = LORA_GROUPS[group], self._pool
        num_in, num_out = self._sides[modules[0]][0], sum(self._sides[m][1] for m in modules)
        x = torch.randn(num_adapters * rows, num_in, generator=self._generator).bfloat16()
        y = torch.zeros(len(x), num_out, dtype=torch.bfloat16)
        segments = [LoraSegment(i * rows, (i + 1) * rows, self._adapters[i]) for i in range(num_adapters)]
        batch, turn = kernels.lora.prepare(segments, self._geometry, CPU), cycle(layers)

        def call() -> None:
            layer = next(turn)
            kernels.lora.add(y, x, pool, layer, batch, modules)

        return call


CLAMPED = ClampedSwiglu(1.702, 7.0)


def rows(bench: Bench, shape: Shape, num_rows: int, generator: torch.Generator) -> None:
    """Norms, activations and linears."""
    native, twin, weight = bench.native, bench.twin, torch.ones(shape.hidden, dtype=torch.bfloat16)
    x = torch.randn(num_rows, shape.hidden, generator=generator).bfloat16()
    gate_up = torch.randn(num_rows, 2 * shape.intermediate, generator=generator).bfloat16()
    matrix = torch.randn(shape.hidden, shape.hidden, generator=generator).bfloat16()
    packed = native.pack_linear(matrix)
    pairs: dict[str, tuple[Call, Call]] = {
        "norm": (lambda: native.rms_norm(x, weight, 1e-5), lambda: twin.rms_norm(x, weight, 1e-5)),
        "add + norm": (lambda: native.add_rms_norm(x, x, weight, 1e-5), lambda: twin.add_rms_norm(x, x, weight, 1e-5)),
        "add + layer norm": (
            lambda: native.add_layer_norm(x, x, weight, 1e-5),
            lambda: twin.add_layer_norm(x, x, weight, 1e-5),
        ),
        "linear": (lambda: native.linear(x, packed, None), lambda: linear(x, matrix)),
    }
    activations: dict[str, Activation] = {**{name: name for name in ACTIVATIONS}, "clamped_swiglu": CLAMPED}
    for name, activation in activations.items():
        pairs[f"{name} * mul"] = (
            partial(native.gated, gate_up, activation),
            partial(twin.gated, gate_up, activation),
        )
    for name, (kernel, other) in pairs.items():
        bench.against(f"{shape.name} {name}, {num_rows} rows", kernel, other)


DRAWS = {
    "temperature 1": DrawParams(),
    "temperature 0.7, top-p 0.9": DrawParams(temperature=0.7, top_p=0.9),
    "temperature 0.8, top-k 40": DrawParams(temperature=0.8, top_k=40),
}


def draws(bench: Bench, shape: Shape, generator: torch.Generator) -> None:
    """Tokens for 64 rows of logits, the highest and drawn ones."""
    logits, rows = torch.randn(64, shape.vocab, generator=generator) * 4, range(64)
    highest, other = (lambda k=k: k.sampling.highest(logits) for k in bench.both)
    bench.against(f"{shape.name} greedy tokens", highest, other)
    for name, params in DRAWS.items():
        wanted = [Draw(params, row / 64) for row in rows]
        kernel, twin = (lambda k=k, w=wanted: k.sampling.draw(logits, rows, w) for k in bench.both)
        bench.against(f"{shape.name} draws, {name}", kernel, twin)


def linears(bench: Bench, shape: Shape, generator: torch.Generator) -> dict[int, float]:
    """All linears of enough layers to fill no cache, against oneDNN's, by rows."""
    layer = [(shape.sides["q_proj"][0], sum(shape.sides[m][1] for m in ("q_proj", "k_proj", "v_proj")))]
    layer += [shape.sides["o_proj"], (shape.hidden, 2 * shape.intermediate), shape.sides["down_proj"]]
    num_layers = -(-(160 << 20) // (2 * sum(num_in * num_out for num_in, num_out in layer)))
    weights = [torch.randn(out, num_in, generator=generator).bfloat16() for num_in, out in layer * num_layers]
    ours = [bench.native.pack_linear(weight) for weight in weights]
    packs = onednn_linear.can_pack(torch.bfloat16)
    theirs = [onednn_linear.pack_linear(weight) if packs else weight for weight in weights]
    found = {}
    for num_rows in (1, 4, 16, 64, 256):
        inputs = [torch.randn(num_rows, num_in, generator=generator).bfloat16() for num_in, _ in layer] * num_layers

        def all_of(multiply: Linear, packed: list[LinearWeight], inputs: list[torch.Tensor] = inputs) -> None:
            for x, weight in zip(inputs, packed, strict=True):
                multiply(x, weight, None)

        ratio = bench.against(
            f"{shape.name} linears of {num_layers} layers, {num_rows} rows",
            lambda run=all_of: run(bench.native.linear, ours),  # type: ignore[misc]
            lambda run=all_of: run(onednn_linear.linear if packs else linear, theirs),  # type: ignore[misc]
            "oneDNN" if packs else "torch",
        )
        found[num_rows] = round(ratio, 2)
    return found


def experts(bench: Bench, generator: torch.Generator) -> dict[int, float]:
    """Gate and up of a layer of OLMoE-1B-7B: 64 experts, 8 for each row, against a product of each expert, by rows."""
    hidden, width, num_experts, top_k = 2048, 2048, 64, 8
    native, twin = bench.both
    weight = torch.randn(num_experts, width, hidden, generator=generator).bfloat16()
    packed, found = native.pack_experts(weight), {}
    for num_rows in (1, 8, 64, 256):
        chosen = torch.rand(num_rows, num_experts, generator=generator).topk(top_k).indices
        groups = native.experts.group(chosen, torch.ones(num_rows, top_k), 0, num_experts)
        x = torch.randn(num_rows * top_k, hidden, generator=generator).bfloat16()
        ratio = bench.against(
            f"{num_experts} experts, {top_k} for each row, {num_rows} rows",
            lambda x=x, groups=groups: native.experts.linear(x, packed, groups),  # type: ignore[misc]
            lambda x=x, groups=groups: twin.experts.linear(x, weight, groups),  # type: ignore[misc]
        )
        found[num_rows] = round(ratio, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=30, help="of each call (default 30)")
    parser.add_argument("--march", help="what CPU to compile the kernels for (default: this one)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    flags = None if arguments.march is None else (f"-march={arguments.march}",)
    bench, generator = Bench(arguments.repetitions, flags), torch.Generator().manual_seed(0)
    print(f"{'one thread, bfloat16':56} {'kernel us':>10} {'other us':>10} {'ratio':>8}")
    streaming, cached, over_sdpa, over_onednn = {}, {}, {}, {}
    with torch.inference_mode():
        for shape in SHAPES:
            found = {name: attention(bench, shape, name, generator) for name in ATTENTION_CASES}
            over_sdpa[shape.name] = round(found["decode 64 x 512"], 2)
            loras = LoraBench(bench, shape, generator)
            for num_adapters, rows_of_each in LORA_CASES:
                for group in LORA_GROUPS:
                    loras.against_twin(num_adapters, rows_of_each, group)
            streaming[shape.name] = round(loras.over_base(range(shape.num_layers)), 2)
            cached[shape.name] = round(loras.over_base(range(1)), 2)
            for num_rows in (1, 16, 64, 512):
                rows(bench, shape, num_rows, generator)
            draws(bench, shape, generator)
            over_onednn[shape.name] = linears(bench, shape, generator)
        over_each = experts(bench, generator)
        whole = LoraBench(bench, replace(SHAPES[0], num_layers=30), generator)
        step_gb_per_s = round(whole.step_from_memory(), 1)
    results = {
        "benchmark": "kernels_cpu",
        "lora_qkv_64_adapters_time_over_base": streaming,
        "lora_qkv_64_adapters_in_cache_time_over_base": cached,
        "lora_step_from_memory_gb_per_s": step_gb_per_s,
        "decode_attention_over_index_select_sdpa": over_sdpa,
        "linears_over_onednn": over_onednn,
        "experts_over_twin": over_each,
        "least_over_twin": min(bench.over_twin.values()),
        "slower_than_twin": {what: ratio for what, ratio in bench.over_twin.items() if ratio < 1},
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
