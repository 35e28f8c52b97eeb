"""Which tenant loses a place in a full queue: the one that uses most of it, by its weight.

Longest queue drop (Suter et al., INFOCOM 1998), as in a gang's queue: no tenant is refused because of the queue of a
tenant that has more there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class QueueUse:
    """Places that a tenant has in a queue. `num_committed`: of these, those that it cannot lose any more."""

    num: int = 0
    num_committed: int = 0
    weight: float = 1.0


def tenant_to_preempt(tenant: str, weight: float, uses: Mapping[str, QueueUse]) -> str | None:
    """The tenant that loses a place to `tenant`, which wants one more; None: no tenant has more than it would have."""
    highest = _load(tenant, weight, uses)
    found: str | None = None
    for other, use in uses.items():
        if other != tenant and use.num > use.num_committed and use.num / use.weight > highest:
            found, highest = other, use.num / use.weight
    return found


def is_in_share(tenant: str, weight: float, uses: Mapping[str, QueueUse], num_places: int) -> bool:
    """Whether the tenant has no more than its share of `num_places` once it has one more.

    It shares them by weight with the tenants that have any. Each may have one.
    """
    total = weight + sum(use.weight for other, use in uses.items() if other != tenant)
    return _load(tenant, weight, uses) * weight <= max(1.0, num_places * weight / total)


def _load(tenant: str, weight: float, uses: Mapping[str, QueueUse]) -> float:
    """The tenant's places with one more, divided by its weight."""
    return ((uses[tenant].num if tenant in uses else 0) + 1) / weight
