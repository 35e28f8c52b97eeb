"""Plans the devices and the gangs' degree for a load with objectives, and what would increase the capacity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, sqrt
from typing import Any

from ...workers.costs.devices import Device
from ...workers.models.config import ModelConfig
from .gang_capacity import GangCapacity, GangState, Objectives, Traffic

_MORE = 1.1  # times each resource, in `gains`
_HOST_SPARE = 1.05  # times the adapters' size, of host memory
MAX_GANGS = 10_000


@dataclass(frozen=True)
class Place:
    """Where a gang is placed: devices of one node."""

    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class ServingPlan:
    """Gangs of one kind that serve a load."""

    gang: GangCapacity
    num_gangs: int
    peak: GangState  # of a gang at its highest load
    state: GangState  # of a gang with its share of the load
    devices_per_node: int
    price_per_hour: float | None = None  # of a device

    @property
    def degree(self) -> int:
        return self.gang.degree

    @property
    def num_devices(self) -> int:
        return self.num_gangs * self.degree

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The place of each gang. Gangs are not split between nodes."""
        per_node = self.devices_per_node // self.degree
        return tuple(
            Place(number // per_node, tuple(range(first, first + self.degree)))
            for number in range(self.num_gangs)
            for first in [number % per_node * self.degree]
        )

    @property
    def host_bytes(self) -> int:
        """Host memory of each worker, for all adapters."""
        adapters = self.gang.traffic.adapters
        return ceil(_HOST_SPARE * len(adapters.shares) * self.gang.adapter_bytes / self.degree)

    @property
    def pool_bytes(self) -> int:
        """The pool of each worker: what is left on its device."""
        return int(self.gang.pool_bytes / self.degree)

    @property
    def max_num_sequences(self) -> int:
        """The number of sequences that is hardly ever exceeded."""
        return max(1, ceil(self.peak.num_sequences + 2 * sqrt(self.peak.num_sequences)))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of motet, without the pool, which a worker sizes by the memory that is left."""
        gang_settings: dict[str, Any] = {
            "gang-num-gpus": 1,
            "tensor-parallel": self.degree,
            "min-gangs": self.num_gangs,
            "max-gangs": self.num_gangs,
            "max-num-sequences": self.max_num_sequences,
            "max-tokens-per-step": self.gang.max_tokens_per_step,
        }
        return gang_settings | ({"host-bytes": self.host_bytes} if self.gang.traffic.adapters.shares else {})

    @property
    def price_per_s(self) -> float | None:
        return None if self.price_per_hour is None else self.price_per_hour * self.num_devices / 3600

    def price_of_million(self, tokens_per_request: float) -> float | None:
        """With this number of tokens of each request, and the load as it is."""
        if self.price_per_s is None:
            return None
        return 1e6 * self.price_per_s / (self.gang.traffic.requests_per_s * tokens_per_request)

    def gains(self) -> Iterator[tuple[str, float]]:
        """How much more a gang serves with 10 % more of each resource, or with looser objectives."""
        gang, device, objectives = self.gang, self.gang.device, self.gang.objectives
        network = device.network_bytes_per_s
        changed = {
            "compute": replace(gang, device=replace(device, flops_per_s=_MORE * device.flops_per_s)),
            "memory bandwidth": replace(gang, device=replace(device, bytes_per_s=_MORE * device.bytes_per_s)),
            "memory": replace(gang, device=replace(device, memory_bytes=_MORE * device.memory_bytes)),
            "network": replace(gang, device=replace(device, network_bytes_per_s=network and _MORE * network)),
            "host link": replace(gang, host_bytes_per_s=_MORE * gang.host_bytes_per_s),
            "token interval": replace(
                gang, objectives=replace(objectives, token_interval_s=_MORE * objectives.token_interval_s)
            ),
            "first token": replace(
                gang, objectives=replace(objectives, first_token_s=_MORE * objectives.first_token_s)
            ),
        }
        for name, other in changed.items():
            state = other.highest_load()
            assert state is not None, "more of a resource never serves less"
            yield name, state.requests_per_s / self.peak.requests_per_s - 1


def options(
    model: ModelConfig,
    device: Device,
    traffic: Traffic,
    objectives: Objectives,
    devices_per_node: int = 8,
    price_per_hour: float | None = None,
    **of_gang: Any,
) -> tuple[tuple[ServingPlan, ...], Mapping[int, str]]:
    """A plan for each degree that can serve the load, the fewest devices first; and why the other degrees cannot."""
    if devices_per_node < 1 or (price_per_hour is not None and price_per_hour < 0):
        raise ValueError(
            f"{devices_per_node} devices a node at {price_per_hour}: at least 1 device and a price of 0 are accepted"
        )
    plans, refused = [], dict[int, str]()
    degree = 1
    while degree <= devices_per_node:
        try:
            gang = GangCapacity(model, device, degree, traffic, objectives, **of_gang)
            if (peak := gang.highest_load()) is None:
                nothing = gang.at(1e-6)
                objective, over = nothing.limits.binding()
                raise ValueError(f"the {objective} objective is missed {over:.3g} times by a gang that is nearly idle")
            num_gangs = ceil(traffic.requests_per_s / peak.requests_per_s)
            if num_gangs > MAX_GANGS:
                raise ValueError(f"{num_gangs} gangs would be needed: at most {MAX_GANGS} are planned")
            state = gang.serving(traffic.requests_per_s / num_gangs)
            plans.append(ServingPlan(gang, num_gangs, peak, state, devices_per_node, price_per_hour))
        except ValueError as error:
            refused[degree] = str(error)
        degree *= 2
    return tuple(sorted(plans, key=lambda plan: (plan.num_devices, plan.degree))), refused


def best(plans: Sequence[ServingPlan]) -> ServingPlan:
    """The cheapest plan if all have a price, else the one with the fewest devices."""
    if all(plan.price_per_s is not None for plan in plans):
        return min(plans, key=lambda plan: (plan.price_per_s or 0.0, plan.num_devices, plan.degree))
    return min(plans, key=lambda plan: (plan.num_devices, plan.degree))
