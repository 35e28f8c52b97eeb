"""MIG: profiles of a GPU, the choice of profiles for models, and the plan as Kubernetes takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

from ...workers.costs.devices import DEVICES, Device
from ...workers.costs.operations import kv_bytes_of_a_token, model_size, state_bytes_of_a_sequence
from ...workers.models.config import ModelConfig

# MIG: the profiles of a GPU, where each may lie, and every way to cut the GPU whole.
#
# A GPU has eight slices of memory and seven of compute; the last slice of memory has none of its own. A profile begins
# at a multiple of its memory slices, where the slices below it have the compute that it takes. Its placements follow.

MEMORY_SLICES, COMPUTE_SLICES = 8, 7


@dataclass(frozen=True, order=True)
class Profile:
    memory_slices: int
    compute_slices: int
    name: str  # as NVIDIA's tools call it: 3g.40gb

    @property
    def resource(self) -> str:
        """What the device plugin calls it in Kubernetes."""
        return f"nvidia.com/mig-{self.name}"

    @property
    def starts(self) -> tuple[int, ...]:
        """The memory slices where it may begin."""
        first_slices = range(0, MEMORY_SLICES - self.memory_slices + 1, self.memory_slices)
        return tuple(
            start
            for start in first_slices
            if min(start + self.memory_slices, COMPUTE_SLICES) - start >= self.compute_slices
        )

    def device(self, whole: Device) -> Device:
        """The limits of such a slice of a GPU. A slice has no network of its own."""
        return Device(
            f"{whole.name}, {self.name}",
            whole.flops_per_s * self.compute_slices / COMPUTE_SLICES,
            whole.bytes_per_s * self.memory_slices / MEMORY_SLICES,
            whole.memory_bytes * self.memory_slices / MEMORY_SLICES,
        )


@dataclass(frozen=True)
class MigGpu:
    device: Device
    profiles: tuple[Profile, ...]  # smallest first

    def profile(self, name: str) -> Profile:
        match = next((profile for profile in self.profiles if profile.name == name), None)
        if match is None:
            accepted = ", ".join(profile.name for profile in self.profiles)
            raise ValueError(f"{name!r} is not a profile of {self.device.name}: {accepted} are accepted")
        return match


# Compute and memory slices of each profile. 1g is there twice: with twice the memory it is 1g.20gb of an A100 80GB.
_SLICES = ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8))
_GIGABYTES = {  # of a profile's name, by memory slices
    "A100 SXM 40GB": {1: 5, 2: 10, 4: 20, 8: 40},
    "A100 SXM 80GB": {1: 10, 2: 20, 4: 40, 8: 80},
    "H100 PCIe": {1: 10, 2: 20, 4: 40, 8: 80},
    "H100 SXM": {1: 10, 2: 20, 4: 40, 8: 80},
    "H200": {1: 18, 2: 35, 4: 71, 8: 141},
}
MIG_GPUS = {
    name: MigGpu(
        DEVICES[name],
        tuple(sorted(Profile(memory, compute, f"{compute}g.{size[memory]}gb") for compute, memory in _SLICES)),
    )
    for name, size in _GIGABYTES.items()
}

Placement = tuple[tuple[Profile, int], ...]  # profiles and where they begin, in order


def is_valid(placement: Placement) -> bool:
    """Whether each profile may begin where it does, and no slice is taken twice."""
    slices = [slice_ for profile, start in placement for slice_ in range(start, start + profile.memory_slices)]
    return len(slices) == len(set(slices)) and all(start in profile.starts for profile, start in placement)


@cache
def whole_placements(profiles: tuple[Profile, ...]) -> tuple[Placement, ...]:
    """Every placement to which nothing can be added."""
    return tuple(sorted(set(_extended((), profiles)), key=str))


def _extended(placement: Placement, profiles: tuple[Profile, ...]) -> Iterator[Placement]:
    """Grows from left to right; what is left free must have room for none of the profiles."""
    last = placement[-1] if placement else None
    begin = 0 if last is None else last[1] + last[0].memory_slices
    later = [(profile, start) for profile in profiles for start in profile.starts if start >= begin]
    for slot in later:
        yield from _extended((*placement, slot), profiles)
    if not later and not any(
        is_valid(tuple(sorted((*placement, (profile, start)), key=lambda each: each[1])))
        for profile in profiles
        for start in profile.starts
    ):
        yield placement


@cache
def whole_mixes(profiles: tuple[Profile, ...]) -> tuple[Counter[Profile], ...]:
    """The profiles of each of these placements, without where they lie."""
    mixes = {tuple(sorted(profile for profile, _ in placement)) for placement in whole_placements(profiles)}
    return tuple(Counter(mix) for mix in sorted(mixes))


def placement_of(mix: Counter[Profile]) -> Placement | None:
    """Where these profiles may lie on one GPU; None: they do not fit."""

    def place(profiles: list[Profile], placed: Placement) -> Placement | None:
        if not profiles:
            return tuple(sorted(placed, key=lambda each: each[1]))
        for start in profiles[0].starts:
            longer = (*placed, (profiles[0], start))
            if is_valid(longer) and (placement := place(profiles[1:], longer)) is not None:
                return placement
        return None

    return place(sorted(mix.elements(), reverse=True), ())


def placement_text(placement: Placement) -> str:
    """Profiles in order, each with the memory slice where it begins.

    >>> small, *_, whole = MIG_GPUS["H200"].profiles
    >>> placement_text(placement_of(Counter({small: 2})))
    '1g.18gb at 0, 1g.18gb at 1'
    >>> placement_of(Counter({small: 1, whole: 1})) is None
    True
    """
    return ", ".join(f"{profile.name} at {start}" for profile, start in placement)


# Which MIG profile serves which model, and how few GPUs hold all of them.

_USABLE = 0.95  # of a slice's memory: the rest is for the context of CUDA and activations
# Time by the limits of data sheets over time, in a decode step. Fitted on the published row "3B on 1g.20gb: 8 users in
# 50 ms a token"; benchmarks/papers/mig.py prints what it leaves of the others.
EFFICIENCY = 0.35


@dataclass(frozen=True)
class ModelDemand:
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
    def of(name: str, model: ModelConfig, users: int, context: int, objective_s: float = 0.05) -> ModelDemand:
        size = model_size(model)
        kv_bytes = kv_bytes_of_a_token(model) + state_bytes_of_a_sequence(model) // context
        return ModelDemand(name, size.weights_bytes(), kv_bytes, size.flops_of_a_token, users, context, objective_s)

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


def plan(demands: Sequence[ModelDemand], gpu: MigGpu, efficiency: float = EFFICIENCY) -> Plan:
    """Raises ValueError for a model that no profile can serve."""
    names = [demand.name for demand in demands]
    if len(set(names)) < len(names):
        raise ValueError(f"each model is named once: {sorted(names)}")
    gangs = tuple(choose(demand, gpu, efficiency) for demand in demands)
    slices: Counter[Profile] = Counter()
    for each in gangs:
        slices[each.profile] += each.num_gangs
    return Plan(gangs, pack(slices, gpu), fewest_gpus(slices, gpu))


def choose(demand: ModelDemand, gpu: MigGpu, efficiency: float = EFFICIENCY) -> Gangs:
    """The profile that takes the least of GPUs for all users of a model; of equals the one with fewest gangs."""
    best: tuple[float, int, Gangs] | None = None
    for profile in gpu.profiles:
        if max_users := demand.most_users(profile.device(gpu.device), efficiency):
            number = ceil(demand.users / max_users)
            candidate = (number * share(profile), number, Gangs(demand.name, profile, number, max_users))
            best = candidate if best is None or candidate[:2] < best[:2] else best
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
    for profile in sorted(Counter(slices).elements(), key=lambda each: (share(each), each), reverse=True):
        fitting = [content for content in bins if any(_holds(mix, content + Counter([profile])) for mix in mixes)]
        if fitting:
            fullest = max(fitting, key=lambda content: sum(share(each) for each in content.elements()))
            fullest[profile] += 1
        else:
            bins.append(Counter([profile]))
    placements = [placement_of(content) for content in bins]
    return tuple(placement for placement in placements if placement is not None)


def _holds(mix: Counter[Profile], profiles: Counter[Profile]) -> bool:
    return all(mix[profile] >= number for profile, number in profiles.items())


def fewest_gpus(slices: Mapping[Profile, int], gpu: MigGpu) -> int:
    """GPUs that no packing can do without: by memory slices, compute slices, and slices that are large.

    Each is a weight of profiles. A GPU takes at most the weight of its heaviest mix, whatever lies where.
    """
    weights = [
        {profile: float(profile.memory_slices) for profile in gpu.profiles},
        {profile: float(profile.compute_slices) for profile in gpu.profiles},
        {profile: share(profile) for profile in gpu.profiles},
        *(
            {profile: float(profile.compute_slices >= min_slices) for profile in gpu.profiles}
            for min_slices in (2, 3, 4)
        ),
        *({profile: float(profile.memory_slices >= min_slices) for profile in gpu.profiles} for min_slices in (2, 4)),
    ]
    bounds = [0]
    for weight in weights:
        heaviest = max(
            sum(weight[profile] * number for profile, number in mix.items()) for mix in whole_mixes(gpu.profiles)
        )
        total = sum(weight[profile] * number for profile, number in slices.items())
        bounds.append(ceil(total / heaviest - 1e-9))
    return max(bounds)


# A plan of MIG slices as Kubernetes takes it: the operator's configurations, nodes' labels, gangs' resources.

CONFIG_LABEL = "nvidia.com/mig.config"  # the GPU operator's MIG manager reads it


@dataclass(frozen=True)
class MigManifests:
    """`node_configs`: by node that the plan needs, the value of its label. `settings`: by model, of motet."""

    config_map: dict[str, Any]
    node_configs: tuple[str, ...]
    settings: dict[str, dict[str, Any]]


def mig_manifests(plan: Plan, gpus_per_node: int, name: str = "motet-mig") -> MigManifests:
    """The last node may keep GPUs that are not cut; MIG is off there."""
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node = {gpus_per_node}: a node has one GPU at least")
    nodes = [plan.gpus[first : first + gpus_per_node] for first in range(0, len(plan.gpus), gpus_per_node)]
    configs: dict[str, list[dict[str, Any]]] = {}
    node_configs = []
    for node in nodes:
        devices = _devices(node, gpus_per_node)
        config_name = next((key for key, value in configs.items() if value == devices), None)
        if config_name is None:
            config_name = f"{name}-{len(configs)}"
            configs[config_name] = devices
        node_configs.append(config_name)
    return MigManifests(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"config.yaml": _yaml({"version": "v1", "mig-configs": configs})},
        },
        tuple(node_configs),
        {
            gangs.model: {
                "gang-num-gpus": 1,
                "resource": [f"{gangs.profile.resource}=1"],
                "min-gangs": gangs.num_gangs,
                "max-gangs": gangs.num_gangs,
                "max-num-sequences": gangs.users,
            }
            for gangs in plan.gangs
        },
    )


def _devices(node: tuple[Placement, ...], gpus_per_node: int) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for index, placement in enumerate(node):
        mix = Counter(profile.name for profile, _ in placement)
        entries.append({"devices": [index], "mig-enabled": True, "mig-devices": dict(sorted(mix.items()))})
    if len(node) < gpus_per_node:
        entries.append({"devices": list(range(len(node), gpus_per_node)), "mig-enabled": False})
    return entries


def _yaml(document: dict[str, Any]) -> str:
    import yaml  # loaded here: a plan does without

    text: str = yaml.safe_dump(document, sort_keys=False)
    return text
