"""Time between tokens of streams while a burst of prompts arrives, with a target for it and without.

A gang of one worker on random weights of SmolLM2-135M's shape streams 8 answers; then 32 prompts of another tenant
arrive at once. Both ways take turns in one process. p99 is of the times between two tokens of one of the streams, from
the burst to the end of the last answer; throughput is all tokens of prompts and answers over that time.

Then 32 shorter prompts of one tenant arrive at once, and nothing else: with the interval stretched for a tenant's own
prompts (`PromptBursts`) and not, in turn, how long each waits for its first token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE, POOL_BYTES
from motet.cluster.config import MotetConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.fairness import prompt_budget
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

NUM_STREAMS, STREAM_TOKENS = 8, 200
NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_OUTPUT = 32, 512, 32


STRETCH = prompt_budget._MAX_STRETCH
NUM_SHORT, NUM_SHORT_TOKENS, NUM_SHORT_OUTPUT = 32, 66, 80


def submit(
    engine: Engine, sequence_id: int, num_prompt: int, num_output: int, rng: random.Random, tenant: str = "streams"
) -> None:
    engine.receive(
        Submit(
            SequenceRequest(
                sequence_id=sequence_id,
                prompt_token_ids=[rng.randrange(1, 4000) for _ in range(num_prompt)],
                sampling=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True),
                tenant=tenant,
            )
        )
    )


def burst(engine: Engine, seed: int) -> tuple[list[float], float]:
    """Seconds between tokens during the burst, and tokens a second."""
    rng = random.Random(seed)
    last_token_at: dict[int, float] = {}
    between: list[float] = []

    def step() -> None:
        updates = engine.step()
        now = time.perf_counter()
        for update in updates:
            if update.sequence_id in last_token_at and update.sequence_id < NUM_STREAMS:
                between.append(now - last_token_at[update.sequence_id])
            last_token_at[update.sequence_id] = now

    for i in range(NUM_STREAMS):
        submit(engine, i, 32, STREAM_TOKENS, rng)
    while len(last_token_at) < NUM_STREAMS:
        step()
    for _ in range(10):
        step()
    between.clear()
    before, started = engine.load().counters.num_computed_tokens, time.perf_counter()
    for i in range(NUM_PROMPTS):
        submit(engine, NUM_STREAMS + i, NUM_PROMPT_TOKENS, NUM_OUTPUT, rng, "burst")
    while engine.has_work():
        step()
    num_tokens = engine.load().counters.num_computed_tokens - before
    return between, num_tokens / (time.perf_counter() - started)


def first_tokens(engine: Engine, seed: int) -> list[float]:
    """Seconds until each of the short prompts has its first token, in order."""
    rng, started, first = random.Random(seed), time.perf_counter(), dict[int, float]()
    for i in range(NUM_SHORT):
        submit(engine, i, NUM_SHORT_TOKENS, NUM_SHORT_OUTPUT, rng)
    while engine.has_work():
        for update in engine.step():
            first.setdefault(update.sequence_id, time.perf_counter() - started)
    return sorted(first.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each way (default 3)")
    parser.add_argument("--target", type=float, default=0.1, help="seconds between tokens (default 0.1)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        engines = {
            target_s: build_engine(
                MotetConfig.of(
                    model_path=model_path,
                    data_dir=Path(folder),
                    dtype="bfloat16",
                    pool_bytes=POOL_BYTES,
                    block_size=BLOCK_SIZE,
                    num_threads=arguments.threads,
                    prefix_cache=False,  # rounds are to compute what they ask for
                    token_interval_s=target_s,
                ).engine
            )
            for target_s in (0.0, arguments.target)
        }
        between: dict[float, list[float]] = {target_s: [] for target_s in engines}
        speeds: dict[float, list[float]] = {target_s: [] for target_s in engines}
        for round_number in range(arguments.rounds + 1):
            for target_s, engine in engines.items():
                seconds, speed = burst(engine, round_number)
                if round_number:  # the first one warms up, and measures what steps cost
                    between[target_s] += seconds
                    speeds[target_s].append(speed)
        waits: dict[int, list[list[float]]] = {STRETCH: [], 1: []}
        for round_number in range(arguments.rounds + 1):
            for stretch, measured in waits.items():
                prompt_budget._MAX_STRETCH = stretch
                seconds_each = first_tokens(engines[arguments.target], round_number)
                measured += [seconds_each] if round_number else []
        for engine in engines.values():
            engine.close()
    p99_s = {target_s: statistics.quantiles(seconds, n=100)[98] for target_s, seconds in between.items()}
    median_speed = {target_s: statistics.median(of) for target_s, of in speeds.items()}
    print(f"{'target':>8} {'p50 ms':>7} {'p99 ms':>7} {'max ms':>7} {'tokens/s':>9}")
    for target_s, seconds in between.items():
        name = f"{target_s * 1e3:.0f} ms" if target_s else "none"
        p50_ms, max_ms = statistics.median(seconds) * 1e3, max(seconds) * 1e3
        print(f"{name:>8} {p50_ms:7.1f} {p99_s[target_s] * 1e3:7.1f} {max_ms:7.1f} {median_speed[target_s]:9.1f}")
    middle, last = (
        {stretch: statistics.median(one[at] for one in measured) for stretch, measured in waits.items()}
        for at in (NUM_SHORT // 2, -1)
    )
    for stretch in waits:
        print(f"first tokens, {stretch} times the target: p50 {middle[stretch]:.2f} s, last {last[stretch]:.2f} s")
    result = {
        "benchmark": "prompt_burst",
        "p99_over_target": round(p99_s[arguments.target] / arguments.target, 2),
        "p99_without_over_target": round(p99_s[0.0] / arguments.target, 2),
        "burst_ttft_p99_over_p50": round(last[STRETCH] / middle[STRETCH], 2),
        "burst_ttft_p99_over_before": round(last[STRETCH] / last[1], 2),
        "throughput_with_over_without": round(median_speed[arguments.target] / median_speed[0.0], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
