"""Which quotas bound a request: those of its tenant, and those of its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..tenants.identity import Identity

Kind = Literal["requests", "tokens"]
Owner = Literal["tenant", "key"]


@dataclass(frozen=True, slots=True)
class RateBound:
    """So many a minute. `name`: of its bucket among those of a tenant."""

    name: str
    kind: Kind
    owner: Owner
    limit: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """`life`: the tenant's, so that who gets its name later begins anew. None: streams are not bound."""

    life: str
    key_id: str
    rates: tuple[RateBound, ...]
    tenant_streams: int | None
    key_streams: int | None

    @property
    def has_streams(self) -> bool:
        return self.tenant_streams is not None or self.key_streams is not None

    @property
    def has_tokens(self) -> bool:
        return any(rate.kind == "tokens" for rate in self.rates)


def bounds_of(identity: Identity) -> Bounds | None:
    """None: nothing bounds its requests."""
    of_tenant, of_key, key_id = identity.tenant.quota, identity.key.quota, identity.key.key_id
    rates = []
    if of_tenant.requests_per_minute is not None:
        rates.append(RateBound("requests", "requests", "tenant", of_tenant.requests_per_minute))
    if of_key.requests_per_minute is not None:
        rates.append(RateBound(f"requests:{key_id}", "requests", "key", of_key.requests_per_minute))
    if of_tenant.tokens_per_minute is not None:
        rates.append(RateBound("tokens", "tokens", "tenant", of_tenant.tokens_per_minute))
    if of_key.tokens_per_minute is not None:
        rates.append(RateBound(f"tokens:{key_id}", "tokens", "key", of_key.tokens_per_minute))
    streams = of_tenant.concurrent_streams, of_key.concurrent_streams
    if not rates and streams == (None, None):
        return None
    return Bounds(identity.tenant.tenant_id, key_id, tuple(rates), *streams)
