"""Tenants share a gang fairly, whatever others do: the scheduler against the bound of virtual token counters."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.scheduler_rig import Worker, WorkerExecutor, asking, limits, scheduler
from motet.tests.rigs.stand_in_engine import INFO
from motet.workers.engine import Engine
from motet.workers.fairness.preemption import choose_victim, gives_place
from motet.workers.fairness.prices import OUTPUT_TOKEN
from motet.workers.fairness.standings import Scheduling
from motet.workers.scheduling.request_limits import GangLimits
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.wire.messages import SequenceRequest


class Gang:
    """A scheduler that steps, and what it has served each tenant by its own count."""

    def __init__(self, of: GangLimits, rng: random.Random | None = None, scheduling: Scheduling = "fair") -> None:
        self.scheduler = Scheduler(
            of, frozenset(), lambda ref: max(ref.module_ranks.values()), scheduling=scheduling
        )
        self.engine = Engine(self.scheduler, WorkerExecutor(Worker(of, rng)), INFO)
        self.requests: dict[int, SequenceRequest] = {}
        self.first_token_at: dict[int, int] = {}  # step, by sequence
        self.num_tokens: Counter[int] = Counter()
        self.ended: set[int] = set()
        self.num_steps = 0

    def add(self, tenant: str, num_prompt: int, max_tokens: int, adapter: str | None = None, **more: object) -> int:
        number = len(self.requests)
        prompt = [(number * 7 + i * (1 + number % 5)) % 98 for i in range(num_prompt)]
        asked = msgspec.structs.replace(asking(number, prompt, max_tokens, adapter, tenant), **more)
        assert self.scheduler.add(asked, 1) is None
        self.requests[number] = asked
        return number

    def step(self) -> None:
        self.num_steps += 1
        for update in self.engine.step():
            self.first_token_at.setdefault(update.sequence_id, self.num_steps)
            self.num_tokens[update.sequence_id] += len(update.token_ids)
            if update.finish_reason or update.error:
                self.ended.add(update.sequence_id)

    def live(self, tenant: str) -> list[int]:
        return [number for number, asked in self.requests.items() if asked.tenant == tenant and number not in self.ended]

    def served(self, tenant: str) -> float:
        """Prompts whose first token came, and tokens, by weight."""
        worth, weight = 0.0, 1.0
        for number in self.first_token_at:
            if (asked := self.requests[number]).tenant == tenant:
                worth += len(asked.prompt_token_ids) + OUTPUT_TOKEN * self.num_tokens[number]
                weight = asked.weight
        return worth / weight


def bound(of: GangLimits, s: Scheduler, least_weight: float) -> float:
    """What two backlogged tenants may differ by: see docs/fairness.md."""
    step = OUTPUT_TOKEN * (of.max_tokens_per_step + of.max_num_sequences)
    sequences = of.max_num_sequences * of.max_model_len / 2
    return 2 * (s._standings.burst + 2 * s._standings.slack + (step + sequences) / least_weight)


def shared(seed: int, scheduling: Scheduling) -> tuple[float, float]:
    """By how much two tenants differed at most who always had something waiting, and by how much they may."""
    rng = random.Random(seed)
    of = limits(rng.randint(24, 60), rng.randint(6, 16), rng.randint(2, 8))
    gang, greedy = Gang(of, rng, scheduling), rng.randint(2, 20)
    weights = {"a": rng.choice([1.0, 1.0, 2.0]), "b": rng.choice([1.0, 1.0, 3.0])}
    worst = 0.0
    start: float | None = None
    for step in range(1500):
        for tenant, depth in (("a", 3), ("b", greedy)):  # one asks for far more than the other
            while len(gang.live(tenant)) < depth * of.max_num_sequences // 2 + 1:
                length = (rng.randint(1, 6), rng.randint(1, 6)) if tenant == "a" else (rng.randint(1, 25), rng.randint(1, 12))
                gang.add(tenant, *length, weight=weights[tenant], priority=rng.choice([0, 0, 1, -3]))
        if step % 400 > 200 and rng.random() < 0.5:  # a third comes and goes
            adapter = rng.choice([None, f"{rng.choice('cdefghijkl')}{rng.randint(1, 4)}"])
            background = rng.random() < 0.3
            gang.add("z", rng.randint(1, 20), rng.randint(1, 10), adapter, is_background=background)
        if rng.random() < 0.1 and (live := gang.live("z")):
            gone = rng.choice(live)
            gang.engine.cancel(gone)
            gang.ended.add(gone)
        gang.step()
        if step == 100:
            start = gang.served("a") - gang.served("b")
        if start is not None:
            worst = max(worst, abs(gang.served("a") - gang.served("b") - start))
        if step % 50 == 0:
            gang.scheduler.check_integrity()
    return worst, bound(of, gang.scheduler, min(weights.values()))


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_two_who_always_wait_are_served_alike_whatever_a_third_does(seed: int) -> None:
    worst, most = shared(seed, "fair")
    assert worst <= most
