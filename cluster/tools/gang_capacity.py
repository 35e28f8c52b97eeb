"""What one gang can serve by the cost model: its requests a second, and which limit it meets first.

A gang in balance: n requests arrive in a step, so that N = n · answer sequences decode, and a step takes
T = F(N, n · prompt). It then serves n / T requests a second. Each cost grows with n, and T by less than n does, so the
most that a gang can serve is found by halving. Every operation takes the time of its own slowest resource, over one
efficiency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, exp, isfinite, log, sqrt
from statistics import NormalDist, fmean, pstdev

import numpy as np

from ...adapters.packing.layout import AdapterLayout
from ...workers.config import LATER_BYTES
from ...workers.costs.devices import Device
from ...workers.costs.operations import (
    Chunk,
    Operation,
    StepBatch,
    gang_weights_bytes,
    kv_bytes_of_a_token,
    state_bytes_of_a_sequence,
    step_operations,
)
from ...workers.costs.replay import MOST_TOKENS, TracedRequest
from ...workers.models.config import ModelConfig
from ...workers.models.sharding import ModelSharding

# What a deployment is planned for: traffic, adapters, objectives.

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
        """The length that this share of the requests does not exceed; at least the mean, to grow with it.

        >>> round(Spread(mean=200, deviation=100).quantile(0.99))
        537
        """
        variance = log(1 + (self.deviation / self.mean) ** 2)
        length = exp(log(self.mean) - variance / 2 + sqrt(variance) * NormalDist().inv_cdf(share))
        return max(self.mean, length)


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
        """Shares in proportion to i ** -exponent for the i-th adapter; 0: equal shares. No request is for the base.

        >>> [round(share, 2) for share in Adapters.by_power_law(3, 1.0).shares]
        [0.55, 0.27, 0.18]
        """
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


EFFICIENCY = 0.5  # time by data sheets over time; an assumption, for devices on which nothing was measured
HOST_BYTES_PER_S = 25e9  # that a device copies from host memory; an assumption, of PCIe 4.0
MEMORY_SHARE = 0.9  # of a device: the default of --device-memory-share
_KEPT_PAGES = 0.05  # of the pool, for what chance adds to running sequences
_LONG = 0.95  # the share of prompts that are no longer than the one that the first objective is for
_HALVINGS = 40
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Limits:
    """A gang's demand divided by its limit, by resource; at most 1."""

    token_interval: float
    first_token: float
    pool: float
    step_tokens: float  # of --max-tokens-per-step
    prompts: float  # time that computing prompts takes
    host_link: float  # bytes of adapters copied in

    def binding(self) -> tuple[str, float]:
        shares = {name.replace("_", " "): value for name, value in vars(self).items()}
        name = max(shares, key=lambda each: shares[each])
        return name, shares[name]


@dataclass(frozen=True)
class GangState:
    """A gang in balance."""

    requests_per_s: float
    num_sequences: float  # that decode, on average
    step_s: float
    interval_s: float  # of a step with as many sequences as there nearly always are, at most
    first_token_s: float
    kv_bytes: float  # at nearly all times
    adapter_bytes: float  # of those in use
    loads_per_s: float  # adapters copied in
    step_shares: dict[str, float]  # each resource's time over the step's
    limits: Limits


@dataclass(frozen=True)
class GangCapacity:
    """A gang of `degree` devices. Raises ValueError if the base cannot be shared so, or does not fit."""

    model: ModelConfig
    device: Device
    degree: int
    traffic: Traffic
    objectives: Objectives
    efficiency: float = EFFICIENCY
    host_bytes_per_s: float = HOST_BYTES_PER_S
    max_tokens_per_step: int = 2048
    _times: dict[tuple[int, int, int], tuple[float, float, float, float]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency {self.efficiency:g}: above 0 and at most 1")
        longest = ceil(self.traffic.prompt.mean + self.traffic.answer.mean)
        if longest > self.model.max_model_len:
            raise ValueError(f"{longest} tokens of a mean request: the base has {self.model.max_model_len}")
        _ = self._layout
        if self.pool_bytes <= 0:
            raise ValueError(f"{self.degree} of {self.device.name} cannot hold the base")

    @cached_property
    def _layout(self) -> AdapterLayout:
        return ModelSharding(self.model, self.degree).layout(BLOCK_SIZE, "bfloat16")

    @property
    def pool_bytes(self) -> float:
        """Of the gang: what weights leave."""
        usable = self.device.memory_bytes * MEMORY_SHARE - LATER_BYTES
        return usable * self.degree - gang_weights_bytes(self.model, self.degree)

    @cached_property
    def adapter_bytes(self) -> float:
        """Of one adapter on all workers, by the mean over ranks."""
        modules = self._layout.shape.modules
        sizes = [
            self._layout.num_pages(dict.fromkeys(modules, rank)) * self._layout.page_bytes
            for rank in self.traffic.adapters.ranks
        ]
        return self.degree * sum(sizes) / len(sizes)

    @property
    def _context(self) -> int:
        """Tokens of a running sequence on average: those with long answers run for longer."""
        answer = self.traffic.answer
        return ceil(self.traffic.prompt.mean + answer.square_mean / (2 * answer.mean))

    @property
    def _prompt_tokens(self) -> int:
        """Prompts with the traffic's average number of tokens, and of pairs of tokens."""
        return ceil(self.traffic.prompt.square_mean / self.traffic.prompt.mean)

    def highest_load(self) -> GangState | None:
        """The state at the highest load that it can serve; None: it misses the objectives at any load."""
        low, high = 0.0, 1.0
        if self._fits(high):
            while self._fits(2 * high):
                high *= 2
            low, high = high, 2 * high
        low = _halved(low, high, self._fits)
        return self.at(low) if low > 0 else None

    def serving(self, requests_per_s: float) -> GangState:
        """The state at this rate of requests, which it must be able to serve."""
        high = 1.0
        while high < 1e12 and self.at(high).requests_per_s < requests_per_s:
            high *= 2
        return self.at(_halved(0.0, high, lambda n: self.at(n).requests_per_s <= requests_per_s))

    def _fits(self, arrivals: float) -> bool:
        return self.at(arrivals).limits.binding()[1] <= 1

    def at(self, arrivals: float) -> GangState:
        """The state with this number of arrivals in a step."""
        traffic, objectives = self.traffic, self.objectives
        num_sequences = arrivals * traffic.answer.mean
        prompts = arrivals * traffic.prompt.mean / self._prompt_tokens
        peak = num_sequences + 2 * sqrt(num_sequences)
        computed = max(1.0, num_sequences)  # by a step; while there is none, no step is made
        step_s, *resources = self._mean_times(computed, prompts)
        interval_s = self._mean_times(max(1.0, peak), prompts * max(1.0, peak) / computed)[0]
        requests_per_s = arrivals / step_s
        kv_bytes = peak * (self._context + BLOCK_SIZE / 2) * kv_bytes_of_a_token(self.model, degree=self.degree)
        kv_bytes += peak * state_bytes_of_a_sequence(self.model)
        used_bytes = traffic.adapters.num_used(max(1.0, peak)) * self.adapter_bytes  # of one sequence, if any runs
        room = self.pool_bytes * (1 - _KEPT_PAGES)
        resident = max(0.0, room - kv_bytes) / self.adapter_bytes
        loads_per_s = requests_per_s * traffic.adapters.missed(resident)
        busy = requests_per_s * self._prompt_s
        first_token_s = self._first_token_s(num_sequences, interval_s, busy)
        return GangState(
            requests_per_s,
            num_sequences,
            step_s,
            interval_s,
            first_token_s,
            kv_bytes,
            used_bytes,
            loads_per_s,
            dict(
                zip(
                    ("compute", "memory", "network"),
                    [each / step_s for each in resources],
                    strict=True,
                )
            ),
            Limits(
                interval_s / objectives.token_interval_s,
                first_token_s / objectives.first_token_s,
                (kv_bytes + used_bytes) / room,
                (peak + arrivals * traffic.prompt.mean) / self.max_tokens_per_step,
                busy,
                loads_per_s * self.adapter_bytes / (self.host_bytes_per_s * self.degree),
            ),
        )

    def _first_token_s(self, num_sequences: float, interval_s: float, busy: float) -> float:
        """A long prompt's: the running step, the prompts before it (M/G/1), and its own chunks."""
        if busy >= 1:
            return float("inf")
        prompt = self.traffic.prompt
        varies = prompt.square_mean / prompt.mean**2
        queue_s = busy * self._prompt_s * varies / (2 * (1 - busy))
        longest = min(ceil(prompt.quantile(_LONG)), self.model.max_model_len)
        chunks = ceil(longest / max(1.0, self.max_tokens_per_step - num_sequences))
        low = int(num_sequences)
        decode_s = self._mean_times(num_sequences, 0.0)[0]
        with_prompt_s = _between(
            num_sequences - low, self._step(low, 1, longest)[0], self._step(low + 1, 1, longest)[0]
        )
        return interval_s + queue_s + (chunks - 1) * decode_s + with_prompt_s

    @cached_property
    def _prompt_s(self) -> float:
        """Of a prompt's products and collectives alone: what it adds to steps that read the weights anyway."""
        operations = self._operations(0, 1, self._prompt_tokens)
        times = [operation.times_s(self.device, self.degree) for operation in operations]
        share = self.traffic.prompt.mean / self._prompt_tokens
        return share * sum(max(compute_s, network_s) for compute_s, _, network_s in times) / self.efficiency

    def _mean_times(self, num_sequences: float, prompts: float) -> tuple[float, ...]:
        """A step's time, and by each resource, of numbers that need not be whole."""
        low, first = int(num_sequences), int(prompts)
        size = self._prompt_tokens
        rows = [
            [
                _between(num_sequences - low, a, b)
                for a, b in zip(self._step(low, number, size), self._step(low + 1, number, size), strict=True)
            ]
            for number in (first, first + 1)
        ]
        return tuple(_between(prompts - first, a, b) for a, b in zip(*rows, strict=True))

    def _step(self, num_sequences: int, prompts: int, prompt_tokens: int) -> tuple[float, float, float, float]:
        key = (num_sequences, prompts, prompt_tokens)
        if key not in self._times:
            operations = self._operations(*key)
            total = sum(operation.seconds(self.device, self.degree) for operation in operations)
            each = [operation.times_s(self.device, self.degree) for operation in operations]
            compute, memory, network = (sum(times) for times in zip(*each, strict=True)) if each else (0.0, 0.0, 0.0)
            e = self.efficiency
            self._times[key] = total / e, compute / e, memory / e, network / e
        return self._times[key]

    def _operations(self, num_sequences: int, prompts: int, prompt_tokens: int) -> tuple[Operation, ...]:
        adapters = self.traffic.adapters
        batch = StepBatch(
            (self._context,) * num_sequences,
            (Chunk(0, prompt_tokens),) * prompts,
            adapters.num_used(num_sequences + prompts),
            adapters.mean_rank,
        )
        return step_operations(self.model, batch, self.degree)


def _between(share: float, low: float, high: float) -> float:
    return low + share * (high - low)


def _halved(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """The largest number between them for which it holds, as it does for `low`."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
