"""FlashAttention (arXiv 2205.14135): memory, time, deviation and accesses to memory of attention over a whole prompt.

motet's native kernel, on pages of 16 tokens in random order, beside standard attention, which stores all scores, and
torch's fused attention. bfloat16, one thread, 9 heads of 64 elements that share 3 KV heads (SmolLM2-135M). Memory is
what the process grows by at most, the result included, in a fresh process for each length. Accesses are counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from motet.benchmarks.kernels_cpu import SHAPES, best_times, paged_batch
from motet.kernels.attention import page_table
from motet.kernels.backend import native_kernels, plain_kernels
from motet.kernels.native.build import load_library

Attend = Callable[[], torch.Tensor]
SHAPE = SHAPES[0]
SCALE = SHAPE.head_dim**-0.5
GROUP = SHAPE.num_heads // SHAPE.num_kv_heads
RESULT_BYTES = 2 * SHAPE.num_heads * SHAPE.head_dim  # of a token
LENGTHS = (1024, 4096, 8192)
LONGEST = 65536
CONTEXTS, NEW_ROWS = (128, 1024, 4096), 32  # of the deviations
NUM_QUERIES = 64  # that read a key together: kMostQueries of kernels/cpp/attention.h, on CPUs with AMX
CACHE_ELEMENTS = 2 << 19  # 2 MiB, as the second level of many servers' cores
# Of the paper's figure 2: GPT-2 medium, forward and backward, on an A100, whose SMs have 192 KiB each.
GPT_TOKENS, GPT_DIM, GPT_HEADS, SRAM_ELEMENTS = 1024, 64, 16 * 64, 192 * 1024 // 2
PUBLISHED_GB = {"standard": 40.3, "flash": 4.4}


class Prompt:
    """The last `num_rows` of `context` tokens, ready for each implementation."""

    def __init__(self, context: int, num_rows: int, key_scale: float = 1.0) -> None:
        """`key_scale`: every eighth page of keys is multiplied with it, as some keys are larger than others."""
        generator = torch.Generator().manual_seed(0)
        self.batch, layers = paged_batch(SHAPE, [(context - num_rows, num_rows)], generator)
        self.kv = layers[0]
        self.kv[::8, 0].mul_(key_scale)
        self.q = torch.randn(num_rows, SHAPE.num_heads, SHAPE.head_dim, generator=generator).bfloat16()
        self.native, self.plain = native_kernels(torch.bfloat16, 1, load_library()), plain_kernels()
        self._context = context

    def ours(self) -> torch.Tensor:
        return self.native.paged_attention(self.q, self.kv, self.batch, SCALE, None)

    def twin(self) -> torch.Tensor:
        return self.plain.paged_attention(self.q, self.kv, self.batch, SCALE, None)

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, `[heads, tokens, dim]`: KV heads are repeated."""
        table = page_table(self.batch, torch.arange(1), self.batch.most_pages)
        pages = self.kv.index_select(0, table.flatten())
        k, v = (
            pages[:, side].flatten(0, 1)[: self._context].repeat_interleave(GROUP, 1).transpose(0, 1).contiguous()
            for side in (0, 1)
        )
        return self.q.transpose(0, 1).contiguous(), k, v

    def standard(self, dtype: torch.dtype = torch.bfloat16) -> Attend:
        """All in this dtype, as eager PyTorch computes it."""
        q, k, v = (each.to(dtype) for each in self.contiguous())
        unseen = torch.ones(len(self.q), self._context, dtype=torch.bool).triu_(1 + self._context - len(self.q))
        return lambda: (((q @ k.transpose(1, 2)) * SCALE).masked_fill_(unseen, -torch.inf).softmax(-1) @ v).transpose(
            0, 1
        )

    def fused(self) -> Attend:
        """torch's, for whole prompts."""
        q, k, v = (each.unsqueeze(0) for each in self.contiguous())
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)


def memory_and_time(name: str, num_tokens: int) -> tuple[float, float]:
    """MB that this process grows by at most while it attends to a prompt of so many tokens, and seconds."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        Prompt(64, 64).ours()  # loads the library
        prompt = Prompt(num_tokens, num_tokens)
        call = {"ours": lambda: prompt.ours, "standard": prompt.standard, "fused": prompt.fused}[name]()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began_s = _resident_kb("VmRSS"), time.perf_counter()
        call()
        return (_resident_kb("VmHWM") - before) / 1024, time.perf_counter() - began_s


def _resident_kb(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def in_fresh_process(name: str, num_tokens: int) -> tuple[float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(memory_and_time, (name, num_tokens))


def times(num_tokens: int, repetitions: int) -> dict[str, float]:
    """Seconds of each, in turn; the best counts."""
    prompt = Prompt(num_tokens, num_tokens)
    calls: dict[str, Callable[[], object]] = {
        "ours": prompt.ours,
        "standard": prompt.standard(),
        "fused": prompt.fused(),
    }
    return best_times(calls, repetitions)


def deviations(context: int, key_scale: float) -> dict[str, float]:
    """Relative errors in bfloat16 against float64, of the same bfloat16 inputs."""
    prompt = Prompt(context, NEW_ROWS, key_scale)
    exact = prompt.standard(torch.float64)()
    found = {"ours": prompt.ours(), "twin": prompt.twin(), "standard": prompt.standard()()}
    return {name: float((each.double() - exact).norm() / exact.norm()) for name, each in found.items()}


def standard_accesses(num_tokens: int, dim: int, with_backward: bool = False) -> int:
    """Elements of one head that the paper's algorithms 0 and 3 read and write: scores and weights are stored."""
    pairs, rows = (11, 12) if with_backward else (4, 4)
    return pairs * num_tokens**2 + rows * num_tokens * dim


def flash_accesses(num_tokens: int, dim: int, sram_elements: int, with_backward: bool = False) -> int:
    """The same of its algorithms 1 and 4, Θ(N² d² / M): each block of keys passes over all queries.

    A pass reads queries, results and two statistics of each query, and writes all but the queries. Backward it reads
    those and the gradient of the results too, and adds to that of the queries.
    """
    num_passes = ceil(num_tokens / ceil(sram_elements / (4 * dim)))
    found = 2 * num_tokens * dim + num_passes * num_tokens * (3 * dim + 4)
    if with_backward:
        found += 4 * num_tokens * dim + num_passes * num_tokens * (5 * dim + 2)
    return found


def our_accesses(num_tokens: int, cache_elements: int) -> int:
    """Elements of all heads that motet's kernel reads from memory and writes to it, forward.

    It goes the other way round: 64 queries of a group of heads stay, and pass once over the keys that they see. Passes
    read keys and values from the cache if those of a head fit into it.
    """
    num_rows, of_token = max(1, NUM_QUERIES // GROUP), 2 * SHAPE.head_dim
    seen = sum(min(first + num_rows, num_tokens) for first in range(0, num_tokens, num_rows))
    read = num_tokens if num_tokens * of_token <= cache_elements else seen
    return (num_tokens * SHAPE.num_heads + read * SHAPE.num_kv_heads) * of_token


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2, help="of each timed call (default 2)")
    parser.add_argument(
        "--longest", type=int, default=LONGEST, help=f"prompt of the memory's table (default {LONGEST})"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="prompts that are timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    timed = max(arguments.lengths)
    print(f"{'tokens':>7} {'memory':>9} MB beside inputs, and s of the only call")
    memory = {}
    for name, lengths in (("ours", (timed // 8, timed, arguments.longest)), ("standard", (timed // 8, timed))):
        for num_tokens in lengths:
            memory[name, num_tokens], seconds = in_fresh_process(name, num_tokens)
            print(f"{num_tokens:7} {name:>9} {memory[name, num_tokens]:9.1f} {seconds:8.2f}", flush=True)
    print(f"\n{'tokens':>7} {'ours, s':>9} {'standard':>9} {'fused':>9}; the others over ours")
    over = {}
    with torch.inference_mode():
        for num_tokens in arguments.lengths:
            found = times(num_tokens, arguments.repetitions)
            over[num_tokens] = {name: found[name] / found["ours"] for name in ("standard", "fused")}
            ratios = "  ".join(f"{ratio:.2f}" for ratio in over[num_tokens].values())
            print(f"{num_tokens:7} " + " ".join(f"{seconds:9.4f}" for seconds in found.values()) + f"  {ratios}")
        print(f"\n{'context':>7} {'keys':>9} deviation from float64: ours, standard, its twin; ours over standard")
        deviation = []
        for name, key_scale in (("alike", 1.0), ("some x 3", 3.0)):
            for context in CONTEXTS:
                errors = deviations(context, key_scale)
                deviation.append(errors["ours"] / errors["standard"])
                shown = "  ".join(f"{errors[one]:.2e}" for one in ("ours", "standard", "twin"))
                print(f"{context:7} {name:>9} {shown}  {deviation[-1]:.2f}")
    print(f"\nGB of GPT-2 medium, forward and backward, {SRAM_ELEMENTS} elements in an SM's memory: counted, published")
    scale = 2 * GPT_HEADS / 1e9
    counted = {
        "standard": standard_accesses(GPT_TOKENS, GPT_DIM, True) * scale,
        "flash": flash_accesses(GPT_TOKENS, GPT_DIM, SRAM_ELEMENTS, True) * scale,
    }
    for name, gigabytes in counted.items():
        print(f"{name:9} {gigabytes:6.1f} {PUBLISHED_GB[name]:6.1f}")
    print(f"\n{'tokens':>7} GB forward, all heads: standard, motet's kernel with {CACHE_ELEMENTS} in a cache, ratio")
    for num_tokens in (1024, 8192, 65536):
        all_heads = SHAPE.num_heads * standard_accesses(num_tokens, SHAPE.head_dim)
        ours = our_accesses(num_tokens, CACHE_ELEMENTS)
        print(f"{num_tokens:7} {2 * all_heads / 1e9:9.3f} {2 * ours / 1e9:9.4f} {all_heads / ours:7.1f}")
    grown = memory["ours", arguments.longest] - memory["ours", timed]  # MB
    summary = {
        "standard_over_ours": round(over[timed]["standard"], 2),
        "fused_over_ours": round(over[timed]["fused"], 2),
        "memory_mb": round(memory["ours", timed], 1),
        "standard_memory_mb": round(memory["standard", timed], 1),
        "bytes_of_a_token_over_result": round(grown * 2**20 / (arguments.longest - timed) / RESULT_BYTES, 3),
        "deviation_over_standard": [round(min(deviation), 2), round(max(deviation), 2)],
        "gpt2_gb": {name: round(gigabytes, 2) for name, gigabytes in counted.items()},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
