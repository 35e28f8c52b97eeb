"""The audit log as it is read: the newest entries first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from redis.asyncio import Redis

from ..registry.redis_deadline import answered_within
from ..registry.registry_scripts import AUDIT
from ..tenants.audit_entry import WrittenEntry, decode_entry
from .change_scripts import READ_AUDIT_SCRIPT

_PAGE_SIZE: Final = 1000  # entries that Redis looks at in one go


class AuditLog:
    """It holds the last 100,000 entries, and a few more. Raises RegistryUnavailable as `Registry` does."""

    def __init__(self, client: Redis, timeout_s: float = 3.0) -> None:
        self._timeout_s = timeout_s
        self._read_script = client.register_script(READ_AUDIT_SCRIPT)

    async def read(self, before: str, limit: int, tenant: str = "") -> Sequence[WrittenEntry]:
        """At most `limit` entries that are older than the one with the id `before`, if one is named.

        `tenant`: only those about it. Reads pages.
        """
        entries: list[WrittenEntry] = []
        end = f"({before}" if before else "+"
        while len(entries) < limit:
            async with answered_within(self._timeout_s):
                last, *found = await self._read_script(keys=[AUDIT], args=[end, _PAGE_SIZE, tenant])
            entries += map(decode_entry, found[::3], found[1::3], found[2::3])
            if not last:
                break
            end = f"({last}"
        return entries[:limit]
