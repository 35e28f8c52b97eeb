"""Which MIG profile serves which model, and how few GPUs hold all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from ...workers.costs.devices import Device
from ...workers.costs.model_size import kv_bytes_of_a_token, model_size
from ...workers.models.config import ModelConfig
from .mig_profiles import COMPUTE_SLICES, MEMORY_SLICES, MigGpu, Placement, Profile, placement_of, whole_mixes

_USABLE = 0.95  # of a slice's memory: the rest is for the context of CUDA and activations
# Time by the limits of data sheets over time, in a decode step. Fitted on the published row "3B on 1g.20gb: 8 users in
# 50 ms a token"; benchmarks/papers/mig.py prints what it leaves of the others.
EFFICIENCY = 0.35


@dataclass(frozen=True)
class Demand:
    """A model and its load. Sizes in bytes and floating-point operations of one token."""

    name: str
    weights_bytes: float
    kv_bytes: float
    flops: float
    users: int  # sequences at once
    context: int  # tokens of each
    objective_s: float = 0.05  # of a token

    def __post_init__(self) -> None:
        if self.users < 1 or self.context < 1 or self.objective_s <= 0:
            raise ValueError(f"{self.name}: users, context and objective_s are above 0")

    @staticmethod
    def of(name: str, model: ModelConfig, users: int, context: int, objective_s: float = 0.05) -> Demand:
        size = model_size(model)
        kv_bytes = kv_bytes_of_a_token(model)
        return Demand(name, size.weights_bytes(), kv_bytes, size.flops_of_a_token, users, context, objective_s)

    def token_s(self, device: Device, users: int) -> float:
        """The lower bound of a step's time with this number of sequences: for reading weights and KV, or computing."""
        read = self.weights_bytes + users * self.context * self.kv_bytes
        return max(read / device.bytes_per_s, users * self.flops / device.flops_per_s)

    def most_users(self, device: Device, efficiency: float = EFFICIENCY) -> int:
        """Users of one gang on such a device: those that fit, and get each token in time. 0: it cannot serve any."""
        free = device.memory_bytes * _USABLE - self.weights_bytes
        fitting = int(free / (self.context * self.kv_bytes)) if free > 0 else 0
        in_time_s = self.objective_s * efficiency
        by_reading = (in_time_s * device.bytes_per_s - self.weights_bytes) / (self.context * self.kv_bytes)
        by_computing = in_time_s * device.flops_per_s / self.flops
        return max(0, min(fitting, int(by_reading), int(by_computing)))


@dataclass(frozen=True)
class Gangs:
    """How one model is served: gangs of one slice each."""

    model: str
    profile: Profile
    num_gangs: int
    users: int  # of each gang, at most


@dataclass(frozen=True)
class Plan:
    gangs: tuple[Gangs, ...]
    gpus: tuple[Placement, ...]
    at_least: int  # GPUs that any packing of these slices needs


def plan(demands: Sequence[Demand], gpu: MigGpu, efficiency: float = EFFICIENCY) -> Plan:
    """Raises ValueError for a model that no profile can serve."""
    names = [demand.name for demand in demands]
    if len(set(names)) < len(names):
        raise ValueError(f"each model is named once: {sorted(names)}")
    gangs = tuple(choose(demand, gpu, efficiency) for demand in demands)
    slices: Counter[Profile] = Counter()
    for each in gangs:
        slices[each.profile] += each.num_gangs
    return Plan(gangs, pack(slices, gpu), fewest_gpus(slices, gpu))


def choose(demand: Demand, gpu: MigGpu, efficiency: float = EFFICIENCY) -> Gangs:
    """The profile that takes the least of GPUs for all users of a model; of equals the one with fewest gangs."""
    best: tuple[float, int, Gangs] | None = None
    for profile in gpu.profiles:
        if most := demand.most_users(profile.device(gpu.device), efficiency):
            number = ceil(demand.users / most)
            found = (number * share(profile), number, Gangs(demand.name, profile, number, most))
            best = found if best is None or found[:2] < best[:2] else best
    if best is None:
        raise ValueError(
            f"{demand.name}: no profile of {gpu.device.name} holds its weights and gives one user a token in "
            f"{demand.objective_s * 1e3:.0f} ms"
        )
    return best[2]


def share(profile: Profile) -> float:
    """The share of a GPU: the larger of its shares of compute and memory slices."""
    return max(profile.memory_slices / MEMORY_SLICES, profile.compute_slices / COMPUTE_SLICES)


def pack(slices: Mapping[Profile, int], gpu: MigGpu) -> tuple[Placement, ...]:
    """GPUs that hold these slices: the largest first, each where it leaves least room (best fit)."""
    mixes = whole_mixes(gpu.profiles)
    bins: list[Counter[Profile]] = []
    for profile in sorted(Counter(slices).elements(), key=lambda one: (share(one), one), reverse=True):
        fitting = [one for one in bins if any(_holds(mix, one + Counter([profile])) for mix in mixes)]
        if fitting:
            fullest = max(fitting, key=lambda one: sum(share(each) for each in one.elements()))
            fullest[profile] += 1
        else:
            bins.append(Counter([profile]))
    placements = [placement_of(one) for one in bins]
    return tuple(placement for placement in placements if placement is not None)


def _holds(mix: Counter[Profile], wanted: Counter[Profile]) -> bool:
    return all(mix[profile] >= number for profile, number in wanted.items())


def fewest_gpus(slices: Mapping[Profile, int], gpu: MigGpu) -> int:
    """GPUs that no packing can do without: by memory slices, compute slices, and slices that are large.

    Each is a weight of profiles. A GPU takes at most the weight of its heaviest mix, whatever lies where.
    """
    weights = [
        {profile: float(profile.memory_slices) for profile in gpu.profiles},
        {profile: float(profile.compute_slices) for profile in gpu.profiles},
        {profile: share(profile) for profile in gpu.profiles},
        *({profile: float(profile.compute_slices >= least) for profile in gpu.profiles} for least in (2, 3, 4)),
        *({profile: float(profile.memory_slices >= least) for profile in gpu.profiles} for least in (2, 4)),
    ]
    bounds = [0]
    for weight in weights:
        heaviest = max(
            sum(weight[profile] * number for profile, number in mix.items()) for mix in whole_mixes(gpu.profiles)
        )
        total = sum(weight[profile] * number for profile, number in slices.items())
        bounds.append(ceil(total / heaviest - 1e-9))
    return max(bounds)
