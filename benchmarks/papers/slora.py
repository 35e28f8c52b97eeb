"""S-LoRA (arXiv 2311.03285): one batch for all adapters against merged bases, padded ranks and a pool of its own.

In virtual time: a step takes 20 ms and 0.1 ms more for each row. Requests on Llama-2-7B's shape come all at once, their
adapters by a power law; the pool is what an A100 80GB has beside one base. Adapters have ranks 8, 16, 32 and 64 in
turn. What is loaded or merged is read from host memory at 25 GB/s, and a merge reads and writes the base once: assumed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, MutableSequence

from motet.benchmarks.papers.policies import Continuous
from motet.benchmarks.papers.virtual_load import BLOCK_SIZE, Job, run
from motet.benchmarks.rigs.published_bases import published_base
from motet.workers.costs.devices import DEVICES
from motet.workers.costs.model_size import kv_bytes_of_a_token, model_size
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


def rank_of(adapter: str) -> int:
    return RANKS[int(adapter) % len(RANKS)]


def pages_of(rank: int) -> int:
    return -(-2 * rank * _SIDES // PAGE_BYTES)


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

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        if not waiting:
            return 0
        if not num_running and waiting[0].adapter != self._merged:
            self._merged = waiting[0].adapter
            assert self._merged is not None
            loaded_s = 2 * rank_of(self._merged) * _SIDES / HOST_BYTES_PER_S
            self._pause_s += loaded_s + 2 * 2 * WEIGHTS_BYTES / DEVICE.bytes_per_s  # the one before is taken out
        ours = [job for job in waiting if job.adapter == self._merged]
        others = [job for job in waiting if job.adapter != self._merged]
        waiting.clear()
        waiting.extend([*ours, *others])
        return len(ours)

    def pause_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s


class OwnPool(Continuous):
    """Adapters have a pool of their own: a request joins only when its adapter has room there."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._users: dict[str, int] = {}

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        for number, job in enumerate(waiting):
            assert job.adapter is not None
            taken = sum(pages_of(rank_of(adapter)) for adapter in {*self._users, job.adapter})
            if taken > self._num_pages:
                return number
            self._users[job.adapter] = self._users.get(job.adapter, 0) + 1
        return len(waiting)

    def end(self, job: Job) -> None:
        assert job.adapter is not None
        self._users[job.adapter] -= 1
        if not self._users[job.adapter]:
            del self._users[job.adapter]


def measure(num_adapters: int, number: int = NUM_JOBS) -> dict[str, float]:
    """Tokens a second of each."""
    jobs = jobs_of(num_adapters, number)

    def paged(rank: Callable[[str], int]) -> float:
        def size(ref: AdapterRef) -> int:
            return pages_of(rank(ref.digest))

        page_s = PAGE_BYTES / HOST_BYTES_PER_S
        return run(jobs, Continuous(), NUM_PAGES, pages_of_adapter=size, load_page_s=page_s).tokens_per_s

    own = int(POOL_SHARE * NUM_PAGES)
    base = [Job(job.prompt, job.answer) for job in jobs]
    return {
        "base alone": run(base, Continuous(), NUM_PAGES).tokens_per_s,
        "one pool": paged(rank_of),
        "padded ranks": paged(lambda _: RANKS[-1]),
        "own pool": run(jobs, OwnPool(own), NUM_PAGES - own, pages_of_adapter=lambda _: 0).tokens_per_s,
        "merged": run(jobs, Merged(), NUM_PAGES, pages_of_adapter=lambda _: 0).tokens_per_s,
    }


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
    print(json.dumps({"one_pool_over": over}))


if __name__ == "__main__":
    main()
