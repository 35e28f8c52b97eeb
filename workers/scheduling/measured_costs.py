"""What computing and copying cost on this machine, as measured so far, and which of them brings a page back sooner."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Tier

_FADE = 0.95  # what the weight of earlier observations is multiplied by at each new one
_MAX_TIMES_MEAN = 10.0  # an observation above so many times the mean counts as that
_MIN_TOKENS_PER_SEQUENCE = 4  # a step with fewer mostly decodes, and says little of what a prompt's token costs


@dataclass(frozen=True)
class PageCosts:
    """Seconds a page."""

    compute_s: float = 1e-3
    copy_s: float = 1e-4  # from host memory or disk into the pool
    step_s: float = 1e-3  # of one step, which is the least that waiting for a copy takes


class MeasuredCosts:
    """Fading means, which begin with a belief. One observation far above the mean, such as a stall, counts little."""

    def __init__(self, block_size: int) -> None:
        belief = PageCosts()
        self._block_size = block_size
        self._compute = _FadingMean(belief.compute_s)
        self._copies: dict[Tier, _FadingMean] = {tier: _FadingMean(belief.copy_s) for tier in ("host", "disk")}
        self._step = _FadingMean(belief.step_s)

    def costs(self, tier: Tier) -> PageCosts:
        """The costs of a page that this tier holds."""
        return PageCosts(self._compute.value, self._copies[tier].value, self._step.value)

    def observe_step(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        if num_tokens == 0:
            return
        if num_tokens >= _MIN_TOKENS_PER_SEQUENCE * num_sequences:
            self._compute.add(seconds * self._block_size, num_tokens)
        else:
            self._step.add(seconds, 1)

    def observe_copy(self, tier: Tier, num_pages: int, seconds: float) -> None:
        """Pages were copied from the tier or to it."""
        self._copies[tier].add(seconds, num_pages)


def is_worth_bringing(num_pages: int, costs: PageCosts) -> bool:
    """Whether so many pages should be copied into the pool rather than computed again."""
    return num_pages * costs.copy_s + costs.step_s < num_pages * costs.compute_s


class _FadingMean:
    def __init__(self, belief: float) -> None:
        self._sum, self._weight = belief, 1.0

    @property
    def value(self) -> float:
        return self._sum / self._weight

    def add(self, amount: float, weight: float) -> None:
        amount = min(amount, _MAX_TIMES_MEAN * self.value * weight)
        self._sum, self._weight = _FADE * self._sum + amount, _FADE * self._weight + weight
