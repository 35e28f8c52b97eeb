"""The shares of a gang that its engine has reported, for the routers that connect later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..wire.fair_shares import TenantShare

_MAX_SHARES = 16_384


class KnownShares:
    """The latest share of each tenant. Beyond _MAX_SHARES, idle tenants are dropped, the longest unreported first."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    @property
    def tenants(self) -> Iterable[str]:
        return self._shares.keys()

    def apply(self, changed: Iterable[TenantShare]) -> None:
        for share in changed:
            self._shares.pop(share.tenant, None)
            self._shares[share.tenant] = share
        if len(self._shares) > _MAX_SHARES:
            idle = [tenant for tenant, of in self._shares.items() if not of.num_running and not of.num_waiting]
            for tenant in idle[: _MAX_SHARES // 2]:
                del self._shares[tenant]

    def __iter__(self) -> Iterator[TenantShare]:
        return iter(self._shares.values())

    def of(self, tenants: Iterable[str]) -> list[TenantShare]:
        """The shares of those tenants that are known."""
        return [self._shares[tenant] for tenant in tenants if tenant in self._shares]
