"""What one gang can serve by the cost model: its requests a second, and which limit it meets first.

A gang in balance: n requests arrive in a step, so that N = n · answer sequences decode, and a step takes
T = F(N, n · prompt). It then serves n / T requests a second. Each cost grows with n, and T by less than n does, so the
most that a gang can serve is found by halving. Every operation takes the time of its own slowest resource, over one
efficiency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, sqrt

from ...adapters.packing.layout import AdapterLayout
from ...workers.config import LATER_BYTES
from ...workers.costs.devices import Device
from ...workers.costs.model_size import gang_weights_bytes, kv_bytes_of_a_token
from ...workers.costs.operations import Batch, Chunk, Operation, step_operations
from ...workers.models.config import ModelConfig
from ...workers.models.sharding import ModelSharding
from .demand import Objectives, Traffic

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
        found = {name.replace("_", " "): value for name, value in vars(self).items()}
        name = max(found, key=lambda each: found[each])
        return name, found[name]


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

    def most(self) -> GangState | None:
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
        batch = Batch(
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
