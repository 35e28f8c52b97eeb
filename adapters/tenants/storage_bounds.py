"""How much a tenant and its keys may keep: adapters, bytes of them, and bytes that stay in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import QuotaExceeded
from .records import KeyRecord, Quota, TenantRecord


@dataclass(frozen=True, slots=True)
class StorageBound:
    """The most that one owner may have stored. None: as much as it likes."""

    owner: str  # a tenant, or "tenant/key_id": all that was uploaded with that key
    adapters: int | None
    stored_bytes: int | None

    @property
    def is_open(self) -> bool:
        return self.adapters is None and self.stored_bytes is None


@dataclass(frozen=True, slots=True)
class StorageUse:
    """What an owner has stored."""

    adapters: int = 0
    stored_bytes: int = 0


def storage_bounds(tenant: TenantRecord, key: KeyRecord | None) -> tuple[StorageBound, StorageBound]:
    """Of the tenant and of the key. `key` None: there is none, as when operators upload for a tenant."""
    quota = Quota() if key is None else key.quota
    owner = "" if key is None else key_owner(tenant.name, key.key_id)
    return (
        StorageBound(tenant.name, tenant.quota.adapters, tenant.quota.stored_bytes),
        StorageBound(owner, quota.adapters, quota.stored_bytes),
    )


def key_owner(tenant: str, key_id: str) -> str:
    """What a key's share of the stored is counted under."""
    return f"{tenant}/{key_id}"


def check_storage(bound: StorageBound, use: StorageUse, more: StorageUse) -> None:
    """Raises QuotaExceeded if `more` on top of `use` is over the bound. What adds nothing is always right.

    `more` may be negative: a new content may be smaller than the one whose place it takes.
    """
    whose = "this tenant's" if "/" not in bound.owner else "this key's"
    adapters = use.adapters + more.adapters
    if bound.adapters is not None and more.adapters > 0 and adapters > bound.adapters:
        raise QuotaExceeded(
            f"{use.adapters} adapters are stored, and {whose} quota is {bound.adapters}: delete one, or ask for more"
        )
    num_bytes = use.stored_bytes + more.stored_bytes
    if bound.stored_bytes is not None and more.stored_bytes > 0 and num_bytes > bound.stored_bytes:
        raise QuotaExceeded(
            f"{use.stored_bytes} bytes of adapters are stored, {more.stored_bytes} more are over {whose} quota of "
            f"{bound.stored_bytes}: delete adapters, or ask for more"
        )


def check_pinned(tenant: TenantRecord, new_total: int) -> None:
    """Raises QuotaExceeded if the tenant may not have `new_total` bytes of adapters pinned."""
    bound = tenant.quota.pinned_bytes
    if bound is not None and new_total > bound:
        raise QuotaExceeded(
            f"{new_total} bytes of adapters would be pinned, and this tenant's quota is {bound}: unpin one, "
            "or ask for more"
        )
