"""Orders of eviction: seconds spent on getting back what was evicted, for motet's order, plain LRU and plain LFU.

A simulation: the real allocator, adapter cache, prefix cache and idle order serve random traffic in a pool that is too
small for it. A missing page of an adapter costs a copy. A missing page of a prompt that was there before costs the time
to compute it or, with host memory behind the pool, a copy. LRU evicts what was idle longest, LFU what was used least.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from motet.benchmarks.rigs.traffic import ADAPTER_PAGES, Request, Traffic
from motet.workers.memory.page_allocator import IdleOrder
from motet.workers.memory.paged_memory import AdapterState, PagedMemory
from motet.workers.wire.messages import AdapterRef

COMPUTE_S, COPY_S = 0.012, 0.0005  # a page on the machine of docs/benchmarks.md, one thread
NUM_PAGES = 3500
TRAFFIC = {
    "conversations": Traffic(conversations=1.5, num_adapters=40),
    "adapters": Traffic(conversations=0.2, once=5.0, num_adapters=800),
    "mixed": Traffic(conversations=1.0, once=2.0),
    "floods": Traffic(conversations=1.0, once=0.5, flood=15.0),
    "sweep": Traffic(conversations=1.0, once=0.5, sweep=8.0),
}


class LeastRecent(IdleOrder):
    """Plain LRU."""

    now_s = 0.0

    def worth(self, num_uses: float, cost_s: float) -> float:
        return self.now_s


class LeastFrequent(IdleOrder):
    """Plain LFU; of equally used entries the oldest is evicted first."""

    def worth(self, num_uses: float, cost_s: float) -> float:
        return num_uses


ORDERS: dict[str, Callable[[], IdleOrder]] = {"motet": IdleOrder, "LRU": LeastRecent, "LFU": LeastFrequent}


@dataclass
class Spent:
    adapters_s: float = 0.0  # copies of adapters
    prefixes_s: float = 0.0  # what was computed or copied though it had been there
    num_requests: int = 0
    num_adapters_there: int = 0  # requests that found their adapter in the pool

    @property
    def total_s(self) -> float:
        return self.adapters_s + self.prefixes_s

    def __str__(self) -> str:
        there = self.num_adapters_there / self.num_requests
        return f"{self.total_s:8.1f} {self.adapters_s:8.1f} {self.prefixes_s:8.1f} {there:5.0%}"


class Gang:
    """The memory of one gang, and the seconds that its misses cost."""

    def __init__(self, idle: IdleOrder, has_host_tier: bool) -> None:
        self._page_s = COPY_S if has_host_tier else COMPUTE_S
        self._idle = idle
        self._memory = PagedMemory(NUM_PAGES, lambda: COPY_S, lambda *_: self._page_s, idle)
        self._running: list[tuple[float, int, Request, list[int]]] = []
        self._number = 0
        self._filled: dict[int, int] = {}  # pages by conversation, that were once computed
        self.spent = Spent()

    def serve(self, request: Request) -> None:
        self._end_until(request.arrives_s)
        self.spent.num_requests += 1
        memory, keys = self._memory, [f"{request.conversation}/{i}".encode() for i in range(request.num_pages)]
        found = memory.prefixes.find(keys)
        memory.prefixes.acquire(found)
        memory.prefixes.count_uses(found)
        num_new = len(keys) - len(found)
        pages = memory.allocator.allocate(num_new) if self._bring(request, num_new) else None
        if pages is None:
            memory.prefixes.release(found)
            return
        known = self._filled.get(request.conversation, 0)
        self.spent.prefixes_s += max(known - len(found), 0) * self._page_s
        self._filled[request.conversation] = request.num_pages
        for depth, page in enumerate(pages, len(found)):
            memory.prefixes.insert(page, keys[depth], depth)
        self._number += 1
        end = request.arrives_s + request.runs_s
        heapq.heappush(self._running, (end, self._number, request, [*found, *pages]))

    def _bring(self, request: Request, num_pages: int) -> bool:
        """The adapter, used by one more, and so many free pages."""
        memory, digest = self._memory, str(request.adapter)
        if memory.adapters.state(digest) is AdapterState.ABSENT:
            size = ADAPTER_PAGES[request.adapter % len(ADAPTER_PAGES)]
            if memory.begin_load(AdapterRef(digest, {}), size, frozenset()) is None:
                return False
            memory.adapters.finish_load(digest)
            self.spent.adapters_s += size * COPY_S
        else:
            self.spent.num_adapters_there += 1
        memory.adapters.acquire(digest)
        if memory.make_room(num_pages, frozenset()):
            return True
        memory.adapters.release(digest)
        return False

    def _end_until(self, now_s: float) -> None:
        while self._running and self._running[0][0] <= now_s:
            end_s, _, request, pages = heapq.heappop(self._running)
            if isinstance(self._idle, LeastRecent):
                self._idle.now_s = end_s
            self._memory.prefixes.release(pages)
            self._memory.adapters.release(str(request.adapter))


def simulate(make_order: Callable[[], IdleOrder], traffic: Traffic, has_host_tier: bool, seconds: float) -> Spent:
    gang = Gang(make_order(), has_host_tier)
    for request in traffic.draw(seconds, seed=1):
        gang.serve(request)
    return gang.spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=400.0, help="of simulated traffic (default 400)")
    arguments = parser.parse_args()
    print("seconds spent, of these for adapters and for prefixes, and requests that found their adapter in the pool")
    print(f"{'traffic':14} {'host tier':9}" + "".join(f" |{name:>33}" for name in ORDERS))
    ratios: dict[str, list[float]] = {name: [] for name in ORDERS}
    for name, traffic in TRAFFIC.items():
        for has_host_tier in (False, True):
            spent = {o: simulate(make, traffic, has_host_tier, arguments.seconds) for o, make in ORDERS.items()}
            cells = "".join(f" | {each}" for each in spent.values())
            print(f"{name:14} {'yes' if has_host_tier else 'no':9}{cells}", flush=True)
            for order, each in spent.items():
                ratios[order].append(each.total_s / spent["motet"].total_s)
    means = {order: math.exp(sum(map(math.log, found)) / len(found)) for order, found in ratios.items()}
    summary: dict[str, object] = {"benchmark": "eviction"}
    for order in ("LRU", "LFU"):
        summary[f"{order}_over_motet"] = round(means[order], 2)
        summary[f"{order}_over_motet_least"] = round(min(ratios[order]), 2)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
