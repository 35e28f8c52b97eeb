"""What tenants and their keys have stored, as the registry counts it with each change of a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from .redis_deadline import answered_within
from .registry_keys import STORED, STORED_IS_COUNTED, bind_script
from .tenants.storage_bounds import StorageBound, StorageUse


class StoredCounts:
    """Raises RegistryUnavailable when Redis does not answer."""

    def __init__(self, client: Redis, timeout_s: float) -> None:
        self._client: Any = client
        self._timeout_s = timeout_s
        self._recount_tenant = bind_script(client, "recount_tenant.lua")

    async def of(self, tenant: str, key_id: str) -> tuple[StorageUse, StorageUse]:
        """What the tenant has stored, and what of that was uploaded with the key."""
        async with answered_within(self._timeout_s):
            found: list[str | None] = await self._client.hmget(STORED + tenant, ["", key_id])
        of_tenant, of_key = (_use(text) for text in found)
        return of_tenant, of_key

    async def count_once(self) -> bool:
        """Counts all tenants unless that was done before; whether it did. A registry may be older than the counts."""
        async with answered_within(self._timeout_s):
            if await self._client.exists(STORED_IS_COUNTED):
                return False
        await self.recount()
        async with answered_within(self._timeout_s):
            await self._client.set(STORED_IS_COUNTED, 1)
        return True

    async def recount(self) -> int:
        """Counts all tenants anew, each at one moment, and returns how many have something stored.

        Changes meanwhile are counted, too. One round trip for each tenant.
        """
        tenant, num_tenants = "", 0
        while True:
            async with answered_within(self._timeout_s):
                tenant = await self._recount_tenant(previous=tenant)
            if not tenant:
                return num_tenants
            num_tenants += 1


def bound_args(bounds: Sequence[StorageBound]) -> list[str]:
    """The bounds that are not open, as scripts take them."""
    args = []
    for bound in bounds:
        if not bound.is_open:
            args += [
                bound.key_id,
                *("" if most is None else str(most) for most in (bound.adapters, bound.stored_bytes)),
            ]
    return args


def use_of(adapters: int | str, stored_bytes: int | str) -> StorageUse:
    return StorageUse(int(adapters), int(stored_bytes))


def _use(text: str | None) -> StorageUse:
    return StorageUse() if text is None else use_of(*text.split(" "))
