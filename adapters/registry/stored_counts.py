"""Storage in use by tenants, their keys and their users, counted in the registry with each change of a name.

Counts are by owner: empty is the tenant, a key's id the key, and `~user` a user. A name counts once for its tenant and
once for each key and user of its versions; each version counts the bytes of its tensors and of its pages, if these were
recorded. Content that a name no longer has stays on the disk until it is swept, and counts until then. Files are
counted separately, in FILE_BYTES; a bound of bytes is for both together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from redis.asyncio import Redis

from ..adapter import AdapterVersion
from .redis_deadline import answered_within
from .registry_keys import (
    ADAPTERS,
    FILE_BYTES,
    NAMES,
    STORED,
    STORED_IS_COUNTED,
    UNSWEPT,
    UNSWEPT_TENANTS,
    VERSION_NOTES,
    bind_script,
)
from .store import Bound, Command, Numbered, Snapshot, Store, Transaction
from .tenants.records import StorageBound, StorageUse, check_storage, user_owner
from .versions.name_state import NameState, VersionNote, decode_name
from .versions.rollout import VersionFacts

_PAGE: Final = 500  # of tenants, or of a tenant's entries
_NO_NOTE: Final = VersionNote()


class Unswept(NamedTuple):
    """Content that no name of a tenant points to any more, but that counts as its storage until it is swept."""

    digest: str
    entry: str  # as stored in Redis: "event bytes key_id user", without " user" if it was no user's

    @property
    def event_number(self) -> int:
        """The number of the last event that took it from a name of the tenant."""
        return int(self.entry.split(" ", 1)[0])

    @property
    def num_bytes(self) -> int:
        return int(self.entry.split(" ", 2)[1])

    @property
    def content(self) -> Content:
        _, num_bytes, key_id, *user = self.entry.split(" ", 3)
        return Content(self.digest, int(num_bytes), key_id, "".join(user))


class Content(NamedTuple):
    """What a version stores."""

    digest: str
    num_bytes: int
    key_id: str  # its uploader's; empty: unknown
    user: str  # the user that it belongs to; empty: no user


def owners_of(key_id: str, user: str) -> list[str]:
    """The owners whose counts include what this key has uploaded for this user."""
    return ["", *([key_id] if key_id else ()), *([user_owner(user)] if user else ())]


Counts: TypeAlias = dict[str, list[int]]  # owner -> adapters and bytes: what is stored, or what a change adds


def _add_bytes(counts: Counts, content: Content, sign: int = 1) -> None:
    for owner in owners_of(content.key_id, content.user):
        counts.setdefault(owner, [0, 0])[1] += sign * content.num_bytes


def _add_name(counts: Counts, contents: Sequence[Content], sign: int = 1) -> None:
    owners: set[str] = set()
    for content in contents:
        _add_bytes(counts, content, sign)
        owners.update(owners_of(content.key_id, content.user))
    for owner in owners:
        counts[owner][0] += sign


def _contents(state: NameState | None) -> list[Content]:
    contents: list[Content] = []
    if state is None:
        return contents
    versions: list[AdapterVersion | VersionFacts] = [state.current, *state.rollout.others]
    for version in versions:
        note = state.notes.versions.get(version.version, _NO_NOTE)
        contents.append(Content(version.digest, version.num_bytes + version.packed_bytes, note.uploaded_by, note.user))
    return contents


def add_storage_change(
    transaction: Transaction,
    rows: Snapshot,
    tenant: str,
    before: NameState | None,
    after: NameState | None,
    bounds: Sequence[StorageBound] = (),
) -> None:
    """Adds what a change of a name stores, within `bounds`. The first event of the transaction is the change's."""
    counts: Counts = {}
    old, new = _contents(before), _contents(after)
    _add_name(counts, old, -1)
    _add_name(counts, new)
    lost = {content.digest: content for content in old}
    gained = {content.digest: content for content in new}
    for digest, content in lost.items():
        if digest in gained:
            continue
        entry = rows["HGET", UNSWEPT + tenant, digest]
        if entry is None:
            _add_bytes(counts, content)
        else:
            content = Unswept(digest, entry).content
        text = Numbered("", f" {content.num_bytes} {content.key_id}" + (content.user and f" {content.user}"))
        transaction.writes.append(("HSET", UNSWEPT + tenant, digest, text))
        transaction.writes.append(("SADD", UNSWEPT_TENANTS, tenant))
    for digest in gained:
        if digest not in lost and (entry := rows["HGET", UNSWEPT + tenant, digest]) is not None:
            _add_bytes(counts, Unswept(digest, entry).content, -1)
            transaction.writes.append(("HDEL", UNSWEPT + tenant, digest))
    for owner, change in counts.items():
        transaction.increases.append((STORED + tenant, owner, *change))
    transaction.bounds += storage_limits(tenant, bounds, counts)


def add_file_bytes(transaction: Transaction, tenant: str, owners: Iterable[str], num_bytes: int) -> None:
    """Adds bytes of files or of results to the counts of their owners."""
    if num_bytes:
        transaction.increases += [(FILE_BYTES + tenant, owner, num_bytes) for owner in owners]


def storage_limits(
    tenant: str, bounds: Sequence[StorageBound], changes: Mapping[str, Sequence[int]]
) -> Iterator[Bound]:
    """The bounds on counters for a change that adds adapters and bytes by owner. What adds nothing is always right."""
    for bound in bounds:
        adapters, num_bytes = changes.get(bound.owner, (0, 0))
        stored = STORED + tenant, bound.owner
        if bound.adapters is not None and adapters > 0:
            refuse = partial(_refuse, replace(bound, stored_bytes=None), StorageUse(adapters), StorageUse)
            yield Bound(bound.adapters - adapters, [(1, "HGET", *stored)], refuse)
        if bound.stored_bytes is not None and num_bytes > 0:
            counters = [(2, "HGET", *stored), (1, "HGET", FILE_BYTES + tenant, bound.owner)]
            refuse = partial(_refuse, replace(bound, adapters=None), StorageUse(0, num_bytes), partial(StorageUse, 0))
            yield Bound(bound.stored_bytes - num_bytes, counters, refuse)


def _refuse(bound: StorageBound, more: StorageUse, of: Callable[[int], StorageUse], num_stored: int) -> None:
    check_storage(bound, of(num_stored), more)


class StoredCounts:
    """Raises RegistryUnavailable when Redis does not answer."""

    def __init__(self, client: Redis, timeout_s: float) -> None:
        self._client: Any = client
        self._timeout_s = timeout_s
        self._store = Store(client, timeout_s)
        self._scan_hash = bind_script(client, "scan_hash.lua")

    async def of(self, tenant: str, owner: str) -> tuple[StorageUse, StorageUse]:
        """Storage of the tenant, unswept content included, and of that the part of `owner`: a key, or `~user`."""
        async with answered_within(self._timeout_s), self._client.pipeline(transaction=False) as pipeline:
            pipeline.hmget(STORED + tenant, ["", owner])
            pipeline.hmget(FILE_BYTES + tenant, ["", owner])
            counts, file_bytes = await pipeline.execute()
        of_tenant, of_owner = (use_of(*numbers) for numbers in zip(counts, file_bytes, strict=True))
        return of_tenant, of_owner

    async def unswept_bytes(self, tenant: str, digest: str) -> int:
        """The bytes that this content counts although no name of the tenant has it; 0: none."""
        async with answered_within(self._timeout_s):
            entry: str | None = await self._client.hget(UNSWEPT + tenant, digest)
        return 0 if entry is None else Unswept(digest, entry).num_bytes

    async def unswept(self) -> AsyncIterator[tuple[str, Sequence[Unswept]]]:
        """Unswept content of all tenants, page by page. An entry may come twice."""
        cursor = 0
        while True:
            async with answered_within(self._timeout_s):
                cursor, tenants = await self._client.sscan(UNSWEPT_TENANTS, cursor, count=_PAGE)
            for tenant in tenants:
                async for page in self._unswept_of(tenant):
                    yield tenant, page
            if not cursor:
                return

    async def _unswept_of(self, tenant: str) -> AsyncIterator[Sequence[Unswept]]:
        cursor = "0"
        while True:
            async with answered_within(self._timeout_s):
                cursor, text = await self._scan_hash(hash=UNSWEPT + tenant, cursor=cursor, count=_PAGE)
            lines = text.split("\n") if text else []
            yield [Unswept(*pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
            if cursor == "0":
                return

    async def release(self, tenant: str, unswept: Sequence[Unswept]) -> None:
        """Stops counting these, except those that have changed since they were read."""
        rows: list[Command] = [("HGET", UNSWEPT + tenant, content.digest) for content in unswept]

        def release(read: Snapshot) -> Transaction:
            counts: Counts = {}
            transaction = Transaction()
            for row, content in zip(rows, unswept, strict=True):
                if read[row] == content.entry:
                    _add_bytes(counts, content.content, -1)
                    transaction.writes.append(("HDEL", UNSWEPT + tenant, content.digest))
            if read["HLEN", UNSWEPT + tenant] == len(transaction.writes):
                transaction.writes.append(("SREM", UNSWEPT_TENANTS, tenant))
            transaction.increases += [(STORED + tenant, owner, *count) for owner, count in counts.items()]
            return transaction

        await self._store.change(release, [*rows, ("HLEN", UNSWEPT + tenant)])

    async def count_once(self) -> bool:
        """Counts all tenants unless that was done before: a registry may be older than the counts. Whether it did."""
        async with answered_within(self._timeout_s):
            if await self._client.exists(STORED_IS_COUNTED):
                return False
        await self.recount()
        await self._store.set_once(STORED_IS_COUNTED, "1")
        return True

    async def recount(self) -> int:
        """Recounts all tenants, each atomically, and returns how many have something stored.

        Changes meanwhile are counted, too. One round trip for each tenant.
        """
        first, num_tenants = "-", 0
        while True:
            (fields,) = await self._store.read(("ZRANGEBYLEX", NAMES, first, "+", "LIMIT", 0, 1))
            if not fields:
                return num_tenants
            tenant = fields[0].partition("/")[0]
            await self._recount_tenant(tenant)
            first, num_tenants = f"[{tenant}0", num_tenants + 1  # '0' is the character after '/'

    async def _recount_tenant(self, tenant: str) -> None:
        """While its counts stay as they are, so does what they count."""
        counts_row, unswept_row = ("HGETALL", STORED + tenant), ("HVALS", UNSWEPT + tenant)
        names = ("ZRANGEBYLEX", NAMES, f"[{tenant}/", f"({tenant}0")
        records, notes = ("HGET", ADAPTERS, (1,)), ("HGET", VERSION_NOTES, (1,))

        def recount(rows: Snapshot) -> Transaction:
            counts: Counts = {}
            before = rows[counts_row]
            for row in zip(*map(rows.peek, (names, records, notes)), strict=True):
                _add_name(counts, _contents(decode_name(*row)))
            for entry in rows.peek(unswept_row):
                _add_bytes(counts, Unswept("", entry).content)
            transaction = Transaction(writes=[("DEL", STORED + tenant)] if before else [])
            for owner, (adapters, num_bytes) in counts.items():
                transaction.writes.append(("HSET", STORED + tenant, owner, f"{adapters} {num_bytes}"))
            return transaction

        await self._store.change(recount, [names, records, notes, unswept_row, counts_row])


def use_of(count: str | None, file_bytes: str | None) -> StorageUse:
    """What is stored by an owner: its counts in STORED and in FILE_BYTES."""
    adapters, num_bytes = ("0", "0") if count is None else count.split(" ")
    return StorageUse(int(adapters), int(num_bytes) + int(file_bytes or 0))
