"""What a gang's work costs, measured by how its counters grow from one frame to the next."""

from __future__ import annotations

from ...workers.wire.engine_load import EngineLoad
from .affinity import GangCosts

# How much must be observed to weigh as much as the initial belief, and to halve the weight of earlier observations.
_BELIEF_TOKENS, _HALF_LIFE_TOKENS = 500, 50_000
_BELIEF_PAGES, _HALF_LIFE_PAGES = 50, 5_000
_BELIEF_LOADS, _HALF_LIFE_LOADS = 5, 100
_BELIEF_SPREAD, _HALF_LIFE_STEPS = 10_000, 2_000  # spread: as of a hundred steps, each ten tokens off their mean


class ObservedCosts:
    """Begins with a belief, which fades as more is observed."""

    def __init__(self, belief: GangCosts) -> None:
        self._queued = _FadingRatio(belief.s_per_queued_token, _BELIEF_TOKENS, _HALF_LIFE_TOKENS)
        self._waiting = _FadingRatio(belief.s_per_waiting_token, _BELIEF_TOKENS, _HALF_LIFE_TOKENS)
        self._steps = _StepCost(belief.s_per_token)
        self._loaded = _FadingRatio(belief.s_per_page, _BELIEF_PAGES, _HALF_LIFE_PAGES)
        self._evicted = _FadingRatio(belief.num_evictions_per_load, _BELIEF_LOADS, _HALF_LIFE_LOADS)

    @property
    def costs(self) -> GangCosts:
        return GangCosts(
            self._queued.value,
            self._steps.s_per_token,
            self._loaded.value,
            self._evicted.value,
            self._steps.s_per_step,
            self._waiting.value,
        )

    def observe(self, before: EngineLoad, after: EngineLoad) -> None:
        """Takes in what happened between two loads of one engine."""
        then, now = before.counters, after.counters
        busy_s = now.busy_s - then.busy_s
        if busy_s < 0:  # of a gang of an earlier version, whose last load had no times: a cost is never negative
            return
        num_computed = now.num_computed_tokens - then.num_computed_tokens
        num_loads = now.num_adapter_loads - then.num_adapter_loads
        self._steps.add(now.num_steps - then.num_steps, num_computed, busy_s)
        self._loaded.add(now.loading_s - then.loading_s, now.num_loaded_pages - then.num_loaded_pages)
        self._evicted.add(now.num_adapter_evictions - then.num_adapter_evictions, num_loads)
        # While no sequence waits for compute, time says nothing of a queue: a prompt that comes alone takes a whole
        # step, however short it is. With a queue all time counts, whatever it is spent on.
        if before.gauges.num_waiting > before.gauges.num_waiting_for_adapters:
            # A decoding sequence computes the token that it generated last; all other computed tokens were queued.
            num_generated = now.num_generated_tokens - then.num_generated_tokens
            num_queued = max(0, num_computed - num_generated)
            self._queued.add(busy_s, num_queued)
            self._waiting.add(busy_s, num_queued + now.num_cached_tokens - then.num_cached_tokens)


class _FadingRatio:
    """The ratio of two sums, in which older amounts count less."""

    def __init__(self, belief: float, weight: float, half_life: float) -> None:
        """`weight`, of the belief, and `half_life` are amounts of the denominator."""
        self._numerator, self._denominator, self._half_life = belief * weight, weight, half_life

    @property
    def value(self) -> float:
        return self._numerator / self._denominator

    def add(self, numerator: float, denominator: float) -> None:
        fade = 0.5 ** (denominator / self._half_life)
        self._numerator = fade * self._numerator + numerator
        self._denominator = fade * self._denominator + denominator


class _StepCost:
    """By how many seconds one more token makes a step longer: least squares, in which older steps count less."""

    def __init__(self, belief: float) -> None:
        self._belief = belief
        self._num_steps = self._mean_tokens = self._mean_s = 0.0
        self._tokens_tokens = self._tokens_s = 0.0  # sums of products of deviations from the means

    @property
    def s_per_token(self) -> float:
        # This belief does not fade: steps that are all alike say nothing of the slope, and only noise would be left.
        spread = self._tokens_tokens + _BELIEF_SPREAD
        return max(0.0, (self._tokens_s + _BELIEF_SPREAD * self._belief) / spread)

    @property
    def s_per_step(self) -> float:
        """The mean; 0 before the first step."""
        return self._mean_s

    def add(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Several steps that are reported together count as that many steps of their mean."""
        if num_steps <= 0:
            return
        fade = 0.5 ** (num_steps / _HALF_LIFE_STEPS)
        self._num_steps = fade * self._num_steps + num_steps
        share = num_steps / self._num_steps
        off_tokens, off_s = num_tokens / num_steps - self._mean_tokens, seconds / num_steps - self._mean_s
        self._mean_tokens += share * off_tokens
        self._mean_s += share * off_s
        weight = num_steps * (1 - share)
        self._tokens_tokens = fade * self._tokens_tokens + weight * off_tokens * off_tokens
        self._tokens_s = fade * self._tokens_s + weight * off_tokens * off_s
