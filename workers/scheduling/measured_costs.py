"""Measured costs of computing and copying on this machine, and which of the two restores a page sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import Tier

_FADE = 0.95  # factor on the weight of earlier observations at each new one
_MAX_TIMES_MEAN = 10.0  # larger observations are cut to this multiple of the mean
_NUM_TRUSTED = 8  # observations after which large ones are cut, and the first ones count less
_COLD = 0.05  # factor on the weight of these: a process that just started has slow steps
_MAX_TIMES_EXPECTED = 3.0
_MIN_TOKENS_PER_SEQUENCE = 4  # a step with fewer mostly decodes, and does not show the cost of prompt tokens


@dataclass(frozen=True)
class PageCosts:
    """Seconds a page."""

    compute_s: float = 1e-3
    copy_s: float = 1e-4  # from host memory or disk into the pool
    step_s: float = 1e-3  # of one step, the least time that a copy is waited for


class MeasuredCosts:
    """Exponentially weighted means, which start from a prior. An outlier, such as a stall, counts little."""

    def __init__(self, block_size: int) -> None:
        prior = PageCosts()
        self._block_size = block_size
        self._compute = _FadingMean(prior.compute_s)
        self._copies: dict[Tier, _FadingMean] = {tier: _FadingMean(prior.copy_s) for tier in ("host", "disk")}
        self._step = _FadingMean(prior.step_s)

    def costs(self, tier: Tier) -> PageCosts:
        """The costs of a page that this tier holds."""
        return PageCosts(self._compute.value, self._copies[tier].value, self._step.value)

    def return_s(self, is_in_tier: bool, num_blocks: float = 1.0) -> float:
        """Time to restore an evicted page, which a tier behind the pool may hold.

        `num_blocks`: pages of KV that take as long to compute.
        """
        compute_s = num_blocks * self._compute.value
        return min(self._copies["host"].value, compute_s) if is_in_tier else compute_s

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


class MeasuredStepCosts:
    """Times of steps, by the number of decodes, and by prompt tokens and their context."""

    def __init__(self) -> None:
        prior = PageCosts()
        self.decodes = FadingLine(prior.step_s)  # seconds of a step, by its number of decodes
        self.prompt_tokens = FadingLine(prior.compute_s / 16)  # seconds of a prompt token, by its position

    def step_s(self, num_decodes: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Time of a step; `chunks` as in `observe`."""
        decode_s = self.decodes.at(num_decodes) if num_decodes or chunks else 0.0
        return decode_s + sum(number * self.prompt_tokens.at(start + number // 2) for start, number in chunks)

    def observe(self, num_decodes: int, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Records the time of a step. `chunks`: first position and number of tokens of each prompt chunk."""
        num_tokens = sum(number for _, number in chunks)
        if num_tokens:
            context = sum(number * (start + number / 2) for start, number in chunks) / num_tokens
            decode_s = self.decodes.at(num_decodes)  # without decodes too: what a step costs, whatever it computes
            token_s = max(seconds - decode_s, 0.05 * seconds) / num_tokens
            self.prompt_tokens.add(context, token_s, num_tokens)  # few tokens say little of the cost of many
        elif num_decodes:
            self.decodes.add(num_decodes, seconds, 1)


def is_worth_bringing(num_pages: int, costs: PageCosts, num_spared: int = 0) -> bool:
    """Whether copying `num_pages` into the pool is faster than computing them again, and `num_spared` before them."""
    return num_pages * costs.copy_s + costs.step_s < (num_pages + num_spared) * costs.compute_s


class _FadingMean:
    def __init__(self, prior: float) -> None:
        self._sum, self._weight, self.value = prior, 1.0, prior

    def add(self, amount: float, weight: float) -> None:
        amount = min(amount, _MAX_TIMES_MEAN * self.value * weight)
        self._sum, self._weight = _FADE * self._sum + amount, _FADE * self._weight + weight
        self.value = self._sum / self._weight


class FadingLine:
    """A value that grows linearly with x: weighted regression with a prior, which the first value replaces.

    Values fade only as others of about the same x come, within a factor of two, so that it is still known what large
    ones take after many steps with small ones. Outliers, such as a stall, are cut; the first values, for which that is
    not possible, count little once there are others. Where nearly all values were seen at one x, the slope is taken to
    be small.
    """

    def __init__(self, prior: float) -> None:
        self._mean_y, self._mean_x, self._slope, self._num_values = prior, 0.0, 0.0, 0
        # By the number of bits of x: sums of weights, and of weighted x, y, x * x and x * y.
        self._near: dict[int, list[float]] = {}

    def at(self, x: float) -> float:
        return max(self._mean_y + self._slope * (x - self._mean_x), 0.05 * self._mean_y)

    def add(self, x: float, y: float, weight: float) -> None:
        if self._num_values >= _NUM_TRUSTED:
            y = min(y, _MAX_TIMES_EXPECTED * self.at(x))
        if self._num_values == _NUM_TRUSTED:
            for sums in self._near.values():
                sums[:] = [_COLD * total for total in sums]
        self._num_values += 1
        terms = weight, weight * x, weight * y, weight * x * x, weight * x * y
        before = self._near.get(int(x).bit_length(), (0.0,) * len(terms))
        self._near[int(x).bit_length()] = [_FADE * total + term for total, term in zip(before, terms, strict=True)]
        total_weight, total_x, total_y, total_xx, total_xy = map(sum, zip(*self._near.values(), strict=True))
        mean_x, mean_y = total_x / total_weight, total_y / total_weight
        spread = total_xx / total_weight - mean_x**2 + 0.01 * mean_x**2 + 1e-9
        covariance = total_xy / total_weight - mean_x * mean_y
        self._mean_x, self._mean_y, self._slope = mean_x, mean_y, max(covariance, 0.0) / spread
