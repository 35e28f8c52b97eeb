"""Conversations with a hybrid, whose sequences have recurrent states: what their second turns compute again.

The leader of a gang with Qwen3.5-0.8B's shape (bfloat16, pages of 16 tokens, of which a state takes 102) in virtual
time: a token of a prompt takes 10 µs, and copies run beside the steps at 25 GB/s. Conversations have two turns, the
second of which repeats the first: prompts of 100 to 700 tokens, answers of 50 to 500. States are kept of prompts alone
or of answers too. The pool holds all, or a third with host memory behind it or without.

Then what copies of states cost decodes on this CPU: time of a copy over that of a step of eight decodes, in turns, and
the part of all steps' time that copies take.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from motet.benchmarks.rigs.mixer_steps import BASES, BLOCK_SIZE, CONTEXT, model_of, side_of
from motet.cluster.config import MotetConfig
from motet.workers.costs.replay import VirtualExecutor
from motet.workers.engine_builder import build_virtual_engine
from motet.workers.models.sharding import ModelSharding
from motet.workers.plan import INT32_BYTES, PageCopy, StepPlan
from motet.workers.scheduling import prefix_reuse
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

HYBRID = BASES["delta"]
SHAPE = HYBRID | {"num_hidden_layers": 24, "vocab_size": 248_320, "max_position_embeddings": 8192}
PAGE_BYTES = ModelSharding(model_of(SHAPE)).layout(BLOCK_SIZE, "bfloat16").page_bytes
NUM_DECODES = 8


@dataclass(frozen=True)
class Costs:
    """In seconds; of a GPU, assumed."""

    def step_s(self, plan: StepPlan) -> float:
        return 0.005 + 1e-5 * sum([len(part.token_ids) for part in plan.sequences])

    def load_s(self, num_pages: int, *, from_store: bool) -> float:
        return 0.0  # there are no adapters

    def move_s(self, num_pages: int) -> float:
        return num_pages * PAGE_BYTES / 25e9


@dataclass(frozen=True)
class Talked:
    num_again: int  # tokens of second turns that had been computed in the first
    num_common: int  # tokens that second turns have in common with the first
    num_pages_in: int


def talk(num_conversations: int, num_pages: int, kv_host_bytes: int) -> Talked:
    """First turns in waves of sixteen, then second turns in the same order."""
    chance, executor = random.Random(4), VirtualExecutor(Costs())
    said = [chance.choices(range(2, 1 << 14), k=chance.randint(100, 700)) for _ in range(num_conversations)]
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        config = MotetConfig.of(
            model_path=Path(folder),
            data_dir=Path(folder),
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            max_num_sequences=16,
            pool_bytes=num_pages * PAGE_BYTES,
            kv_host_bytes=kv_host_bytes,
        ).engine
        engine = build_virtual_engine(config, executor, executor.clock, "cuda")
    num_cached = num_common = 0
    for turn in range(2):
        for index in range(num_conversations):
            num_common += (len(said[index]) - 1) * turn
            said[index] += chance.choices(range(2, 1 << 14), k=60) if turn else []
            sampling = SamplingParams(max_tokens=chance.randint(50, 500), temperature=0.0, ignore_eos=True)
            request = SequenceRequest(sequence_id=index, prompt_token_ids=said[index], sampling=sampling, tenant="t")
            engine.receive(Submit(request))
        while engine.has_work():
            for update in engine.step():
                said[update.sequence_id] = [*said[update.sequence_id], *update.token_ids]
                num_cached += (update.num_cached_tokens or 0) * turn
            engine.take_residency_changes()
            if engine.waits:
                executor.wait(float("inf"))
    counters = engine.load().counters
    return Talked(num_common - num_cached, num_common, counters.num_pages_in)


def copy_over_step(num_rounds: int = 15) -> float:
    """Time of a copy of a state over that of a step: medians, in turns."""
    torch.set_num_threads(1)
    side, step = side_of(model_of(HYBRID), 2), f"decode_{NUM_DECODES}"
    state = side.plans[step].sequences[0].state
    assert state is not None
    num_kv, num_state = CONTEXT // BLOCK_SIZE + 1, len(state.source) // INT32_BYTES
    first_free = NUM_DECODES * (num_kv + num_state)
    copies = tuple(PageCopy(num_kv + number, first_free + number) for number in range(num_state))
    plan = StepPlan(0, (), (), (), copies=copies)
    copies_s, steps_s = list[float](), list[float]()
    for _ in range(num_rounds):
        steps_s.append(side.step_s(step))
        began_s = time.perf_counter()
        side.runner._copy_pages(plan)
        copies_s.append(time.perf_counter() - began_s)
    return statistics.median(copies_s) / statistics.median(steps_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=96, help="(default 96)")
    arguments = parser.parse_args()
    num_state_pages = 102
    num_pages = arguments.conversations * (1000 // BLOCK_SIZE + num_state_pages)
    shares = {}
    print(f"{'states kept':34} {'in common':>9} {'again':>8} {'share':>6} {'pages in':>8}")
    whole, third, host_bytes = 2 * num_pages, num_pages // 3, 2 * num_pages * PAGE_BYTES
    for name, pool_pages, kv_host_bytes, keeps_answers in (
        ("of prompts; all fit the pool", whole, 0, False),
        ("of answers too; all fit the pool", whole, 0, True),
        ("of prompts; a third fits", third, 0, False),
        ("of prompts; host memory", third, host_bytes, False),
        ("of answers too; host memory", third, host_bytes, True),
    ):
        with patch.object(prefix_reuse, "_ANSWER_PAGES", prefix_reuse._ANSWER_PAGES if keeps_answers else 1 << 40):
            talked = talk(arguments.conversations, pool_pages, kv_host_bytes)
        shares[name] = round(talked.num_again / talked.num_common, 3)
        print(f"{name:34} {talked.num_common:9} {talked.num_again:8} {shares[name]:6} {talked.num_pages_in:8}")
    ratio = copy_over_step()
    share = ratio * NUM_DECODES / (prefix_reuse._ANSWER_PAGES * BLOCK_SIZE)
    print(f"a copy of a state takes {ratio:.4f} of a step of {NUM_DECODES} decodes, copies {share:.5f} of all steps")
    print(json.dumps({"computed_again": shares, "copy_over_step": round(ratio, 4), "copies_share": round(share, 5)}))


if __name__ == "__main__":
    main()
