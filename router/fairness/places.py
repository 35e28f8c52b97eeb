"""Who gives way where places are few: whoever has most of them, by its weight.

Longest queue drop (Suter et al., INFOCOM 1998), as at a gang's queue: nobody is refused for the queues of others who
have more there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Taken:
    """Places that a tenant has. `num_promised`: of these, those that it cannot lose any more."""

    num: int = 0
    num_promised: int = 0
    weight: float = 1.0


def who_gives_way(tenant: str, weight: float, taken: Mapping[str, Taken]) -> str | None:
    """Who is to lose a place to a tenant that wants one more; None: nobody has more than it would have."""
    filled = _filled(tenant, weight, taken)
    most: str | None = None
    for other, places in taken.items():
        if other != tenant and places.num > places.num_promised and places.num / places.weight > filled:
            most, filled = other, places.num / places.weight
    return most


def is_in_share(tenant: str, weight: float, taken: Mapping[str, Taken], num_places: int) -> bool:
    """Whether the tenant has no more than its share of so many places once it has one more.

    All who have any and this one share them by weight, and each may have one.
    """
    total = weight + sum(places.weight for other, places in taken.items() if other != tenant)
    return _filled(tenant, weight, taken) * weight <= max(1.0, num_places * weight / total)


def _filled(tenant: str, weight: float, taken: Mapping[str, Taken]) -> float:
    return ((taken[tenant].num if tenant in taken else 0) + 1) / weight
