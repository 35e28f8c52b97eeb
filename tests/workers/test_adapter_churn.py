"""Which adapters and pages stay while popularity changes, and while names move to new versions."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest

from motet.benchmarks.rigs.churn import CHURN, LeastRecent, hit_rate
from motet.workers.memory import page_allocator
from motet.workers.memory.page_allocator import IdleOrder, UseCount
from motet.workers.memory.paged_memory import AdapterState, PagedMemory
from motet.workers.wire.messages import AdapterRef

NUM_REQUESTS = 12_000


@pytest.mark.parametrize("name", CHURN)
def test_as_many_find_their_adapter_as_with_the_best_of_lru_and_counts_for_ever(name: str) -> None:
    churn = CHURN[name]
    with patch.multiple(page_allocator, HALF_LIFE=math.inf, MOST=math.inf):
        unaged = hit_rate(IdleOrder, churn, NUM_REQUESTS, hints=False)
    best = max(unaged, hit_rate(LeastRecent, churn, NUM_REQUESTS, hints=False))
    assert hit_rate(IdleOrder, churn, NUM_REQUESTS, hints=True) >= 0.99 * best


def memory_of(num_pages: int) -> PagedMemory:
    return PagedMemory(num_pages, lambda: 0.001, lambda *_: 0.001)


def use(memory: PagedMemory, digest: str) -> None:
    if memory.adapters.state(digest) is AdapterState.ABSENT:
        assert memory.begin_load(AdapterRef(digest, {}), 1, frozenset()) is not None
        memory.adapters.finish_load(digest)
    memory.adapters.acquire(digest)
    memory.adapters.release(digest)


def is_here(memory: PagedMemory, digest: str) -> bool:
    return memory.adapters.state(digest) is AdapterState.RESIDENT


def test_what_was_used_a_thousand_times_does_not_stay_a_thousand_rounds() -> None:
    memory = memory_of(10)
    for _ in range(1000):
        use(memory, "once popular")
    num_loads = 0
    while is_here(memory, "once popular"):
        use(memory, f"another {num_loads}")
        num_loads += 1
        assert num_loads <= 10 * (page_allocator.MOST + 1)
    assert num_loads > 10, "it went like one that was used once"


def test_uses_of_long_ago_count_less() -> None:
    uses = UseCount()
    for _ in range(8):
        uses.add(0.0)
    assert uses.value == 8.0
    uses.add(page_allocator.HALF_LIFE)
    assert uses.value == 5.0
    uses.add(100 * page_allocator.HALF_LIFE)
    assert uses.value == pytest.approx(1.0)


def test_outdated_adapters_go_first_unless_they_are_used_again() -> None:
    memory = memory_of(4)
    for _ in range(20):
        for digest in ("old", "wanted again", "in use"):
            use(memory, digest)
    use(memory, "rare")
    memory.adapters.acquire("in use")
    for digest in ("old", "wanted again", "in use", "unknown"):
        memory.outdate(digest)
    memory.check_integrity([])
    use(memory, "wanted again")
    use(memory, "new")
    assert [is_here(memory, digest) for digest in ("old", "wanted again", "in use", "rare")] == [
        False,
        True,
        True,
        True,
    ]
    memory.adapters.release("in use")
    use(memory, "newer")
    assert [is_here(memory, digest) for digest in ("wanted again", "in use", "rare")] == [True, False, True]
    memory.check_integrity([])


def test_pages_of_outdated_adapters_go_before_others() -> None:
    memory = memory_of(6)
    pages = memory.allocator.allocate(6) or ()
    for page in pages:
        adapter = "old" if page in pages[:3] else "current"
        assert memory.prefixes.insert(page, bytes([page]), 0, adapter)
    memory.prefixes.count_uses(pages[:3])
    memory.prefixes.release(pages)
    memory.outdate("old")
    memory.check_integrity([])
    assert memory.make_room(3, frozenset())
    assert [page for page in pages if memory.prefixes.page_of(bytes([page])) is None] == [*pages[:3]]
    memory.check_integrity([])
