"""NanoFlow (arXiv 2408.12757 §4.2.2, 6.4): what a long conversation's rounds compute where its KV is kept.

Llama-2-70B on eight A100 80GB (`knees.py`): motet's engine in virtual time. Conversations have five rounds with
LMSYS-Chat's lengths; each prompt repeats all before it. The pool holds a third of the KV that all end with. The next
round is asked when the one before has been answered and read. Copies run beside the steps: over PCIe at 25 GB/s, and
where there is a disk behind host memory all of them at 5 GB/s. What copies cost the steps beside them is not in virtual
time: `benchmarks/multi_turn.py` measures it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motet.benchmarks.papers.knees import COSTS, MODEL
from motet.benchmarks.papers.nanoflow import DEGREE
from motet.benchmarks.papers.pipeline import NUM_ROWS
from motet.benchmarks.rigs.published_bases import BASES
from motet.benchmarks.scarce.page_reserve import LENGTHS
from motet.cluster.config import MotetConfig
from motet.workers.costs.replay import VirtualExecutor
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_virtual_engine
from motet.workers.models.sharding import ModelSharding
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

NUM_CONVERSATIONS, NUM_ROUNDS = 100, 5
READING_S = 20.0  # mean time from an answer to the next question
PCIE_BYTES_PER_S, DISK_BYTES_PER_S = 25e9, 5e9  # of a device: assumed
BLOCK_SIZE = 16
PAGE_BYTES = ModelSharding(MODEL, DEGREE).layout(BLOCK_SIZE, "bfloat16").page_bytes  # of a worker


@dataclass(frozen=True)
class Talked:
    num_computed: int  # tokens
    num_pages_out: int
    num_pages_in: int
    seconds: float


def conversations(number: int, num_rounds: int = NUM_ROUNDS) -> list[list[tuple[int, int]]]:
    """Tokens of each round's question and answer."""
    longest = 8192 // (2 * num_rounds)  # all rounds fit the context
    drawn = [
        (min(question, longest), min(answer, longest))
        for question, answer in LENGTHS["LMSYS"].draw(number * num_rounds, seed=4)
    ]
    return [drawn[first : first + num_rounds] for first in range(0, len(drawn), num_rounds)]


def needed_without_reuse(talks: list[list[tuple[int, int]]]) -> int:
    """Tokens that are computed if each round computes its whole prompt."""
    found = 0
    for talk in talks:
        context = 0
        for question, answer in talk:
            context += question + answer
            found += context - 1
    return found


def talk_all(engine: Engine, executor: VirtualExecutor, talks: list[list[tuple[int, int]]]) -> Talked:
    """All conversations, to their ends. Those that begin come by chance, within one reading time."""
    chance = random.Random(6)
    said = [list[int]() for _ in talks]
    coming = [(chance.uniform(0, READING_S), index, 0) for index in range(len(talks))]  # when, whose, round
    heapq.heapify(coming)
    num_open, last_s = 0, 0.0
    while coming or num_open:
        while coming and coming[0][0] <= executor.now_s:
            _, index, number = heapq.heappop(coming)
            question, answer = talks[index][number]
            said[index] += chance.choices(range(2, 1 << 14), k=question)
            sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
            sequence_id = index * NUM_ROUNDS + number
            request = SequenceRequest(
                sequence_id=sequence_id, prompt_token_ids=[*said[index]], sampling=sampling, tenant="t"
            )
            engine.receive(Submit(request))
            num_open += 1
        if not engine.has_work():
            executor.wait(coming[0][0])
            continue
        for update in engine.step():
            assert update.error is None, update.error
            index, number = divmod(update.sequence_id, NUM_ROUNDS)
            said[index] += update.token_ids
            if update.finish_reason is not None:
                num_open, last_s = num_open - 1, executor.now_s
                if number + 1 < len(talks[index]):
                    heapq.heappush(coming, (last_s + chance.expovariate(1 / READING_S), index, number + 1))
        engine.take_residency_changes()
        if engine.waits:
            executor.wait(coming[0][0] if coming else float("inf"))
    counters = engine.load().counters
    return Talked(counters.num_computed_tokens, counters.num_pages_out, counters.num_pages_in, last_s)


def talked(talks: list[list[tuple[int, int]]], num_pages: int, bytes_per_s: float, **settings: Any) -> Talked:
    """On an engine of its own, whose pool has so many pages."""
    executor = VirtualExecutor(replace(COSTS, host_bytes_per_s=bytes_per_s, page_bytes=PAGE_BYTES))
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(BASES["Llama-2-70B"]))
        config = MotetConfig.of(
            model_path=Path(folder),
            data_dir=Path(folder),
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            tensor_parallel=DEGREE,
            max_num_sequences=NUM_ROWS,
            max_tokens_per_step=NUM_ROWS,
            pool_bytes=num_pages * PAGE_BYTES,
            **settings,
        ).engine
        engine = build_virtual_engine(config, executor, executor.clock, "cuda")
    return talk_all(engine, executor, talks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=NUM_CONVERSATIONS, help=f"(default {NUM_CONVERSATIONS})")
    arguments = parser.parse_args()
    talks = conversations(arguments.conversations)
    whole = sum(-(-sum(map(sum, talk)) // BLOCK_SIZE) for talk in talks)
    pool, host = max(1 + whole // 3, 512), 2 * whole * PAGE_BYTES
    ways: dict[str, dict[str, Any]] = {
        "nothing": {"num_pages": pool, "bytes_per_s": PCIE_BYTES_PER_S, "prefix_cache": False},
        "in the pool": {"num_pages": pool, "bytes_per_s": PCIE_BYTES_PER_S, "kv_host_bytes": 0},
        "and host memory": {"num_pages": pool, "bytes_per_s": PCIE_BYTES_PER_S, "kv_host_bytes": host},
        "host memory of a fifth, and disk": {
            "num_pages": pool,
            "bytes_per_s": DISK_BYTES_PER_S,
            "kv_host_bytes": whole * PAGE_BYTES // 5,
            "kv_disk_bytes": host,
        },
        "all in the pool": {"num_pages": 2 * whole, "bytes_per_s": PCIE_BYTES_PER_S, "kv_host_bytes": 0},
    }
    needed = needed_without_reuse(talks)
    print(f"{len(talks)} conversations, {NUM_ROUNDS} rounds, {whole} pages in the end, a pool of {pool}")
    print(f"{'KV is kept':34} {'computed':>9} {'less':>6} {'pages out':>9} {'in':>7} {'seconds':>8}")
    less = {}
    for name, settings in ways.items():
        found = talked(talks, **settings)
        less[name] = needed / found.num_computed
        print(
            f"{name:34} {found.num_computed:9} {less[name]:6.2f} {found.num_pages_out:9} {found.num_pages_in:7} "
            f"{found.seconds:8.1f}",
            flush=True,
        )
    print(json.dumps({"computed_less": {name: round(ratio, 3) for name, ratio in less.items()}}))


if __name__ == "__main__":
    main()
