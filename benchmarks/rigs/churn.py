"""Traffic whose adapters' popularity changes and whose adapters get new versions, through the memory of a gang."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from motet.workers.memory.page_allocator import IdleOrder
from motet.workers.memory.paged_memory import AdapterState, PagedMemory
from motet.workers.wire.messages import AdapterRef

NUM_ADAPTERS, NUM_PAGES = 1000, 100  # an adapter takes one page
COST_S = 0.0005


@dataclass(frozen=True)
class Churn:
    """A request asks for an adapter by a power law, alpha 1; `None` and 0: never."""

    swap_every: int | None = None  # requests, after which five pairs of adapters change places
    shuffle_every: int | None = None  # requests, after which all do
    update_every: int | None = None  # requests, after which an adapter, popular or not, gets a new version
    scan: float = 0.0  # the last part of each 4,000 requests, each of which asks for a new adapter
    bursts: float = 0.0  # part of the requests that ask for the adapter of the moment: it changes after 300 requests

    def draw(self, num_requests: int, seed: int) -> Iterator[tuple[str, str | None]]:
        """The adapter of each request, and the one that it has outdated just before."""
        rng = random.Random(seed)
        weights = [*accumulate(1 / (rank + 1) for rank in range(NUM_ADAPTERS))]
        by_rank, version = [*range(NUM_ADAPTERS)], [0] * NUM_ADAPTERS

        def popular() -> int:
            return int(by_rank[bisect(weights, rng.random() * weights[-1])])

        for number in range(num_requests):
            outdated = None
            if self.swap_every and number % self.swap_every == 0:
                for _ in range(5):
                    one, other = rng.sample(range(NUM_ADAPTERS), 2)
                    by_rank[one], by_rank[other] = by_rank[other], by_rank[one]
            if self.shuffle_every and number % self.shuffle_every == 0:
                rng.shuffle(by_rank)
            if self.update_every and number % self.update_every == 0:
                updated = popular() if rng.random() < 0.5 else rng.randrange(NUM_ADAPTERS)
                outdated = f"{updated} of version {version[updated]}"
                version[updated] += 1
            if number % 4000 >= 4000 * (1 - self.scan):
                yield f"scanned {number}", outdated
            elif rng.random() < self.bursts:
                yield f"of moment {number // 300}", outdated
            else:
                requested = popular()
                yield f"{requested} of version {version[requested]}", outdated


CHURN = {
    "steady": Churn(),
    "drift": Churn(swap_every=200),
    "shuffles": Churn(shuffle_every=10_000),
    "scans": Churn(scan=0.25),
    "bursts": Churn(bursts=0.3),
    "versions": Churn(update_every=20),
    "more versions": Churn(update_every=5),
}


class LeastRecent(IdleOrder):
    """Plain LRU: what became idle last goes last."""

    _num_added = 0

    def worth(self, num_uses: float, cost_s: float) -> float:
        self._num_added += 1
        return self._num_added


def hit_rate(make_order: Callable[[], IdleOrder], churn: Churn, num_requests: int, hints: bool, seed: int = 1) -> float:
    """Share of requests that find their adapter in the pool. `hints`: the gang learns which adapters are outdated."""
    memory = PagedMemory(NUM_PAGES, lambda: COST_S, lambda *_: COST_S, make_order())
    num_found = 0
    for digest, outdated in churn.draw(num_requests, seed):
        if hints and outdated is not None:
            memory.outdate(outdated)
        if memory.adapters.state(digest) is AdapterState.RESIDENT:
            num_found += 1
        else:
            load = memory.begin_load(AdapterRef(digest, {}), 1, frozenset())
            assert load is not None
            memory.adapters.finish_load(digest)
        memory.adapters.acquire(digest)
        memory.adapters.release(digest)
    return num_found / num_requests
