"""All registries through which tenants and keys are changed, and their audit log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import msgspec
from redis.asyncio import Redis

from ..redis_deadline import answered_within
from ..registry_keys import SETTINGS, TENANTS_AUDIT, bind_script
from ..tenants.records import Actor, AuditEntry, WrittenEntry, decode_entry, encode_entry, log_entry
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
        self._change_settings = bind_script(client, "administration/change_settings.lua", allow_oom=True)
        self._read_all = bind_script(client, "administration/read_audit.lua")
        self._read_operators = bind_script(client, "administration/read_operators_audit.lua")

    async def read(self, before: str, limit: int, tenant: str = "", user: str = "") -> Sequence[WrittenEntry]:
        """At most `limit` entries that are older than the one with the id `before`, if one is named.

        `tenant`: only those about it. `user`: only what this user of the tenant did. Reads pages.
        """
        end = f"({before}" if before else "+"
        if not tenant:
            return await self._pages(self._read_all, end, limit)
        async with answered_within():
            rows = await self._client.xrevrange(TENANTS_AUDIT + tenant, end, "-", count=None if user else limit)
        tenant_entries = [decode_entry(entry_id, fields["entry"], fields["result"]) for entry_id, fields in rows]
        if user:  # operators have no user
            return [entry for entry in tenant_entries if entry.entry.actor.user == user][:limit]
        by_operators = await self._pages(partial(self._read_operators, tenant=tenant), end, limit)
        return sorted([*tenant_entries, *by_operators], key=_place, reverse=True)[:limit]

    async def _pages(self, read: Callable[..., Awaitable[Any]], end: str, limit: int) -> Sequence[WrittenEntry]:
        entries: list[WrittenEntry] = []
        while len(entries) < limit:
            async with answered_within():
                last, *rows = await read(last=end, count=_PAGE_SIZE)
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
        while True:
            async with answered_within():
                before: str = await self._client.get(SETTINGS) or ""
            if before == text:
                return False
            old = msgspec.json.decode(before or "{}", type=dict[str, object])
            new = msgspec.json.decode(text, type=dict[str, object])
            changed: dict[str, object] = {}
            if before:  # the first settings change nothing
                for name in sorted(old.keys() | new.keys()):  # a release may remove one
                    if old.get(name) != new.get(name):
                        changed[name] = {"from": old.get(name), "to": new.get(name)}
            entry = AuditEntry(
                action="settings.change" if before else "settings.first",
                tenant="",
                changed=changed,
                actor=Actor(kind="configuration"),
            )
            async with answered_within():
                is_noted = await self._change_settings(
                    old_settings=before, new_settings=text, entry=encode_entry(entry)
                )
            if is_noted:
                log_entry(entry)
                return True


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
