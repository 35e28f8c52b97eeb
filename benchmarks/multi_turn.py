"""Long conversations: how many tokens of their prompts are computed, when each turn repeats all turns before it.

Conversations have ten turns, and each has one request at a time. `small`: there are more conversations than the pool
holds, with host memory behind it. The baseline in tokens is every prompt in full; in time it is an engine that computes
them so. `roomy`: everything fits into the pool, in turn with and without host memory behind it. The difference is what
copying pages out costs.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE, fill_store
from motet.cluster.config import MotetConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.wire.engine_load import EngineCounters
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest, Submit

NUM_TURNS = 10
NUM_REQUESTED, NUM_ANSWERED = 36, 12  # tokens a turn
PAGE_BYTES = 368_640  # of SmolLM2-135M's shape in bfloat16, 16 tokens


@dataclass(frozen=True)
class Outcome:
    counted: EngineCounters  # beginning with the first turn
    wall_s: float
    num_prompt_tokens: int
    answers: list[list[int]]


def talk(engine: Engine, num_conversations: int, adapters: Sequence[AdapterRef], seed: int) -> Outcome:
    """Runs all conversations at once; each turn is sent as soon as the turn before it is answered."""
    rng = random.Random(seed)
    said = [[rng.randrange(1, 4000) for _ in range(NUM_REQUESTED)] for _ in range(num_conversations)]
    later = [
        [[rng.randrange(1, 4000) for _ in range(NUM_REQUESTED)] for _ in range(NUM_TURNS - 1)]
        for _ in range(num_conversations)
    ]
    before = engine.load().counters
    num_prompt_tokens = num_left = 0
    started = time.perf_counter()
    sampling = SamplingParams(max_tokens=NUM_ANSWERED, temperature=0.0, ignore_eos=True)

    def submit(index: int) -> None:
        nonlocal num_prompt_tokens, num_left
        num_prompt_tokens += len(said[index])
        num_left += 1
        adapter = adapters[index % len(adapters)]
        engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=index, prompt_token_ids=[*said[index]], sampling=sampling, tenant="t", adapter=adapter
                )
            )
        )

    for index in range(num_conversations):
        submit(index)
    while num_left:
        for update in engine.step():
            assert update.error is None, update.error
            said[update.sequence_id] += update.token_ids
            if update.finish_reason is not None:
                num_left -= 1
                if later[update.sequence_id]:
                    said[update.sequence_id] += later[update.sequence_id].pop(0)
                    submit(update.sequence_id)
        if engine.waits:
            time.sleep(0.0005)
    wall_s = time.perf_counter() - started
    after = engine.load().counters
    grown = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("num_computed_tokens", "num_generated_tokens", "num_pages_in", "num_pages_out", "num_preemptions")
    }
    return Outcome(EngineCounters(**grown), wall_s, num_prompt_tokens, said)


def num_computed_of_prompts(outcome: Outcome) -> int:
    """Without the tokens that decoding computes: each but the last of an answer."""
    num_answers = outcome.counted.num_generated_tokens // NUM_ANSWERED
    return outcome.counted.num_computed_tokens - num_answers * (NUM_ANSWERED - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=16, help="at once (default 16)")
    parser.add_argument("--repetitions", type=int, default=3, help="of the roomy comparison (default 3)")
    arguments = parser.parse_args()
    num_tokens = NUM_TURNS * (NUM_REQUESTED + NUM_ANSWERED)
    num_pages = arguments.conversations * -(-num_tokens // BLOCK_SIZE)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        folders = random_model.write_adapters(Path(folder) / "adapters", 4)
        refs = fill_store(Path(folder) / "store", model_path, folders)
        adapter_pages = 4 * 110

        def engine(num_kv_pages: int, **settings: Any) -> Engine:
            built = build_engine(
                MotetConfig.of(
                    model_path=model_path,
                    data_dir=Path(folder),
                    dtype="bfloat16",
                    pool_bytes=(num_kv_pages + adapter_pages) * PAGE_BYTES,
                    block_size=BLOCK_SIZE,
                    max_num_sequences=arguments.conversations,
                    num_threads=1,
                    **settings,
                ).engine
            )
            talk(built, 4, refs, seed=99)  # builds kernels, loads adapters
            return built

        kv_host_bytes = 2 * num_pages * PAGE_BYTES
        small = engine(num_pages // 3, kv_host_bytes=kv_host_bytes)
        kept = talk(small, arguments.conversations, refs, seed=1)
        small.close()
        forgetful = engine(num_pages // 3, prefix_cache=False)
        computed = talk(forgetful, arguments.conversations, refs, seed=1)
        forgetful.close()
        offloading = engine(2 * num_pages, kv_host_bytes=kv_host_bytes)
        plain = engine(2 * num_pages, kv_host_bytes=0)
        pairs = []
        for seed in range(2, 2 + arguments.repetitions):
            pairs.append([talk(each, arguments.conversations, refs, seed).wall_s for each in (offloading, plain)])
        offloading.close()
        plain.close()
    share = num_computed_of_prompts(kept) / kept.num_prompt_tokens
    speedup = computed.wall_s / kept.wall_s
    roomy = min(pair[1] for pair in pairs) / min(pair[0] for pair in pairs)
    print(f"{'':24} {'prompt tokens':>13} {'computed':>9} {'pages out':>9} {'pages in':>8} {'wall s':>7}")
    for name, outcome in (("small pool, host memory", kept), ("small pool, no cache", computed)):
        counted = outcome.counted
        numbers = f"{outcome.num_prompt_tokens:13} {num_computed_of_prompts(outcome):9} {counted.num_pages_out:9}"
        print(f"{name:24} {numbers} {counted.num_pages_in:8} {outcome.wall_s:7.1f}")
    print(
        f"everything fits: {min(p[0] for p in pairs):.1f} s with host memory behind the pool, "
        f"{min(p[1] for p in pairs):.1f} s without"
    )
    print(
        json.dumps(
            {
                "benchmark": "multi_turn",
                "prompt_tokens_computed_over_all": round(share, 3),
                "speed_over_computing_all": round(speedup, 2),
                "speed_with_offload_over_without": round(roomy, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
