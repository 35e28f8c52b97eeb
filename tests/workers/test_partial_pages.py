"""Pages that a sequence shares in part: they are found by their first tokens, and copied before they are written."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.scheduler_rig import Worker, asking, limits, run, scheduler
from motet.workers.memory.prefix_cache import PartialPageIndex, min_common_tokens
from motet.workers.plan import unpacked
from motet.workers.scheduling.scheduler import Scheduler

PROMPT = [*range(1, 31)]  # 30 tokens: seven full pages of four, and the eighth is filled with the answer


def rig(num_pages: int = 60) -> tuple[Scheduler, Worker]:
    of = limits(num_pages, budget=64)
    s, worker = scheduler(of), Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    return s, worker


def ask(s: Scheduler, worker: Worker, sequence_id: int, prompt: list[int], tenant: str = "t") -> tuple[int, int]:
    """Runs a request alone. Returns the tokens that were computed and the pages that were copied."""
    before = worker.num_computed, worker.num_copies
    assert s.add(asking(sequence_id, prompt, max_tokens=6, tenant=tenant), 0) is None
    run(s, worker)
    return worker.num_computed - before[0], worker.num_copies - before[1]


@pytest.mark.parametrize("num_alike", [0, 3, 24, 25, 26, 27, 29, 30])
def test_it_goes_on_where_its_tokens_differ(num_alike: int) -> None:
    s, worker = rig()
    ask(s, worker, 0, PROMPT)
    num_cached = min(num_alike, 29)  # the last one is always computed
    prompt = [*PROMPT[:num_alike], *[90] * (30 - num_alike)]
    assert ask(s, worker, 1, prompt) == (35 - num_cached, num_cached % 4 > 0)
    assert s.load().counters.num_cached_tokens == num_cached


def test_nothing_is_copied_across_tenants() -> None:
    s, worker = rig()
    ask(s, worker, 0, PROMPT)
    assert ask(s, worker, 1, PROMPT[:7], tenant="u") == (12, 0)


def test_the_page_stays_until_the_copy_is_made() -> None:
    """The sequence is cancelled at once and another needs the page, but it is held until the step is over."""
    s, worker = rig(num_pages=12)
    ask(s, worker, 0, PROMPT)
    s.add(asking(1, [*PROMPT[:26], 90, 91, 92], max_tokens=1), 0)
    plan = s.schedule()
    (copy,) = plan.copies
    assert copy.source not in unpacked(plan.sequences[0].pages)
    assert copy.target == unpacked(plan.sequences[0].pages)[6]
    s.cancel(1)
    s.check_integrity()
    assert not s.memory.make_room(12, set())  # all but the one that is copied could go
    assert s.memory.make_room(11, set())
    s._prefixes.end_copies(plan.copies)
    s.check_integrity()
    assert s.memory.make_room(12, set())


def test_random_partial_pages_on_a_small_pool() -> None:
    """The worker checks that every page, copied or not, has the content that its sequence expects."""
    rng = random.Random(5)
    s, worker = rig(num_pages=14)
    for i in range(120):
        s.add(asking(i, [rng.choice([1, 2]) for _ in range(rng.randint(1, 24))], rng.randint(1, 9)), 0)
        if rng.random() < 0.2:
            s.cancel(rng.randrange(i + 1))
        for _ in range(rng.choice([0, 1, 3])):
            if s.has_work():
                plan = s.schedule()
                s.commit(plan, worker.execute(plan))
                s.check_integrity()
    run(s, worker)
    assert worker.num_copies > 10
    assert s.load().counters.num_prefix_evictions > 10


@given(
    pages=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), min_size=8, max_size=8)), max_size=20),
    gone=st.sets(st.integers(0, 19)),
    link=st.integers(0, 1),
    token_ids=st.lists(st.integers(0, 2), max_size=8),
)
@settings(deadline=None)
def test_the_longest_beginning_is_found(
    pages: list[tuple[int, list[int]]], gone: set[int], link: int, token_ids: list[int]
) -> None:
    beginnings = PartialPageIndex()
    alike: dict[bytes, int] = {}
    for number, (before, content) in enumerate(pages):
        key = bytes([number])
        beginnings.add(key, bytes([before]), content)
        if number in gone:
            beginnings.remove(key)
        elif before == link:
            pairs = list(zip(content, token_ids, strict=False))
            alike[key] = next((i for i, (own, other) in enumerate(pairs) if own != other), len(pairs))
    beginnings.remove(b"unknown")
    found = beginnings.find(bytes([link]), token_ids, 8)
    most = max(alike.values(), default=0)
    if most < min_common_tokens(8):
        assert found is None
    else:
        assert found is not None
        assert (found[1], alike[found[0]]) == (most, most)
    assert beginnings.keys() == {bytes([number]) for number in range(len(pages)) if number not in gone}
