"""Time between tokens of 16 steady streams while 50 requests a second ask for adapters that are not in the pool.

Three kinds of window take turns. `alone`: only the streams. `warm`: also 50 requests a second, all for one adapter that
is in the pool. `cold`: the same requests, each for another of more adapters than the pool and host memory hold, so that
each adapter is read from its file, verified and copied into the pool. These requests have a prompt of one token and get
one token. So warm and cold differ in two ways: adapters are loaded, and each request has LoRA weights of its own to
read. The ratios are of the p99 in a window, the median of all windows of a kind. They are also printed for the least
disturbed windows of each kind, because other programs on the machine lengthen the tails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.benchmarks.many_adapters import StoredAdapter, write_store
from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE
from motet.cluster.config import MotetConfig
from motet.workers.costs.measured_steps import computing_s
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.wire.messages import Cancel, SamplingParams, SequenceRequest, Submit

NUM_STREAMS = 16
NUM_STORED = 800  # 5.5 GB
POOL_BYTES = 1 << 30  # 120 of them
HOST_BYTES = 2 << 30
KINDS = ("alone", "warm", "cold")


@dataclass
class Window:
    gaps_s: list[float] = field(default_factory=list)  # between two tokens of a stream
    answers_s: list[float] = field(default_factory=list)  # from asking to the token, of the other requests
    num_requested: int = 0
    num_loads: int = 0
    wall_s: float = 0.0
    step_cpu_s: float = 0.0  # mean, of the thread that computes the steps

    @property
    def p99_s(self) -> float:
        return sorted(self.gaps_s)[int(0.99 * len(self.gaps_s))]


class Bench:
    """An engine, its steady streams, and the requests beside them."""

    def __init__(self, engine: Engine, adapters: Sequence[StoredAdapter], rate: float) -> None:
        self._engine, self._adapters, self._rate = engine, adapters, rate
        self._ids = itertools.count()
        self._cold: Iterator[StoredAdapter] = itertools.cycle(adapters[NUM_STREAMS:])
        self._rng = random.Random(1)

    def run(self, kind: str, seconds: float) -> Window:
        """One window. It begins with new streams, so that the context is the same in all; `kind`: of the requests."""
        engine, window = self._engine, Window()
        streams = {self._submit(self._adapters[i], 32, 4096): 0.0 for i in range(NUM_STREAMS)}
        while engine.load().gauges.num_running < NUM_STREAMS:
            engine.step()
        for _ in range(3):
            engine.step()
        loads_before, steps_before = engine.load().counters.num_adapter_loads, engine.load().counters.num_steps
        requested: dict[int, float] = {}
        started, cpu_started = time.perf_counter(), computing_s()
        next_at = started + self._rng.expovariate(self._rate)
        while (now := time.perf_counter()) - started < seconds:
            while kind != "alone" and next_at <= now:
                requested[self._submit(self._adapters[0] if kind == "warm" else next(self._cold), 1, 1)] = next_at
                next_at += self._rng.expovariate(self._rate)
                window.num_requested += 1
            updates = engine.step()
            now = time.perf_counter()
            for update in updates:
                if update.error is not None:
                    raise RuntimeError(update.error.message)
                if update.sequence_id not in streams:
                    window.answers_s.append(now - requested.pop(update.sequence_id))
                    continue
                if streams[update.sequence_id]:
                    window.gaps_s.append(now - streams[update.sequence_id])
                streams[update.sequence_id] = now
        window.wall_s = time.perf_counter() - started
        load = engine.load()
        window.step_cpu_s = (computing_s() - cpu_started) / (load.counters.num_steps - steps_before)
        window.num_loads = load.counters.num_adapter_loads - loads_before
        for sequence_id in (*streams, *requested):
            engine.receive(Cancel(sequence_id))
        while engine.has_work():
            engine.step()
        return window

    def _submit(self, adapter: StoredAdapter, num_prompt: int, max_tokens: int) -> int:
        sequence_id = next(self._ids)
        self._engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=sequence_id,
                    prompt_token_ids=[self._rng.randrange(1, random_model.VOCAB_SIZE) for _ in range(num_prompt)],
                    sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                    tenant="benchmark",
                    adapter=adapter.ref,
                )
            )
        )
        return sequence_id


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=50.0, help="cold adapters asked for a second (default 50)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="windows of each kind (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default 1)")
    arguments = parser.parse_args()
    windows: dict[str, list[Window]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        store_path = Path(folder) / "store"
        adapters = write_store(store_path, model_path, NUM_STORED, BLOCK_SIZE)
        engine = build_engine(
            MotetConfig.of(
                model_path=model_path,
                data_dir=store_path.parent,
                pool_bytes=POOL_BYTES,
                host_bytes=HOST_BYTES,
                block_size=BLOCK_SIZE,
                num_threads=arguments.threads,
            ).engine
        )
        try:
            bench = Bench(engine, adapters, arguments.rate)
            bench.run("cold", arguments.seconds)  # builds kernels, fills the pool
            for _ in range(arguments.rounds):
                for kind in KINDS:
                    windows[kind].append(bench.run(kind, arguments.seconds))
        finally:
            engine.close()
    _report(windows)


def _report(windows: dict[str, list[Window]]) -> None:
    print(
        f"{'':6} {'gap p50 ms':>10} {'p99 ms':>7} {'least p99':>9} {'step CPU ms':>11} {'req/s':>7} {'loads/s':>7} "
        f"{'answer mean ms':>14}"
    )
    p99_s = {kind: statistics.median(w.p99_s for w in done) for kind, done in windows.items()}
    least_s = {kind: min(w.p99_s for w in done) for kind, done in windows.items()}
    for kind, done in windows.items():
        wall_s = sum(w.wall_s for w in done)
        answers_s = [seconds for w in done for seconds in w.answers_s]
        print(
            f"{kind:6} {1e3 * statistics.median(w_gap for w in done for w_gap in w.gaps_s):10.1f} "
            f"{1e3 * p99_s[kind]:7.1f} {1e3 * least_s[kind]:9.1f} "
            f"{1e3 * statistics.median(w.step_cpu_s for w in done):11.1f} "
            f"{sum(w.num_requested for w in done) / wall_s:7.1f} {sum(w.num_loads for w in done) / wall_s:7.1f} "
            f"{1e3 * statistics.mean(answers_s) if answers_s else 0:14.1f}"
        )
    summary: dict[str, str | float] = {"benchmark": "cold_adapter"}
    for name, found in (("p99", p99_s), ("least_disturbed_p99", least_s)):
        summary[f"{name}_gap_over_alone"] = round(found["cold"] / found["alone"], 2)
        summary[f"{name}_gap_over_warm"] = round(found["cold"] / found["warm"], 2)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
