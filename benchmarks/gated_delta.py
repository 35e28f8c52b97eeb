"""Native Gated DeltaNet, a layer of Qwen3-Next: 16 key heads, 32 value heads of 128 x 128, bfloat16.

States of decodes lie in pages of random order, as in a worker. The last line is JSON:

- a prompt of 4,096 rows: milliseconds, and the time of the plain twin over it;
- a decode of 1, 8 and 64 sequences: GB/s of states, read and written, and the time of the plain twin over the kernel's;
- beside these what the machine reads and writes: GB/s of torch's `mul_` in place, on as much as 64 sequences have.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from motet.kernels.backend import Kernels, native_kernels, plain_kernels
from motet.kernels.gated_delta import GatedDelta
from motet.kernels.huge_pages import zeros_in_huge_pages
from motet.kernels.native.build import load_library
from motet.kernels.recurrence import LayerState, StateBatch

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
DECODES = (1, 8, 64)
PROMPT = 4096
HEAD = 2 * DIM * DIM  # bfloat16 elements of a head's state in float32


class Layer:
    """One layer with the states of as many sequences as decode at most."""

    def __init__(self, generator: torch.Generator) -> None:
        channels = (2 * KEY_HEADS + VALUE_HEADS) * DIM
        self.delta = GatedDelta(
            conv=(0.3 * torch.randn(channels, 4, generator=generator)).bfloat16(),
            decay=-4 * torch.rand(VALUE_HEADS, generator=generator),
            dt_bias=torch.randn(VALUE_HEADS, generator=generator),
            norm=torch.ones(DIM),
            eps=1e-6,
            num_key_heads=KEY_HEADS,
            num_value_heads=VALUE_HEADS,
            key_dim=DIM,
            value_dim=DIM,
        )
        heads = torch.arange(VALUE_HEADS, dtype=torch.int32)
        self.state = LayerState(0 * heads, heads * (HEAD // 2), 0, VALUE_HEADS * HEAD)
        num_pages, page = max(DECODES), VALUE_HEADS * HEAD + 3 * channels
        self.pool = zeros_in_huge_pages(num_pages * page, torch.bfloat16).view(num_pages, 1, page)
        self._pages = torch.randperm(num_pages, generator=generator, dtype=torch.int32)[:, None]
        self._generator = generator

    def call(self, kernels: Kernels, num_sequences: int, num_rows: int) -> Callable[[], torch.Tensor]:
        """Computes so many rows of each of so many sequences."""
        numbers, pages = torch.arange(num_sequences + 1, dtype=torch.int32), self._pages[:num_sequences].clone()
        is_fresh = torch.zeros(num_sequences, dtype=torch.bool)
        batch = StateBatch(numbers * num_rows, numbers, pages, pages, is_fresh)
        x = torch.randn(num_sequences * num_rows, self.delta.width, generator=self._generator).bfloat16()
        return lambda: kernels.recur(x, self.delta, self.pool, self.state, batch)


def best_s(call: Callable[[], object], repetitions: int) -> float:
    """The shortest time of a call, in seconds, after one that is not timed where there are many."""
    times = []
    for _ in range(repetitions + (repetitions > 1)):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times[repetitions > 1 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=30, help="of each decode (default 30)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--march", help="what CPU to compile the kernels for (default: this one)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    flags = None if arguments.march is None else (f"-march={arguments.march}",)
    native = native_kernels(torch.bfloat16, arguments.threads, load_library(flags=flags))
    twin, layer = plain_kernels(), Layer(torch.Generator().manual_seed(0))
    gb_per_s, over_twin = {}, {}
    for count in DECODES:
        taken_s = best_s(layer.call(native, count, 1), arguments.repetitions)
        gb_per_s[count] = round(2 * 2 * count * VALUE_HEADS * HEAD / taken_s / 1e9, 1)
        over_twin[count] = round(best_s(layer.call(twin, count, 1), 3) / taken_s, 1)
        print(
            f"decode of {count:2}: {taken_s * 1e6:8.0f} us, {gb_per_s[count]} GB/s, twin {over_twin[count]}", flush=True
        )
    memory = layer.pool.view(torch.float32).flatten()
    machine = round(2 * memory.nbytes / best_s(lambda: memory.mul_(1.0), arguments.repetitions) / 1e9, 1)
    prompt_s = best_s(layer.call(native, 1, PROMPT), max(arguments.repetitions // 10, 1))
    prompt_over_twin = best_s(layer.call(twin, 1, PROMPT), 1) / prompt_s
    print(f"prompt of {PROMPT}: {prompt_s * 1e3:.0f} ms, twin {prompt_over_twin:.1f}; the machine {machine} GB/s")
    results = {
        "benchmark": "gated_delta",
        "threads": arguments.threads,
        "prompt_ms": round(prompt_s * 1e3, 1),
        "prompt_over_twin": round(prompt_over_twin, 1),
        "decode_gb_per_s": gb_per_s,
        "decode_over_twin": over_twin,
        "machine_gb_per_s": machine,
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
