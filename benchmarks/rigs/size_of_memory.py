"""What it costs to make room where all adapters of the pool are wanted soon."""

from __future__ import annotations

import time

from motet.workers.memory.paged_memory import AdapterState, PagedMemory
from motet.workers.wire.messages import AdapterRef

PAGES_OF_ADAPTER = 4
_NUM_CALLS = 4


def make_room_ms(num_wanted: int) -> float:
    """CPU milliseconds of a call that evicts half of so many idle adapters, all of them wanted soon."""
    memory = PagedMemory(num_wanted * PAGES_OF_ADAPTER, lambda: 1e-3, lambda *_: 1e-3)
    digests = [f"adapter-{number}" for number in range(num_wanted)]
    spent_s = 0.0
    for _ in range(_NUM_CALLS):
        for digest in digests:
            if memory.adapters.state(digest) is AdapterState.ABSENT:
                _load(memory, digest)
        memory.want_soon(digests)
        began_s = time.thread_time()
        found = memory.make_room(num_wanted // 2 * PAGES_OF_ADAPTER, frozenset())
        spent_s += time.thread_time() - began_s
        assert found, "all that is idle may go if need be"
    return spent_s / _NUM_CALLS * 1e3


def _load(memory: PagedMemory, digest: str) -> None:
    load = memory.begin_load(AdapterRef(digest, {"q_proj": 8}), PAGES_OF_ADAPTER, frozenset())
    assert load is not None
    memory.adapters.finish_load(digest)
