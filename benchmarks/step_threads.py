"""What threads give a step in one process, without clients, routers and the engine around it.

Random weights of SmolLM2-135M's shape, bfloat16, contexts of some 200 tokens in pages in random order. Numbers of
threads take turns. The best step is what free cores give; the median is with whatever else the machine does, which is
measured too: while another program has the core of one thread, the other one waits for the block that this one began.

With `--prompt-tokens 64` each sequence computes so many tokens of a prompt in place of decoding. Rows of an adapter are
neighbours, as in any step.

With `--adapters 64` the base's steps are timed as well, and how fast as many threads read memory in order, which bounds
what adapters can take: a step reads each of their bytes once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from motet.benchmarks.rigs.busy_seconds import busy_seconds
from motet.benchmarks.rigs.random_model import RANKS, write_model
from motet.kernels.backend import choose_kernels
from motet.workers.execution.runner import Runner
from motet.workers.memory.page_arrays import make_pool, plan_pool
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import load_decoder
from motet.workers.models.rotary import rotary_tables
from motet.workers.models.sharding import ModelSharding
from motet.workers.models.weights import Checkpoint
from motet.workers.parallel import Alone
from motet.workers.plan import Residence, SamplePlan, SequencePlan, StepPlan, packed
from motet.workers.wire.messages import SamplingParams

BLOCK_SIZE, CONTEXT, POOL_BYTES, READ_BYTES = 16, 200, 3 << 30, 1 << 30
CPU = torch.device("cpu")
SAMPLE = SamplePlan(SamplingParams(temperature=0.0), 0, 0)


@dataclass(frozen=True)
class Timed:
    wall_s: list[float]  # of each step
    cpu_s: float  # of a step
    others: float  # cores that other programs took meanwhile


class Bench:
    def __init__(self, folder: Path, threads: list[int], num_adapters: int) -> None:
        model = ModelConfig.from_folder(write_model(folder))
        sharding = ModelSharding(model)
        geometry = plan_pool(sharding, BLOCK_SIZE, torch.bfloat16, POOL_BYTES)
        layout = sharding.layout(BLOCK_SIZE, "bfloat16", "dtype")
        self._pool = make_pool(geometry, CPU)
        self._first = self._pool.view(-1).view(torch.int64)[: READ_BYTES // 8]
        self._first.zero_()  # all memory that was never written is one page of zeros
        self._free = list(range(geometry.num_pages))
        random.Random(0).shuffle(self._free)
        rotary = rotary_tables(model.rotaries, model.rotary_dims, model.max_model_len, CPU)
        kernels = {count: choose_kernels(CPU, torch.bfloat16, count) for count in threads}
        checkpoint = Checkpoint(folder, torch.bfloat16, CPU, lambda *_: None)
        decoder = load_decoder(sharding, checkpoint, kernels[threads[0]])
        self._runners = {
            count: Runner(decoder, own, Alone(), self._pool, geometry, layout, rotary, geometry.num_pages)
            for count, own in kernels.items()
        }
        ranks = [dict.fromkeys(layout.shape.modules, RANKS[index % len(RANKS)]) for index in range(num_adapters)]
        self._adapters = tuple(
            Residence(f"adapter {index}", of, self._take(layout.num_pages(of), 0.02)) for index, of in enumerate(ranks)
        )
        layers = layout.page_bytes // layout.slab  # bytes of an element, in all layers
        self._adapter_bytes = [layout.num_elements(of) * layers for of in ranks]

    def plan(self, num_sequences: int, num_adapters: int, num_prompt_tokens: int | None) -> StepPlan:
        """`num_prompt_tokens`: that each sequence computes; None: they decode."""
        sequences, adapters = [], self._adapters[: min(num_adapters, num_sequences)]
        for index in range(num_sequences):
            start = CONTEXT + index % 9 if num_prompt_tokens is None else 0
            token_ids = tuple(range(index, index + (num_prompt_tokens or 1)))
            pages = packed(self._take((start + len(token_ids)) // BLOCK_SIZE + 1, 0.5))
            adapter = adapters[index * len(adapters) // num_sequences].digest if adapters else None
            sequences.append(SequencePlan(index, token_ids, start, pages, adapter, SAMPLE))
        return StepPlan(0, tuple(sequences), adapters, ())

    def adapter_bytes(self, num_sequences: int) -> int:
        return sum(self._adapter_bytes[:num_sequences])

    def read_bytes_per_s(self, num_threads: int) -> float:
        """How fast threads read memory in order, each its own part."""
        parts = self._first.chunk(num_threads)
        took_s = []
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads, initializer=_use_one_core, initargs=(cores,)) as threads:
            for _ in range(5):
                started = time.perf_counter()
                list(threads.map(torch.sum, parts))
                took_s.append(time.perf_counter() - started)
        return READ_BYTES / min(took_s)

    def time(self, plan: StepPlan, num_threads: int, seconds: float) -> Timed:
        runner, wall_s = self._runners[num_threads], list[float]()
        for _ in range(3):
            runner.run(plan)
        all_before, cpu_before, started = busy_seconds(), time.process_time(), time.perf_counter()
        while (began := time.perf_counter()) - started < seconds:
            runner.run(plan)
            wall_s.append(time.perf_counter() - began)
        cpu_s = time.process_time() - cpu_before
        others = (busy_seconds() - all_before - cpu_s) / (time.perf_counter() - started)
        return Timed(wall_s, cpu_s / len(wall_s), others)

    def _take(self, num_pages: int, scale: float) -> tuple[int, ...]:
        taken = tuple(self._free.pop() for _ in range(num_pages))
        self._pool[list(taken)] = (torch.randn(num_pages, *self._pool.shape[1:]) * scale).bfloat16()
        return taken


def _use_one_core(cores: Iterator[int]) -> None:
    """Some systems wake all threads on the core of the one that wakes them."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {next(cores)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 64], help="of a step (default 32 64)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers to try (default 1 2)")
    parser.add_argument("--adapters", type=int, default=0, help="that sequences share evenly (default 0)")
    parser.add_argument("--prompt-tokens", type=int, help="of each sequence (default: they decode)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of steps in a turn (default 1.5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    least, *more = arguments.threads
    line: dict[str, str | float] = {"benchmark": "step_threads"}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder, torch.inference_mode():
        bench = Bench(Path(folder), arguments.threads, arguments.adapters)
        for num_sequences in arguments.sequences:
            best_s: dict[tuple[int, int], float] = {}  # by adapters and threads
            for num_adapters in sorted({0, arguments.adapters}):
                plan = bench.plan(num_sequences, num_adapters, arguments.prompt_tokens)
                cpu_s = dict[int, float]()
                for count in arguments.threads * 2:
                    timed = bench.time(plan, count, arguments.seconds)
                    best, median = min(timed.wall_s), statistics.median(timed.wall_s)
                    print(
                        f"{num_sequences:3} sequences, {num_adapters:2} adapters, {count} threads: best "
                        f"{1e3 * best:6.1f} ms, median {1e3 * median:6.1f}, CPU {1e3 * timed.cpu_s:6.1f}; other "
                        f"programs {timed.others:.2f} cores",
                        flush=True,
                    )
                    best_s[num_adapters, count] = min(best, best_s.get((num_adapters, count), best))
                    cpu_s[count] = min(timed.cpu_s, cpu_s.get(count, timed.cpu_s))
            for count in more:
                of_one = best_s[arguments.adapters, least] / best_s[arguments.adapters, count]
                line[f"threads_{count}_over_{least}_of_{num_sequences}"] = round(of_one, 2)
                line[f"cpu_{count}_over_{least}_of_{num_sequences}"] = round(cpu_s[count] / cpu_s[least], 2)
            for count in arguments.threads if arguments.adapters else ():
                base_s, with_adapters_s = best_s[0, count], best_s[arguments.adapters, count]
                num_bytes, speed = bench.adapter_bytes(num_sequences), bench.read_bytes_per_s(count)
                took_s, floor_s = with_adapters_s - base_s, num_bytes / speed
                print(
                    f"{count} threads: adapters of {num_bytes / 1e6:.0f} MB take {1e3 * took_s:.1f} ms; "
                    f"memory is read at {speed / 1e9:.1f} GB/s, which takes {1e3 * floor_s:.1f} ms"
                )
                line[f"adapters_over_base_{count}"] = round(base_s / with_adapters_s, 2)
                line[f"adapters_over_base_{count}_if_read_so_fast"] = round(base_s / (base_s + floor_s), 2)
                line[f"of_reading_speed_{count}"] = round(floor_s / took_s, 2)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
