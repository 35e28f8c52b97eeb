"""A tenant's life: from its creation to its deletion, after which another tenant may get its name.

What is counted goes by the life, not by the name: what a deleted tenant still has under way comes to nobody else.
"""

from __future__ import annotations

from typing import Final

from .records import TenantRecord

_SEPARATOR: Final = "~"  # no tenant's name has it


def life_number(tenant: TenantRecord) -> int:
    """How many tenants had its name before it. While a tenant is being deleted it is still that tenant's."""
    return tenant.num_ended - tenant.is_ending


def life_of(tenant: TenantRecord) -> str:
    """What nobody else has who ever has the tenant's name; of the first one the name itself. May be a file's name."""
    return life_name(tenant.name, life_number(tenant))


def life_name(tenant: str, number: int) -> str:
    """`life_of` the tenant that so many had the name before."""
    return f"{tenant}{_SEPARATOR}{number}" if number else tenant


def parse_life(life: str) -> tuple[str, int]:
    """The tenant's name, and how many had it before."""
    name, _, number = life.partition(_SEPARATOR)
    return name, int(number or 0)
