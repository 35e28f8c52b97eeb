"""All registries through which tenants and keys are changed, and their audit log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec
from redis.asyncio import Redis

from ..redis_deadline import answered_within
from ..registry_keys import AUDIT, AUDIT_ORDER, SETTINGS, TENANTS_AUDIT, bind_script
from ..store import Snapshot, Store, Transaction
from ..tenants.records import Actor, AuditEntry, WrittenEntry, decode_entry
from .key_registry import KeyRegistry
from .tenant_registry import EndOfTenant, TenantRegistry

# The audit log: reading it, the newest entries first, and entries for changes of settings.

_PAGE_SIZE: Final = 1000  # entries that Redis looks at in one go


class AuditLog:
    """It holds the last 100,000 entries of operators and the last 1,000 of each tenant's own.

    Raises RegistryUnavailable as `Registry` does.
    """

    def __init__(self, client: Redis) -> None:
        self._client: Any = client
        self._store = Store(client)
        self._read_page = bind_script(client, "read_audit.lua")

    async def read(self, before: str, limit: int, tenant: str = "", user: str = "") -> Sequence[WrittenEntry]:
        """At most `limit` entries that are older than the one with the id `before`, if one is named.

        `tenant`: only those about it. `user`: only what this user of the tenant did. Reads pages.
        """
        end = f"({before}" if before else "+"
        if not tenant:
            return await self._pages("", end, limit)
        async with answered_within():
            rows = await self._client.xrevrange(TENANTS_AUDIT + tenant, end, "-", count=None if user else limit)
        tenant_entries = [decode_entry(entry_id, fields["entry"], fields["result"]) for entry_id, fields in rows]
        if user:  # operators have no user
            return [entry for entry in tenant_entries if entry.entry.actor.user == user][:limit]
        by_operators = await self._pages(tenant, end, limit)
        return sorted([*tenant_entries, *by_operators], key=_place, reverse=True)[:limit]

    async def _pages(self, tenant: str, end: str, limit: int) -> Sequence[WrittenEntry]:
        logs = {"audit": AUDIT, "audit_order": AUDIT_ORDER, "tenant_audit_prefix": TENANTS_AUDIT}
        entries: list[WrittenEntry] = []
        while len(entries) < limit:
            async with answered_within():
                last, *rows = await self._read_page(**logs, tenant=tenant, last=end, count=_PAGE_SIZE)
            entries += map(decode_entry, rows[::3], rows[1::3], rows[2::3])
            if not last:
                break
            end = f"({last}"
        return entries[:limit]

    async def note_settings(self, settings: Mapping[str, object]) -> bool:
        """Whether these settings differ from those that were noted last. If so, an entry lists what has changed.

        Every router calls it with its settings, and one of them writes. Secrets must not be among them.
        """
        text = msgspec.json.encode(settings, order="sorted").decode()
        row = ("GET", SETTINGS)

        def note(rows: Snapshot) -> Transaction:
            before = rows[row]
            if before == text:
                return Transaction(value=False)
            changed: dict[str, object] = {}
            if before is not None:  # the first settings change nothing
                old = msgspec.json.decode(before, type=dict[str, object])
                new = msgspec.json.decode(text, type=dict[str, object])
                for name in sorted(old.keys() | new.keys()):  # a release may remove one
                    if old.get(name) != new.get(name):
                        changed[name] = {"from": old.get(name), "to": new.get(name)}
            entry = AuditEntry(
                action="settings.first" if before is None else "settings.change",
                tenant="",
                changed=changed,
                actor=Actor(kind="configuration"),
            )
            return Transaction(value=True, writes=[("SET", SETTINGS, text)], entry=entry)

        return bool((await self._store.change(note, [row])).value)


def _place(written: WrittenEntry) -> tuple[int, int]:
    """The entry's id as numbers that sort as entries do; no two have the same."""
    milliseconds, _, number = written.id.partition("-")
    return int(milliseconds), int(number)


@dataclass(frozen=True)
class Administration:
    tenants: TenantRegistry
    keys: KeyRegistry
    audit: AuditLog

    @classmethod
    def of(cls, client: Redis, ends: Sequence[EndOfTenant] = ()) -> Self:
        """`ends`: what else is deleted with a tenant."""
        return cls(TenantRegistry(client, ends), KeyRegistry(client), AuditLog(client))
