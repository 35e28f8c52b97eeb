"""Speed with 5, 100, 1,000 and 2,000 adapters registered, under the same requests at the same times.

Adapters have ranks 8 to 64, on the projections of attention. Requests choose one by a power law (alpha 1), or
uniformly. A run begins with a full batch; then requests arrive as a Poisson process at `--overload` times the rate that
the engine sustains with 5 adapters, which is measured first, so that there is always a queue. Prompts, lengths and
times of arrival are the same in all runs; only the adapters of the requests differ. Rounds alternate between the
numbers of adapters; the ratios of speed are medians over rounds. Tokens count until the last arrival; a request without
a token by then counts with the time that it has waited so far.

Speed is tokens per second of wall time. Tokens per CPU second of the thread that computes the steps are printed beside
it, because other programs on the machine disturb these less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from motet.benchmarks.many_adapters import StoredAdapter, draw_adapters, write_store
from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE
from motet.benchmarks.rigs.workload import Job, draw_jobs
from motet.cluster.config import MotetConfig
from motet.workers.costs.measured_steps import computing_s
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.wire.messages import Cancel, SamplingParams, SequenceRequest, Submit

POOL_BYTES = 2 << 30  # holds about 240 of the adapters
BATCH_SIZE = 32  # sequences that run at once
MEAN_OUTPUT_TOKENS = 80
EXPONENTS = {"power law": 1.0, "uniform": 0.0}


@dataclass(frozen=True)
class Round:
    requests_per_s: float  # finished
    tokens_per_s: float
    tokens_per_cpu_s: float
    first_token_s: list[float]
    num_loads: int


class Clients:
    """Submits requests to an engine at their times of arrival, and runs the engine's steps."""

    def __init__(self, engine: Engine, adapters: Sequence[StoredAdapter]) -> None:
        self._engine, self._adapters = engine, adapters
        self._next_id = 0

    def run(self, jobs: Sequence[Job], arrivals_s: Sequence[float]) -> Round:
        """`arrivals_s`: ascending, from the start. Raises RuntimeError if a request fails."""
        loads_before = self._engine.load().counters.num_adapter_loads
        arrived: dict[int, float] = {}  # of those without a token yet
        open_ids: set[int] = set()
        first_token_s: list[float] = []
        num_tokens = num_finished = num_submitted = 0
        started, cpu_started = time.perf_counter(), computing_s()
        while num_submitted < len(jobs):
            now = time.perf_counter() - started
            while num_submitted < len(jobs) and arrivals_s[num_submitted] <= now:
                arrived[self._next_id] = arrivals_s[num_submitted]
                open_ids.add(self._next_id)
                self._submit(jobs[num_submitted])
                num_submitted += 1
            updates = self._engine.step() if self._engine.has_work() else []
            now = time.perf_counter() - started
            for update in updates:
                if update.error is not None:
                    raise RuntimeError(update.error.message)
                num_tokens += len(update.token_ids)
                if update.token_ids and update.sequence_id in arrived:
                    first_token_s.append(now - arrived.pop(update.sequence_id))
                if update.finish_reason is not None:
                    open_ids.discard(update.sequence_id)
                    num_finished += 1
            if not updates:
                time.sleep(0.0005)
        wall_s, cpu_s = time.perf_counter() - started, computing_s() - cpu_started
        first_token_s.extend(wall_s - at for at in arrived.values())
        for sequence_id in open_ids:
            self._engine.receive(Cancel(sequence_id))
        while self._engine.has_work():
            self._engine.step()
        num_loads = self._engine.load().counters.num_adapter_loads - loads_before
        return Round(num_finished / wall_s, num_tokens / wall_s, num_tokens / cpu_s, sorted(first_token_s), num_loads)

    def _submit(self, job: Job) -> None:
        assert job.adapter is not None
        self._engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=self._next_id,
                    prompt_token_ids=job.prompt_token_ids,
                    sampling=SamplingParams(max_tokens=job.num_output_tokens, temperature=0.0, ignore_eos=True),
                    tenant="benchmark",
                    cache_salt=str(self._next_id),  # rounds ask the same again
                    adapter=self._adapters[job.adapter].ref,
                )
            )
        )
        self._next_id += 1


def make_load(
    num_adapters: int, exponent: float, rate: float, seconds: float, seed: int
) -> tuple[list[Job], list[float]]:
    """Jobs and their times of arrival. Equal rate, seconds and seed give equal jobs, except for their adapters."""
    generator = random.Random(seed)
    arrivals_s = [0.0] * BATCH_SIZE  # begins with a full batch
    while arrivals_s[-1] < seconds:
        arrivals_s.append(arrivals_s[-1] + generator.expovariate(rate))
    requested = draw_adapters(len(arrivals_s), num_adapters, exponent, seed)
    return draw_jobs(len(arrivals_s), requested, random_model.VOCAB_SIZE, seed), arrivals_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--registered", type=int, nargs="+", default=[5, 100, 1000, 2000], help="the first is the base")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round (default 15)")
    parser.add_argument("--rounds", type=int, default=3, help="of each number and popularity (default 3)")
    parser.add_argument("--overload", type=float, default=1.2, help="arrivals over what 5 adapters bear (default 1.2)")
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default 1)")
    arguments = parser.parse_args()
    rounds: dict[tuple[str, int], list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        store_path = Path(folder) / "store"
        adapters = write_store(store_path, model_path, max(arguments.registered), BLOCK_SIZE)
        engine = build_engine(
            MotetConfig.of(
                model_path=model_path,
                data_dir=store_path.parent,
                pool_bytes=POOL_BYTES,
                block_size=BLOCK_SIZE,
                max_num_sequences=BATCH_SIZE,
                num_threads=arguments.threads,
            ).engine
        )
        try:
            clients = Clients(engine, adapters)
            rate = arguments.overload * _bearable_rate(clients, arguments.registered[0])
            print(f"{rate:.2f} requests/s arrive", flush=True)
            for number in range(arguments.rounds):
                for popularity, exponent in EXPONENTS.items():
                    for num_adapters in arguments.registered:
                        seed = 10 * number + len(popularity)
                        jobs, arrivals_s = make_load(num_adapters, exponent, rate, arguments.seconds, seed)
                        done = clients.run(jobs, arrivals_s)
                        rounds.setdefault((popularity, num_adapters), []).append(done)
        finally:
            engine.close()
    _report(rounds, arguments.registered)


def _bearable_rate(clients: Clients, num_adapters: int) -> float:
    """Requests per second that the engine answers when it always has a full batch."""
    jobs, _ = make_load(num_adapters, 1.0, 100.0, 1.0, seed=0)
    clients.run(jobs[: BATCH_SIZE + 1], [0.0] * BATCH_SIZE + [3.0])  # builds kernels, loads the adapters
    return clients.run(jobs, [0.0] * (len(jobs) - 1) + [10.0]).tokens_per_s / MEAN_OUTPUT_TOKENS


def _report(rounds: dict[tuple[str, int], list[Round]], registered: Sequence[int]) -> None:
    print(
        f"{'popularity':10} {'adapters':>8} {'requests/s':>10} {'tokens/s':>8} {'tokens/CPU s':>12} "
        f"{'first token mean s':>18} {'p99 s':>6} {'loads':>6}"
    )
    for (popularity, num_adapters), done in rounds.items():
        first_token_s = sorted(chain.from_iterable(each.first_token_s for each in done))
        print(
            f"{popularity:10} {num_adapters:8} {_median(done, 'requests_per_s'):10.2f} "
            f"{_median(done, 'tokens_per_s'):8.1f} {_median(done, 'tokens_per_cpu_s'):12.1f} "
            f"{statistics.mean(first_token_s):18.2f} "
            f"{first_token_s[int(0.99 * len(first_token_s))]:6.2f} {sum(each.num_loads for each in done):6}"
        )
    summary: dict[str, Any] = {"benchmark": "adapter_scaling", "few": registered[0], "many": registered[-1]}
    for popularity in EXPONENTS:
        few, many = rounds[popularity, registered[0]], rounds[popularity, registered[-1]]
        key = popularity.replace(" ", "_")
        for name in ("tokens_per_s", "tokens_per_cpu_s"):
            ratios = [getattr(b, name) / getattr(a, name) for a, b in zip(few, many, strict=True)]
            summary[f"{key}_{name}_over_few"] = round(statistics.median(ratios), 3)
        waits = [statistics.mean(chain.from_iterable(each.first_token_s for each in done)) for done in (few, many)]
        summary[f"{key}_mean_first_token_s_over_few"] = round(waits[1] / waits[0], 2)
    print(json.dumps(summary))


def _median(done: Sequence[Round], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in done))


if __name__ == "__main__":
    main()
