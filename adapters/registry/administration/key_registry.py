"""API keys in the registry: created, changed, rotated, deleted. Only the call that creates a key returns it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import structs
from redis.asyncio import Redis

from ...ended_tasks import end_tasks
from ...errors import NoSuchKey, RegistryUnavailable, TenantEnding
from ...names import check_tenant
from ..events import decode_key, key_id_of
from ..launches import launches_by_hash, mark_rows
from ..registry import hash_key
from ..registry_keys import API_KEYS, KEY_ENDS
from ..store import Command, Snapshot, Store, Transaction
from ..tenants.records import Actor, Admission, AuditEntry, KeyRecord, TenantRecord
from .tenant_registry import Found, RecordChanges, Wanted, delete_key

KEY_PREFIX: Final = "motet-"  # lets scanners for secrets recognise a key
_NUM_RANDOM_BYTES: Final = 32
_PAGE_SIZE: Final = 200  # of what is deleted at once: a few milliseconds of Redis's time


class KeyRegistry:
    """Keys are found by their hash, which a router's view knows. Raises RegistryUnavailable as `Registry` does."""

    def __init__(self, client: Redis, clock: Callable[[], float] = time.time) -> None:
        self._changes = RecordChanges(client)
        self._clock = clock

    async def create(self, draft: KeyRecord, actor: Actor, admission: Admission | None = None) -> tuple[KeyRecord, str]:
        """Creates a key with the fields of `draft`, but for id and time. Returns its record and the key itself.

        `admission`: of a tenant's own request. Raises TenantEnding if its tenant is being deleted, CallerGone, and
        TooManyKeys.
        """
        check_tenant(draft.tenant)
        key, key_hash = _new_key()
        record = structs.replace(draft, key_id=key_id_of(key_hash), created_at=self._clock())
        entry = _entry("key.create", record, actor, _audit_fields(record))

        def make(records: Found) -> Wanted:
            _check_not_ending(records.tenant)
            return Wanted(entry=entry, keys={key_hash: record})

        await self._changes.change(record.tenant, (key_hash,), make, admission=admission)
        return record, key

    async def change(self, key_hash: str, key: KeyRecord, fields: Mapping[str, Any], actor: Actor) -> KeyRecord:
        """The key with `fields` in place of what it had; `quota` is a mapping of those of its fields that change.

        `key`: what is known of it. Raises NoSuchKey.
        """
        audit_fields = {name: sorted(value) if name == "scopes" else value for name, value in fields.items()}
        audit_fields.pop("label", None)  # which may say anything

        def make(records: Found) -> Wanted:
            before, changes = _existing_key(records, key_hash), dict(fields)
            if "quota" in changes:
                changes["quota"] = structs.replace(before.quota, **changes["quota"])
            changed = structs.replace(before, **changes)
            return Wanted(entry=_entry("key.change", before, actor, audit_fields), keys={key_hash: changed})

        return _key_of(await self._changes.change(key.tenant, (key_hash,), make), key_hash)

    async def rotate(
        self, key_hash: str, key: KeyRecord, overlap_s: float, actor: Actor, admission: Admission | None = None
    ) -> tuple[KeyRecord, str, KeyRecord]:
        """A new key that may do the same, its record and itself, and the old one's, which ends after `overlap_s`.

        Raises NoSuchKey, also for a key that has expired, TenantEnding, CallerGone, and TooManyKeys.
        """
        new_key, new_hash = _new_key()

        def make(records: Found) -> Wanted:
            _check_not_ending(records.tenant)
            before, now = _existing_key(records, key_hash), self._clock()
            if before.expires_at is not None and before.expires_at <= now:
                raise NoSuchKey(f"the key {key.key_id} has expired: make another one")
            ends_at = now + overlap_s if before.expires_at is None else min(before.expires_at, now + overlap_s)
            new_record = structs.replace(before, key_id=key_id_of(new_hash), created_at=now)
            entry = _entry("key.rotate", before, actor, {"new_key": new_record.key_id, "expires_at": ends_at})
            keys = {key_hash: structs.replace(before, expires_at=ends_at), new_hash: new_record}
            return Wanted(entry=entry, keys=keys)

        done = await self._changes.change(key.tenant, (key_hash, new_hash), make, admission=admission)
        return _key_of(done, new_hash), new_key, _key_of(done, key_hash)

    async def delete(self, key_hash: str, key: KeyRecord, actor: Actor, admission: Admission | None = None) -> None:
        """Deletes the key. Raises NoSuchKey, CallerGone."""

        def make(records: Found) -> Wanted:
            entry = _entry("key.delete", _existing_key(records, key_hash), actor, {})
            return Wanted(entry=entry, keys={key_hash: None})

        await self._changes.change(key.tenant, (key_hash,), make, admission=admission, may_delete=True)

    async def delete_of_user(self, tenant: str, user: str, hashes: Sequence[str], actor: Actor | None) -> int:
        """Deletes those of the given keys that belong to the user, page by page, and returns their number.

        From then on requests that were admitted before leave nothing of this user. The audit log has an entry for each
        page, and one where there are no keys: the user's deletion begins. `actor`: None: it is not known whether there
        is such a user, and the log has no entry.
        """
        entry = None if actor is None else AuditEntry(action="user.delete", tenant=tenant, target=user, actor=actor)

        def make(records: Found) -> Wanted:
            mine = [key_hash for key_hash, key in records.keys.items() if key is not None and key.user == user]
            return Wanted(entry=entry, keys=dict.fromkeys(mine))

        num_deleted = 0
        for start in range(0, max(len(hashes), 1), _PAGE_SIZE):
            page = hashes[start : start + _PAGE_SIZE]
            done = await self._changes.change(tenant, page, make, ended_user=user, may_delete=True)
            num_deleted += len(done.keys)
        return num_deleted


def _new_key() -> tuple[str, str]:
    """A key and its hash."""
    key = KEY_PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)
    return key, hash_key(key)


def _audit_fields(key: KeyRecord) -> dict[str, object]:
    user = {"user": key.user} if key.user else {}
    return {"scopes": sorted(key.scopes), "expires_at": key.expires_at, **user}


def _entry(action: str, key: KeyRecord, actor: Actor, changed: dict[str, object]) -> AuditEntry:
    return AuditEntry(action=action, tenant=key.tenant, target=key.key_id, changed=changed, actor=actor)


def _existing_key(records: Found, key_hash: str) -> KeyRecord:
    record = records.keys[key_hash]
    if record is None:
        raise NoSuchKey("there is no such key any more")
    return record


def _key_of(update: Wanted, key_hash: str) -> KeyRecord:
    record = update.keys[key_hash]
    assert record is not None
    return record


def _check_not_ending(tenant: TenantRecord | None) -> None:
    if tenant is not None and tenant.is_ending:
        raise TenantEnding(f"{tenant.name} is being deleted")


# Keys that ended long ago leave the registry, a few at a time.

KEPT_S: Final = 7 * 86_400  # after a key's end, in which its tenant sees in the list why it is refused
PAGE_SIZE: Final = 100  # keys in one script: a millisecond of Redis' time
REST_S: Final = 300.0
_BETWEEN_PAGES_S: Final = 0.1  # routers follow each deletion by an event
_log = logging.getLogger(__name__)


class EndedKeys:
    """Any number of routers may do this at once: what one has deleted, the others do not find."""

    def __init__(self, client: Redis) -> None:
        self._store = Store(client)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._forget_forever(), name="ended keys")

    async def stop(self) -> None:
        await end_tasks(self._task)

    async def forget(self) -> bool:
        """Deletes at most PAGE_SIZE of the keys that ended longest ago; whether there may be more.

        A key that a launch gives stays: given again, it would be new and without an end. Raises RegistryUnavailable.
        """
        ((now, _),) = await self._store.read(("TIME",))
        before = int(now) - KEPT_S
        (hashes,) = await self._store.read(("ZRANGEBYSCORE", KEY_ENDS, "-inf", before, "LIMIT", 0, PAGE_SIZE))
        rows: list[Command] = [("HGET", API_KEYS, key_hash) for key_hash in hashes]

        def removal(read: Snapshot) -> Transaction:
            change, launches = Transaction(), launches_by_hash(read, hashes)
            for key_hash, row in zip(hashes, rows, strict=True):
                record = read[row]
                key = None if record is None else decode_key(key_hash, record)
                if key is None or key.expires_at is None or key.expires_at > before:
                    change.writes.append(("ZREM", KEY_ENDS, key_hash))
                elif key_hash in launches:
                    change.writes.append(("ZADD", KEY_ENDS, now, key_hash))  # looked at again after as long
                else:
                    delete_key(change, key_hash, key.tenant)
            return change

        if hashes:
            await self._store.change(removal, [*rows, *mark_rows(hashes)])
        return len(hashes) == PAGE_SIZE

    async def _forget_forever(self) -> None:
        while True:
            rest_s = REST_S
            try:
                if await self.forget():
                    rest_s = _BETWEEN_PAGES_S
            except RegistryUnavailable:
                pass  # the view logs it
            except Exception:
                _log.exception("keys that have ended cannot be deleted")
            await asyncio.sleep(rest_s)
