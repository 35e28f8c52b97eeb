"""What a deployment is planned for: traffic, adapters, objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log, sqrt
from statistics import NormalDist, fmean, pstdev

import numpy as np

from ...workers.costs.trace import MOST_TOKENS, TracedRequest

MOST_ADAPTERS = 1_000_000


@dataclass(frozen=True)
class Spread:
    """The distribution of prompts' or answers' tokens: lognormal with this mean and standard deviation."""

    mean: float
    deviation: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MOST_TOKENS or not 0 <= self.deviation <= MOST_TOKENS:
            raise ValueError(
                f"{self.mean:g} tokens, deviation {self.deviation:g}: 1 and 0 to {MOST_TOKENS} are accepted"
            )

    @property
    def square_mean(self) -> float:
        return self.mean**2 + self.deviation**2

    def quantile(self, share: float) -> float:
        """The length that this share of the requests does not exceed; at least the mean, to grow with it."""
        variance = log(1 + (self.deviation / self.mean) ** 2)
        found = exp(log(self.mean) - variance / 2 + sqrt(variance) * NormalDist().inv_cdf(share))
        return max(self.mean, found)


@dataclass(frozen=True)
class Adapters:
    """`shares`: each adapter's share of the requests; the rest are for the base. `ranks`: of the adapters, in turn."""

    shares: tuple[float, ...] = ()
    ranks: tuple[int, ...] = (16,)

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks {self.ranks}: each must be at least 1")
        if any(share < 0 for share in self.shares) or sum(self.shares) > 1 + 1e-9:
            raise ValueError("shares of adapters must not be negative, and their sum must not exceed 1")

    @staticmethod
    def by_power_law(number: int, exponent: float, ranks: tuple[int, ...] = (16,)) -> Adapters:
        """Shares in proportion to i ** -exponent for the i-th adapter; 0: equal shares. No request is for the base."""
        if number < 0 or not isfinite(exponent) or exponent < 0:
            raise ValueError(f"{number} adapters, popularity {exponent:g}: neither may be negative")
        if number > MOST_ADAPTERS:
            raise ValueError(f"{number} adapters: a plan takes at most {MOST_ADAPTERS}")
        weights = np.arange(1.0, number + 1) ** -exponent
        return Adapters(tuple((weights / weights.sum()).tolist()), ranks)

    @property
    def mean_rank(self) -> float:
        return fmean(self.ranks)

    def num_used(self, num_sequences: float) -> float:
        """The expected number of different adapters among this number of sequences."""
        return float(np.sum(1 - (1 - np.array(self.shares)) ** num_sequences)) if self.shares else 0.0

    def missed(self, num_resident: float) -> float:
        """The share of requests whose adapter is not among the `num_resident` most requested ones."""
        shares = sorted(self.shares, reverse=True)
        whole = int(min(num_resident, len(shares)))
        part = shares[whole] * (num_resident - whole) if whole < len(shares) else 0.0
        return max(0.0, sum(shares[whole:]) - part)


@dataclass(frozen=True)
class Traffic:
    requests_per_s: float
    prompt: Spread
    answer: Spread
    adapters: Adapters = Adapters()

    def __post_init__(self) -> None:
        if not 0 < self.requests_per_s < float("inf"):
            raise ValueError(f"{self.requests_per_s:g} requests a second: a number above 0 is needed")

    @staticmethod
    def of_trace(
        requests: Sequence[TracedRequest], ranks: tuple[int, ...] = (16,), requests_per_s: float | None = None
    ) -> Traffic:
        """Means over a trace. Raises ValueError where all requests arrive at once and no rate is given."""
        span_s = max(request.arrival_s for request in requests) - min(request.arrival_s for request in requests)
        if requests_per_s is None and span_s <= 0:
            raise ValueError("all requests of the trace arrive at once: give a rate")
        prompts, answers = ([getattr(each, name) for each in requests] for name in ("prompt_tokens", "output_tokens"))
        counts = Counter(request.adapter for request in requests if request.adapter is not None)
        shares = tuple(count / len(requests) for _, count in sorted(counts.items()))
        return Traffic(
            len(requests) / span_s if requests_per_s is None else requests_per_s,
            Spread(fmean(prompts), pstdev(prompts)),
            Spread(fmean(answers), pstdev(answers)),
            Adapters(shares, ranks),
        )


@dataclass(frozen=True)
class Objectives:
    """`first_token_s`: for a prompt at the 95th percentile of lengths. `token_interval_s`: between two tokens."""

    first_token_s: float = 2.0
    token_interval_s: float = 0.05

    def __post_init__(self) -> None:
        if not (0 < self.first_token_s < float("inf") and 0 < self.token_interval_s < float("inf")):
            raise ValueError(f"{self}: both must be above 0")
