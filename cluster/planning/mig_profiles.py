"""MIG: the profiles of a GPU, where each may lie, and every way to cut the GPU whole.

A GPU has eight slices of memory and seven of compute; the last slice of memory has none of its own. A profile begins at
a multiple of its memory slices, where the slices below it have the compute that it takes. Its placements follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ...workers.costs.devices import DEVICES, Device

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
        found = range(0, MEMORY_SLICES - self.memory_slices + 1, self.memory_slices)
        return tuple(
            start for start in found if min(start + self.memory_slices, COMPUTE_SLICES) - start >= self.compute_slices
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
        found = next((profile for profile in self.profiles if profile.name == name), None)
        if found is None:
            accepted = ", ".join(profile.name for profile in self.profiles)
            raise ValueError(f"{name!r} is not a profile of {self.device.name}: {accepted} are accepted")
        return found


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
    taken = [slice_ for profile, start in placement for slice_ in range(start, start + profile.memory_slices)]
    return len(taken) == len(set(taken)) and all(start in profile.starts for profile, start in placement)


@cache
def whole_placements(profiles: tuple[Profile, ...]) -> tuple[Placement, ...]:
    """Every placement to which nothing can be added."""
    return tuple(sorted(set(_extended((), profiles)), key=str))


def _extended(placement: Placement, profiles: tuple[Profile, ...]) -> Iterator[Placement]:
    """Grows from left to right; what is left free must have room for none of the profiles."""
    last = placement[-1] if placement else None
    begin = 0 if last is None else last[1] + last[0].memory_slices
    later = [(profile, start) for profile in profiles for start in profile.starts if start >= begin]
    for one in later:
        yield from _extended((*placement, one), profiles)
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

    def place(left: list[Profile], placed: Placement) -> Placement | None:
        if not left:
            return tuple(sorted(placed, key=lambda each: each[1]))
        for start in left[0].starts:
            longer = (*placed, (left[0], start))
            if is_valid(longer) and (found := place(left[1:], longer)) is not None:
                return found
        return None

    return place(sorted(mix.elements(), reverse=True), ())


def placement_text(placement: Placement) -> str:
    """Profiles in order, each with the memory slice where it begins."""
    return ", ".join(f"{profile.name} at {start}" for profile, start in placement)
