"""What is known of a tenant, and of an API key, wherever they are needed: plain data."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

_INCARNATION: Final = "~"  # which no tenant's name has
Scope = Literal["infer", "upload", "admin", "metrics"]
ALL_OF_A_TENANT: frozenset[Scope] = frozenset({"infer", "upload", "metrics"})  # the default


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The most that a tenant or a key may have. None: there is no bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and completion
    concurrent_streams: int | None = None  # answers that are made at once
    uploads_per_minute: int | None = None  # of adapters, those that are refused included
    adapters: int | None = None
    stored_bytes: int | None = None  # of uploaded tensors and their pages, all that is on disk
    pinned_bytes: int | None = None  # of pinned adapters, for each gang that keeps them


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A tenant. A tenant without a record has the defaults."""

    name: str
    label: str = ""  # free text of operators
    created_at: float = 0.0  # Unix time, seconds; 0: it came with a configured key
    is_suspended: bool = False
    is_ending: bool = False  # its deletion has begun and has not ended
    is_gone: bool = False  # it was deleted
    num_ended: int = 0  # tenants that had this name before and were deleted, one that is ending included
    weight: float = 1.0  # its share of what gangs compute, beside those of other tenants
    is_background: bool = False  # its requests yield to all others
    quota: Quota = Quota()
    user_quota: Quota = Quota()  # of each of its users

    @property
    def incarnation(self) -> int:
        """How many tenants had this name before; it does not change while this one is being deleted."""
        return self.num_ended - self.is_ending

    @property
    def tenant_id(self) -> str:
        """Differs from that of every other tenant that ever has this name. Things are counted and kept by it, so that
        the next tenant of the name gets nothing of this one. Can be a file's name.
        """
        return make_tenant_id(self.name, self.incarnation)


def make_tenant_id(name: str, incarnation: int) -> str:
    """The first tenant of a name has the name itself."""
    return f"{name}{_INCARNATION}{incarnation}" if incarnation else name


def parse_tenant_id(tenant_id: str) -> tuple[str, int]:
    """The tenant's name and incarnation."""
    name, _, incarnation = tenant_id.partition(_INCARNATION)
    return name, int(incarnation or 0)


class Admission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """When a request was admitted: its writes are refused if its tenant or its user was deleted since."""

    incarnation: int  # of the tenant
    last_event: int  # number of the registry's last event that the router had then
    user: str = ""  # whose key or token the request has


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An API key, without the key itself."""

    key_id: str  # may be shown
    tenant: str
    scopes: frozenset[Scope] = ALL_OF_A_TENANT
    label: str = ""  # free text
    user: str = ""  # of the tenant, whose key it is; empty: the tenant's own
    created_at: float = 0.0  # Unix time, seconds; 0: it was configured
    expires_at: float | None = None  # Unix time, seconds; None: never
    quota: Quota = Quota()  # beside its tenant's
