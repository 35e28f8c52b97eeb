"""Costs of a gang, estimated from counters that were computed from known costs."""

from __future__ import annotations

import random

import pytest

from motet.router.fleet.affinity import GangCosts
from motet.router.fleet.known_gang import ObservedCosts
from motet.tests.rigs.engine_loads import engine_load
from motet.workers.wire.engine_load import EngineLoad

BELIEF = GangCosts(1e-4, 1e-5, 1e-3, 0.0)


class Counters:
    """Loads whose counters grow from one frame to the next."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        self.observed = ObservedCosts(BELIEF)

    def grow(self, gauges: dict[str, int] | None = None, **by: float) -> None:
        """Counters grow `by` that much; `gauges` are as they are after it."""
        now = self.load.flat()
        after = engine_load(**now | {name: now[name] + amount for name, amount in by.items()} | (gauges or {}))
        self.observed.observe(self.load, after)
        self.load = after


def test_a_gang_that_shows_nothing_is_believed() -> None:
    counters = Counters()
    for _ in range(100):
        counters.grow()
    assert counters.observed.costs == BELIEF


def test_a_load_without_times_makes_no_cost_negative() -> None:
    """Such as an engine of an earlier version sends as it fails."""
    counters = Counters()
    counters.grow({"num_waiting": 1}, num_steps=100, num_computed_tokens=1000, busy_s=10.0)
    counters.grow({"num_waiting": 1}, num_steps=1, num_computed_tokens=10, busy_s=-10.0)
    assert min(counters.observed.costs.s_per_queued_token, counters.observed.costs.s_per_waiting_token) > 0


def test_a_steps_length_is_inferred_from_its_tokens() -> None:
    counters, rng = Counters(), random.Random(1)
    for _ in range(500):
        num_tokens = rng.randint(1, 300)
        step_s = (0.02 + 3e-4 * num_tokens) * rng.uniform(0.9, 1.1)
        counters.grow(num_steps=1, num_computed_tokens=num_tokens, num_generated_tokens=1, busy_s=step_s)
    assert counters.observed.costs.s_per_token == pytest.approx(3e-4, rel=0.1)
    assert counters.observed.costs.s_per_queued_token == BELIEF.s_per_queued_token  # nothing ever waited


def test_steps_that_are_all_alike_prove_nothing() -> None:
    counters, rng = Counters(), random.Random(1)
    for _ in range(3000):
        counters.grow(num_steps=1, num_computed_tokens=4, num_generated_tokens=4, busy_s=rng.uniform(0.005, 0.05))
    assert counters.observed.costs.s_per_token == pytest.approx(BELIEF.s_per_token, rel=0.5)


def test_several_steps_in_a_frame_count_as_their_mean() -> None:
    counters, rng = Counters(), random.Random(1)
    for _ in range(200):
        num_steps, num_tokens = rng.randint(1, 4), rng.randint(1, 300)
        busy_s = num_steps * (0.02 + 3e-4 * num_tokens)
        counters.grow(num_steps=num_steps, num_computed_tokens=num_steps * num_tokens, busy_s=busy_s)
    assert counters.observed.costs.s_per_token == pytest.approx(3e-4, rel=0.02)


def test_whatever_holds_a_queue_up_is_in_its_cost() -> None:
    counters = Counters()
    counters.grow({"num_waiting": 3})
    for step in range(2000):  # every fourth step takes in a prompt of 100; 50 sequences decode
        num_prompt = 100 if step % 4 == 0 else 0
        counters.grow(num_steps=1, num_computed_tokens=50 + num_prompt, num_generated_tokens=50, busy_s=0.02)
    assert counters.observed.costs.s_per_queued_token == pytest.approx(0.08 / 100, rel=0.05)


def test_a_queue_gets_shorter_by_what_is_found_in_the_cache_too() -> None:
    counters = Counters()
    counters.grow({"num_waiting": 3})
    for _ in range(1000):
        counters.grow(num_steps=1, num_computed_tokens=100, num_cached_tokens=300, busy_s=0.02)
    costs = counters.observed.costs
    assert costs.s_per_waiting_token == pytest.approx(0.02 / 400, rel=0.05)
    assert costs.s_per_queued_token == pytest.approx(0.02 / 100, rel=0.05)
    assert costs.s_per_step == pytest.approx(0.02, rel=0.05)


def test_who_waits_for_an_adapter_is_no_queue() -> None:
    counters = Counters()
    counters.grow({"num_waiting": 3, "num_waiting_for_adapters": 3})
    for _ in range(100):
        counters.grow(num_steps=1, num_computed_tokens=1, num_generated_tokens=1, busy_s=1.0)
    assert counters.observed.costs.s_per_queued_token == BELIEF.s_per_queued_token


def test_what_loads_and_evictions_cost_and_that_it_may_change() -> None:
    counters = Counters()
    for s_per_page, evictions in ((0.004, 0), (0.0005, 1)):
        for _ in range(1000):
            counters.grow(
                num_adapter_loads=1, num_adapter_evictions=evictions, num_loaded_pages=40, loading_s=40 * s_per_page
            )
        assert counters.observed.costs.s_per_page == pytest.approx(s_per_page, rel=0.1)
        assert counters.observed.costs.num_evictions_per_load == pytest.approx(evictions, abs=0.05)
