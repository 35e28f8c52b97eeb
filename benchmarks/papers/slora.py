"""S-LoRA (arXiv 2311.03285): one batch for all adapters against merged bases, padded ranks and a pool of its own.

In virtual time: a step takes 20 ms and 0.1 ms more for each row. Requests on Llama-2-7B's shape come all at once, their
adapters by a power law; the pool is what an A100 80GB has beside one base. Adapters have ranks 8, 16, 32 and 64 in
turn. What is loaded or merged is read from host memory at 25 GB/s, and a merge reads and writes the base once: assumed.

What gangs of 2 and 4 exchange for adapters is counted as they compute, on workers that are threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch

from motet.benchmarks.papers.adapter_sharding import WAYS, Exchanged, exchange, random_adapter, with_blocks
from motet.benchmarks.papers.policies import Continuous, first_fit
from motet.benchmarks.papers.virtual_load import BLOCK_SIZE, Job, Outcome, run
from motet.benchmarks.rigs.published_bases import published_base
from motet.benchmarks.tensor_parallel import HIDDEN, NUM_ROWS, count, write_model
from motet.workers.costs.devices import DEVICES
from motet.workers.costs.operations import kv_bytes_of_a_token, model_size
from motet.workers.wire.messages import AdapterRef

NUM_ADAPTERS = (5, 100, 1000, 2000)
NUM_JOBS = 600
RANKS = (8, 16, 32, 64)
HOST_BYTES_PER_S = 25e9
DEVICE, MODEL = DEVICES["A100 SXM 80GB"], published_base("Llama-2-7B")
WEIGHTS_BYTES = model_size(MODEL).weights_bytes()
PAGE_BYTES = BLOCK_SIZE * kv_bytes_of_a_token(MODEL)
NUM_PAGES = int((0.9 * DEVICE.memory_bytes - WEIGHTS_BYTES) / PAGE_BYTES)
_SIDES = MODEL.num_layers * sum(num_in + num_out for num_in, num_out in MODEL.shape.modules.values())
POOL_SHARE = 0.2  # of the separate pool of adapters
FRAGMENTED_ADAPTERS = 100  # of the table of what memory holds
DEGREES, SHARDED_RANK, SHARDED_ROWS = (2, 4), 16, 8


def rank_of(adapter: str) -> int:
    return RANKS[int(adapter) % len(RANKS)]


def pages_of(rank: int) -> int:
    return -(-bytes_of(rank) // PAGE_BYTES)


def bytes_of(rank: int) -> int:
    return 2 * rank * _SIDES


def jobs_of(num_adapters: int, number: int = NUM_JOBS) -> list[Job]:
    """Prompts and answers of 8 to 512 tokens, as in the paper; adapter i in proportion to 1 / (i + 1)."""
    rng = random.Random(5)
    shares = list(itertools.accumulate(1 / (place + 1) for place in range(num_adapters)))
    adapters = rng.choices(range(num_adapters), cum_weights=shares, k=number)
    return [Job(rng.randint(8, 512), rng.randint(8, 512), adapter=str(adapter)) for adapter in adapters]


class Merged(Continuous):
    """One adapter at a time is merged into the base. All its requests join; the next is merged when they have ended."""

    def __init__(self) -> None:
        self._merged: str | None = None
        self._pause_s = 0.0
        self._num_others = 0  # that wait, when it was last looked through them

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        if not waiting or (num_running and len(waiting) == self._num_others):
            return 0
        if not num_running and waiting[0].adapter != self._merged:
            self._merged = waiting[0].adapter
            assert self._merged is not None
            loaded_s = bytes_of(rank_of(self._merged)) / HOST_BYTES_PER_S
            self._pause_s += loaded_s + 2 * 2 * WEIGHTS_BYTES / DEVICE.bytes_per_s  # the one before is taken out
        ours = [job for job in waiting if job.adapter == self._merged]
        others = [job for job in waiting if job.adapter != self._merged]
        waiting.clear()
        waiting.extend([*ours, *others])
        self._num_others = len(others)
        return len(ours)

    def pause_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s


class OwnPool(Continuous):
    """Adapters have a pool of their own: a request joins only when its adapter has room there."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._users = Counter[str]()
        self.used: list[int] = []  # pages, in each step

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        number = 0
        for number, job in enumerate(waiting, start=1):
            assert job.adapter is not None
            if self._taken(job.adapter) > self._num_pages:
                number -= 1
                break
            self._users[job.adapter] += 1
        self.used.append(self._taken())
        return number

    def _taken(self, *more: str) -> int:
        return sum(pages_of(rank_of(adapter)) for adapter in {*self._users, *more})

    def end(self, job: Job) -> None:
        assert job.adapter is not None
        self._users[job.adapter] -= 1
        self._users += Counter()  # without those that nothing uses


class OnePiece(Continuous):
    """One memory without pages: each adapter that is in use, and each sequence's KV, lies in one piece (first fit).

    A sequence has room for exactly what it will need.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._slots: dict[Job | str, tuple[int, int]] = {}  # start and size
        self._users = Counter[str]()
        self.free: list[float] = []  # the share that is free when a request must wait
        self.adapters: list[float] = []  # and that of adapters

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        for number, job in enumerate(waiting):
            if not self._place(job):
                self.free.append(1 - sum(size for _, size in self._slots.values()) / self._num_bytes)
                sizes = [size for key, (_, size) in self._slots.items() if isinstance(key, str)]
                self.adapters.append(sum(sizes) / self._num_bytes)
                return number
        return len(waiting)

    def _place(self, job: Job) -> bool:
        assert job.adapter is not None
        pieces: dict[Job | str, int] = {job: (job.prompt + job.answer) * PAGE_BYTES // BLOCK_SIZE}
        if job.adapter not in self._slots:
            pieces[job.adapter] = bytes_of(rank_of(job.adapter))
        placed = dict(self._slots)
        for key, size in pieces.items():
            start = first_fit(placed.values(), size)
            if start + size > self._num_bytes:
                return False
            placed[key] = start, size
        self._slots = placed
        self._users[job.adapter] += 1
        return True

    def end(self, job: Job) -> None:
        assert job.adapter is not None
        del self._slots[job]
        self._users[job.adapter] -= 1
        if not self._users[job.adapter]:
            del self._slots[job.adapter]


def one_pool(jobs: list[Job], rank: Callable[[str], int] = rank_of) -> Outcome:
    def size(ref: AdapterRef) -> int:
        return pages_of(rank(ref.digest))

    return run(jobs, Continuous(), NUM_PAGES, pages_of_adapter=size, load_page_s=PAGE_BYTES / HOST_BYTES_PER_S)


def own_pool(jobs: list[Job]) -> tuple[Outcome, OwnPool]:
    num_pages = int(POOL_SHARE * NUM_PAGES)
    policy = OwnPool(num_pages)
    return run(jobs, policy, NUM_PAGES - num_pages, pages_of_adapter=lambda _: 0), policy


@cache
def base_alone(number: int) -> float:
    """Tokens a second. Requests are as long however many adapters there are."""
    return run([Job(job.prompt, job.answer) for job in jobs_of(1, number)], Continuous(), NUM_PAGES).tokens_per_s


def measure(num_adapters: int, number: int = NUM_JOBS) -> dict[str, float]:
    """Tokens a second of each."""
    jobs = jobs_of(num_adapters, number)
    return {
        "base alone": base_alone(number),
        "one pool": one_pool(jobs).tokens_per_s,
        "padded ranks": one_pool(jobs, lambda _: RANKS[-1]).tokens_per_s,
        "own pool": own_pool(jobs)[0].tokens_per_s,
        "merged": run(jobs, Merged(), NUM_PAGES, pages_of_adapter=lambda _: 0).tokens_per_s,
    }


@dataclass(frozen=True)
class Filled:
    """Shares of the memory beside the base, on average while requests wait."""

    tokens: float  # KV of tokens
    adapters: float  # those that running sequences use
    lost: float  # held, without anything in it
    free: float  # or held by what may go at any time
    running: float  # sequences


def fragmentation(num_adapters: int, number: int = NUM_JOBS) -> dict[str, Filled]:
    """What memory holds where a request must wait for it."""
    jobs, num_tokens = jobs_of(num_adapters, number), NUM_PAGES * BLOCK_SIZE
    padded = fmean(pages_of(rank) for rank in RANKS) * PAGE_BYTES / fmean(bytes_of(rank) for rank in RANKS)
    found = {}
    paged = one_pool(jobs)
    tokens, pages = paged.filled(num_tokens), fmean(paged.adapter_pages) / NUM_PAGES
    held = fmean(paged.held_tokens) / num_tokens
    found["one pool"] = _filled(paged, tokens, pages / padded, held - tokens + pages * (1 - 1 / padded))
    apart, policy = own_pool(jobs)
    tokens, pages = apart.filled(num_tokens), fmean(policy.used) / NUM_PAGES
    held = fmean(apart.held_tokens) / num_tokens
    found["own pool"] = _filled(apart, tokens, pages / padded, held - tokens + pages * (1 - 1 / padded))
    pieces = OnePiece(NUM_PAGES * PAGE_BYTES)
    whole = run(jobs, pieces, NUM_PAGES, pages_of_adapter=lambda _: 0)
    tokens, adapters = whole.filled(num_tokens), fmean(pieces.adapters)
    found["one piece"] = _filled(whole, tokens, adapters, 1 - fmean(pieces.free) - adapters - tokens)
    return found


def _filled(outcome: Outcome, tokens: float, adapters: float, lost: float) -> Filled:
    return Filled(tokens, adapters, lost, 1 - tokens - adapters - lost, outcome.num_running)


def exchanged(way: str, degree: int) -> Exchanged:
    """For an adapter on all projections of a layer of Llama-3-8B."""
    shapes = published_base("Llama-3-8B").shape.modules
    adapter = random_adapter(shapes, SHARDED_RANK, torch.bfloat16)
    if way == "block-diagonal":
        adapter = with_blocks(adapter, degree)
    counted = exchange(way, adapter, lambda module: torch.ones(SHARDED_ROWS, shapes[module][0]).bfloat16(), degree)
    return counted[0]  # all send as much


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    copies = int(0.9 * DEVICE.memory_bytes / WEIGHTS_BYTES)
    print(f"a process for each merged adapter: {copies} bases fit the device, without any KV")
    print(f"{NUM_PAGES} pages; an adapter takes {', '.join(str(pages_of(rank)) for rank in RANKS)}\n")
    over: dict[int, dict[str, float]] = {}
    for num_adapters in NUM_ADAPTERS:
        found = measure(num_adapters)
        ours = found["one pool"]
        over[num_adapters] = {name: round(ours / rate, 3) for name, rate in found.items() if name != "one pool"}
        print(f"{num_adapters:5} adapters: " + ", ".join(f"{name} {rate:.0f}" for name, rate in found.items()))
    print(f"\n{FRAGMENTED_ADAPTERS} adapters, shares of the memory while requests wait: tokens, adapters, lost, free")
    shares = fragmentation(FRAGMENTED_ADAPTERS)
    for name, one in shares.items():
        print(f"{name:10} {one.tokens:.3f} {one.adapters:.3f} {one.lost:.3f} {one.free:.3f}, {one.running:.1f} running")
    print("\nin a gang, beside the base's two collectives a layer: collectives, bytes of a token, share of the adapter")
    sharded: dict[str, dict[int, tuple[int, float]]] = {}
    for way, degree in itertools.product(WAYS, DEGREES):
        counted = exchanged(way, degree)
        sharded.setdefault(way, {})[degree] = counted.num_collectives, counted.bytes_of_a_token
        print(
            f"{way:15} {degree} workers: {counted.num_collectives} {counted.bytes_of_a_token:6.0f} "
            f"{counted.share_held:6.3f}; of the base {2 * 2 * 2 * (degree - 1) / degree * HIDDEN:6.0f} bytes"
        )
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = write_model(Path(folder))
        for degree in DEGREES:
            without, with_adapters = (count(model_path, degree, each) for each in (False, True))
            more = with_adapters[0] - without[0], (with_adapters[1] - without[1]) / NUM_ROWS
            print(f"motet's own step {degree} workers: {more[0]} {more[1]:6.0f}")
            sharded.setdefault("motet's own step", {})[degree] = more
    print(
        json.dumps(
            {
                "one_pool_over": over,
                "tokens_of_memory": {name: round(one.tokens, 3) for name, one in shares.items()},
                "more_collectives_and_bytes": sharded,
            }
        )
    )


if __name__ == "__main__":
    main()
