"""Pages of KV come into the pool as fast as they are copied, however long the steps beside it take."""

from __future__ import annotations

import random

from motet.tests.rigs.scheduler_rig import asking, scheduler
from motet.workers.plan import MoveEnd, PageMove, SampledToken, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import GangLimits


class Copies:
    """A worker of which nothing is known but when its copies end."""

    def __init__(self) -> None:
        self.under_way: list[PageMove] = []
        self.end = True

    def step(self, s: Scheduler) -> tuple[PageMove, ...]:
        """One step. Returns the copies that it began."""
        plan = s.schedule()
        self.under_way += plan.moves
        ended, self.under_way = (self.under_way, []) if self.end else ([], self.under_way)
        tokens: dict[int, SampledToken | None] = {p.sequence_id: SampledToken(1, None) for p in plan.sequences}
        moved = tuple(MoveEnd(move.number, len(move.target_pages) * 1e-4, None) for move in ended)
        s.commit(plan, StepResult(plan.step, tokens, (), (), moved))
        s.check_integrity()
        return plan.moves


def in_host_memory(num_tokens: int, num_prompts: int) -> tuple[Scheduler, Copies, list[list[int]]]:
    """Prompts that were sent before; their pages are in host memory alone. Steps take as long as 500 copies."""
    num_pages = num_prompts * num_tokens // 4 + 100
    s = scheduler(GangLimits(2 * num_tokens, 100, 4, num_pages, num_tokens, 8), TierSizes(host=num_pages))
    copies = Copies()
    prompts = [[i, *random.Random(i).choices(range(90), k=num_tokens - 1)] for i in range(num_prompts)]
    for i, prompt in enumerate(prompts):
        assert s.add(asking(i, prompt, 1), 0) is None
        while s.has_work():
            copies.step(s)
    assert s.memory.make_room(num_pages, frozenset())
    for _ in range(200):
        s._costs.observe_step(1, 1, 0.05)
        s._costs.observe_step(1, 100, 1.0)
    return s, copies, prompts


def test_a_long_prefix_comes_at_the_speed_of_copies_and_not_of_steps() -> None:
    s, copies, (prompt,) = in_host_memory(16_000, 1)
    assert s.add(asking(5, prompt, 1), 0) is None
    num_steps = 0
    while s._waiting:
        copies.step(s)
        num_steps += 1
    assert s.load().counters.num_pages_in == 3999
    assert num_steps < 10


def test_copies_for_a_sequence_go_on_while_earlier_ones_are_under_way() -> None:
    s, copies, (long, other) = in_host_memory(16_000, 2)
    copies.end = False
    assert s.add(asking(5, long, 1), 0) is None
    assert s.add(asking(6, other[:401], 1), 0) is None
    sizes = [len(move.target_pages) for move in copies.step(s)]
    assert 900 < sizes[0] < 1100  # half of what may come
    assert sizes[1] == 100  # of the other sequence, all
    for _ in range(20):
        copies.step(s)
    coming = [page for move in copies.under_way for page in move.target_pages]
    assert 1900 < len(coming) == len(set(coming)) < 2100  # what is copied within four steps
    copies.end = True
    while s.has_work():
        copies.step(s)
    assert s.load().counters.num_pages_in == 3999 + 100
