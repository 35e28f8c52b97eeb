"""PagedAttention (arXiv 2309.06180): how full the pool is, and what it runs.

The pool is OPT-13B's on an A100 40GB: 17,088 tokens, contexts of 2,048. Lengths are lognormal, with the means of
ShareGPT and Alpaca (`scarce/page_reserve.py`). All requests wait from the beginning, and means are over the steps while
some wait. The last part is computed by the cost model; the others run the real scheduler in virtual time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import numpy as np

from motet.benchmarks.papers.policies import Continuous, Reserved, known, largest, power_of_two
from motet.benchmarks.papers.virtual_load import Job, Outcome, run
from motet.benchmarks.rigs.published_bases import published_base
from motet.benchmarks.scarce.page_reserve import LENGTHS
from motet.workers.costs.devices import DEVICES
from motet.workers.costs.operations import Chunk, StepBatch, kv_bytes_of_a_token, step_operations
from motet.workers.scheduling import scheduler
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.page_reserve import PageReserve

POOL_TOKENS, CONTEXT, BLOCK_SIZE = 17088, 2048, 16
NUM_JOBS = {"ShareGPT": 500, "Alpaca": 2000}
SAMPLES = (2, 4, 6)
BLOCK_SIZES = (1, 8, 16, 64, 256)
PCIE_BYTES_PER_S, COPY_S = 25e9, 1e-5  # assumed: of large copies over PCIe 4, and to begin one
SWAPPED_TOKENS = 256


def jobs_of(load: str, number: int | None = None, num_samples: int = 1) -> list[Job]:
    drawn = LENGTHS[load].draw(number or NUM_JOBS[load], seed=1)
    prompts = [min(prompt, CONTEXT * 3 // 4) for prompt, _ in drawn]
    return [
        Job(prompt, max(2, min(answer, CONTEXT - prompt)), num_samples=num_samples)
        for prompt, (_, answer) in zip(prompts, drawn, strict=True)
    ]


def paged(jobs: list[Job], block_size: int = BLOCK_SIZE) -> Outcome:
    return run(jobs, Continuous(), POOL_TOKENS // block_size, block_size=block_size)


RESERVATIONS = {
    "Orca max": Reserved(POOL_TOKENS, largest(CONTEXT)),
    "Orca pow2": Reserved(POOL_TOKENS, power_of_two(CONTEXT)),
    "Orca oracle": Reserved(POOL_TOKENS, known),
    "pow2, in one piece": Reserved(POOL_TOKENS, power_of_two(CONTEXT), is_contiguous=True),
    "oracle, in one piece": Reserved(POOL_TOKENS, known, is_contiguous=True),
}


def swapped_and_recomputed(block_size: int) -> tuple[float, float, float]:
    """Seconds for 256 tokens of Llama-2-7B on an A100 40GB: out and in again with a copy for each page, with one for
    each layer's keys and values of a page, and computed again."""
    model = published_base("Llama-2-7B")
    moved_s = 2 * SWAPPED_TOKENS * kv_bytes_of_a_token(model) / PCIE_BYTES_PER_S
    num_pages = 2 * -(-SWAPPED_TOKENS // block_size)
    chunk = StepBatch(chunks=(Chunk(0, SWAPPED_TOKENS),))
    computed_s = sum(each.seconds(DEVICES["A100 SXM 40GB"]) for each in step_operations(model, chunk))
    return moved_s + num_pages * COPY_S, moved_s + num_pages * 2 * model.num_layers * COPY_S, computed_s


def beams(width: int, num_requests: int = 24, seed: int = 1) -> float:
    """The share of pages that forked beams save, if each step's beams choose their parents by chance.

    Counted on block tables alone: a page that a beam writes to and others have is copied.
    """
    rng, held, apart = random.Random(seed), 0, 0
    for job in jobs_of("ShareGPT", num_requests):
        num_pages = -(-job.prompt // BLOCK_SIZE)
        tables = [list(range(num_pages))]
        for position in range(job.prompt, job.prompt + job.answer):
            parents, written = sorted(rng.choices(range(len(tables)), k=width)), position // BLOCK_SIZE
            forked = []
            for number, parent in enumerate(parents):
                table = list(tables[parent])
                if len(table) == written or (number and parents[number - 1] == parent):
                    table[written:] = [num_pages]
                    num_pages += 1
                forked.append(table)
            tables = forked
            held += len({page for table in tables for page in table})
            apart += sum(len(table) for table in tables)
    return 1 - held / apart


class KnownEnds(PageReserve):
    """Keeps back what running sequences need at the worst moment to come, if all answers get as long as they may."""

    def __init__(self, *limits: object, num_overdrawn: int = 0) -> None:
        """`num_overdrawn`: so many pages less."""
        super().__init__(*limits)  # type: ignore[arg-type]
        self._running: dict[int, GrowingSequence] = {}
        self._num_overdrawn = num_overdrawn

    @property
    def least(self) -> int:
        return 0

    def add(self, sequence: GrowingSequence) -> None:
        super().add(sequence)
        self._running[sequence.sequence_id] = sequence

    def remove(self, sequence: GrowingSequence) -> None:
        super().remove(sequence)
        del self._running[sequence.sequence_id]

    def num_pages(self, sequence: GrowingSequence, num_pages: int) -> int:
        if not self._running:
            return 0
        sequences = [*self._running.values(), sequence]
        lengths = np.array([len(each.token_ids) for each in sequences])
        ends = np.array([each.max_length - 1 for each in sequences]) - lengths  # steps until then
        ahead = np.unique(np.maximum(ends, 0))[:, None]
        most = int(((ends >= ahead) * -(-(lengths + ahead) // BLOCK_SIZE)).sum(axis=1).max())
        now = num_pages + sum(len(each.pages) for each in self._running.values())
        return max(0, most - now - self._num_overdrawn)


class Nothing(PageReserve):
    """Keeps nothing back."""

    @property
    def least(self) -> int:
        return 0

    def num_pages(self, sequence: GrowingSequence, num_pages: int) -> int:
        return 0


def frontier() -> Iterator[tuple[str, Outcome]]:
    """ShareGPT's lengths, by what is kept back for sequences that run."""
    reserves: dict[str, Callable[..., PageReserve]] = {
        "motet's": PageReserve,
        "nothing": Nothing,
        "ends known": KnownEnds,
    }
    reserves |= {f"ends known, less {few} pages": partial(KnownEnds, num_overdrawn=few) for few in (10, 20, 40)}
    for name, reserve in reserves.items():
        with patch.object(scheduler, "PageReserve", reserve):
            yield name, paged(jobs_of("ShareGPT"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frontier", action="store_true", help="compare what is kept back for sequences that run")
    if parser.parse_args().frontier:
        jobs = jobs_of("ShareGPT")
        needed, pow2 = sum(job.prompt + job.answer - 1 for job in jobs), run(jobs, RESERVATIONS["Orca pow2"])
        for name, found in frontier():
            print(
                f"{name:26} the pool {found.filled(POOL_TOKENS):.3f}, over pow2 "
                f"{found.num_running / pow2.num_running:.2f}, computed/needed {found.num_computed / needed:.3f}, "
                f"preemptions {found.num_preemptions}, steps {found.num_steps}",
                flush=True,
            )
        return
    summary: dict[str, object] = {}
    for load in NUM_JOBS:
        jobs = jobs_of(load)
        ours = paged(jobs)
        needed = sum(job.prompt + job.answer - 1 for job in jobs)
        held = sum(ours.kept_tokens) / sum(ours.held_tokens)
        print(
            f"{load}: pages filled {held:.3f}, the pool {ours.filled(POOL_TOKENS):.3f}, running {ours.num_running:.1f}"
            f", computed/needed {ours.num_computed / needed:.3f}, preemptions {ours.num_preemptions}"
        )
        key = load.lower()
        summary |= {f"held_{key}": round(held, 4), f"filled_{key}": round(ours.filled(POOL_TOKENS), 4)}
        for name, policy in RESERVATIONS.items():
            theirs = run(jobs, policy)
            over = ours.num_running / theirs.num_running
            print(
                f"  {name:21} the pool {theirs.filled(POOL_TOKENS):.3f}, running {theirs.num_running:6.1f}: motet runs "
                f"{over:5.2f} times as many, {ours.tokens_per_s / theirs.tokens_per_s:.2f} times the tokens/s"
            )
            if name == "Orca pow2":
                summary["over_pow2" if load == "ShareGPT" else f"over_pow2_{key}"] = round(over, 3)
    print("\npages saved by sharing, ShareGPT: samples of a prompt; beams, with parents chosen by chance")
    saved = {}
    for width in SAMPLES:
        samples = paged(jobs_of("ShareGPT", 100, width)).saved
        saved[width] = round(samples, 3), round(beams(width), 3)
        print(f"{width}: {saved[width][0]:.3f} {saved[width][1]:.3f}")
    print(f"\n{'a page of':>9} {'pages filled':>12} {'running':>8}; ms of 256 tokens: swapped, by layer, recomputed")
    for block_size in BLOCK_SIZES:
        outcome = paged(jobs_of("ShareGPT", 200), block_size)
        held = sum(outcome.kept_tokens) / sum(outcome.held_tokens)
        times = "  ".join(f"{seconds * 1e3:7.2f}" for seconds in swapped_and_recomputed(block_size))
        print(f"{block_size:9} {held:12.3f} {outcome.num_running:8.1f}  {times}")
    print(json.dumps(summary | {"saved_samples_beams": saved}))


if __name__ == "__main__":
    main()
