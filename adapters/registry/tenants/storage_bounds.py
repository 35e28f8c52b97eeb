"""How much a tenant and its keys may keep: adapters, bytes of them, and bytes that stay in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import QuotaExceeded
from .records import KeyRecord, TenantRecord


@dataclass(frozen=True, slots=True)
class StorageBound:
    """The most that may be stored by a tenant, with one of its keys, or of a user's. None: any amount."""

    owner: str  # id of the key, or ~user; empty: of the tenant
    adapters: int | None
    stored_bytes: int | None

    @property
    def is_open(self) -> bool:
        return self.adapters is None and self.stored_bytes is None


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Adapters are counted by name; bytes are those of versions, also ones that wait for a sweep, and of files."""

    adapters: int = 0
    stored_bytes: int = 0


def storage_bounds(tenant: TenantRecord, key: KeyRecord, user: str) -> tuple[StorageBound, ...]:
    """The bounds of the tenant, of the key, and of the adapter's `user`; empty: it has no user."""
    of_user = StorageBound(user_owner(user), tenant.user_quota.adapters, tenant.user_quota.stored_bytes)
    return (
        StorageBound("", tenant.quota.adapters, tenant.quota.stored_bytes),
        StorageBound(key.key_id, key.quota.adapters, key.quota.stored_bytes),
        *((of_user,) if user else ()),
    )


def user_owner(user: str) -> str:
    """As which a user's share is counted."""
    return f"~{user}"


def check_storage(bound: StorageBound, use: StorageUse, more: StorageUse) -> None:
    """Raises QuotaExceeded if `more` on top of `use` is over the bound. What adds nothing is always right.

    `more` may be negative: old versions go as new ones come.
    """
    whose = "this tenant's" if not bound.owner else "this user's" if bound.owner.startswith("~") else "this key's"
    adapters, num_bytes = use.adapters + more.adapters, use.stored_bytes + more.stored_bytes
    if bound.adapters is not None and more.adapters > 0 and adapters > bound.adapters:
        raise QuotaExceeded(
            f"{use.adapters} adapters are stored, and {whose} quota is {bound.adapters}: delete one, or ask for more"
        )
    if bound.stored_bytes is not None and more.stored_bytes > 0 and num_bytes > bound.stored_bytes:
        raise QuotaExceeded(
            f"{use.stored_bytes} bytes are stored, and {more.stored_bytes} more are over {whose} quota of "
            f"{bound.stored_bytes}: delete files, or adapters, which count until they have left the disk (within two "
            "hours), or ask for more"
        )


def check_pinned(bound: int | None, new_total: int) -> None:
    """Raises QuotaExceeded if no more than `bound` bytes of adapters may be pinned, and `new_total` would be."""
    if bound is not None and new_total > bound:
        raise QuotaExceeded(
            f"{new_total} bytes of adapters would be pinned, and the quota is {bound}: unpin one, or ask for more"
        )
