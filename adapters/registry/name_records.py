"""The registry's records of names. Each change of one is a pure function of its `NameState` (`name_state.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
from msgspec import structs
from redis.asyncio import Redis

from ..adapter import AdapterVersion
from ..errors import NameTaken, NoSuchName, VersionRefused, quote
from ..names import check_name, check_tenant, owner_of
from .events import AdapterDeleted, decode_tenant, encode_facts
from .registry_keys import ADAPTERS, CANARIES, NAMES, PINNED, PINS, TENANTS, VERSION_NOTES, VERSIONS
from .store import Bound, Command, Numbered, Snapshot, Store, Transaction, Write, caller_rows, check_caller
from .stored_counts import add_storage_change
from .tenants.records import Admission, AuditEntry, StorageBound, check_pinned
from .versions.name_state import NO_NOTES, NameState, VersionNote, changed_fields, decode_name, with_upload
from .versions.pins import Pin, pin_of
from .versions.rollout import MAX_CANARIES, MAX_PINS, MAX_PINS_IN_ALL, versions_of

_SUBJECT: Final = "this adapter keeps"
_CALLER_GONE: Final = "this tenant, or its user, was deleted meanwhile"
_encode = msgspec.json.Encoder().encode


class NameRecords:
    """Raises RegistryUnavailable when Redis does not answer; then a change may or may not have happened."""

    def __init__(self, client: Redis, timeout_s: float = 3.0, clock: Callable[[], float] = time.time) -> None:
        self._store = Store(client, timeout_s)
        self._clock = clock

    async def get(self, tenant: str, name: str) -> NameState:
        """Raises NoSuchName if the tenant has no adapter of this name."""
        field = f"{tenant}/{name}"
        rows = _rows_of(field)
        state, _ = _read_name(Snapshot(rows, await self._store.read(*rows)), field)
        return _existing(state, name)

    async def register(
        self,
        tenant: str,
        name: str,
        *,
        digest: str,
        module_ranks: Mapping[str, int],
        num_bytes: int,
        packed_bytes: int = 0,
        base: str = "",
        response_template: str = "",
        invocation_token_ids: tuple[int, ...] = (),
        own_text: str = "",
        num_labels: int = 0,
        activate: bool = True,
        must_be_new: bool = False,
        note: VersionNote | None = None,
        admission: Admission | None = None,
        entry: AuditEntry | None = None,
        bounds: Sequence[StorageBound] = (),
    ) -> tuple[AdapterVersion, AdapterVersion, bool]:
        """The version that has this digest and these forms, the name's current version, and whether this is new.

        The current version with the same three is taken for the same upload; where the new one would not be current,
        any version of the name is. Raises VersionRefused for the first version of a name that is not to be current,
        NameTaken for a name that there is, if it `must_be_new`, and QuotaExceeded if what is stored would be over one
        of the bounds: that is decided where it is counted. `admission`: of the request; None: motet's own change.
        Raises CallerGone if its tenant is being deleted, or was, or its user was, or the user that the version belongs
        to: the next one of that name gets nothing of it. `entry`: for the audit log.
        """
        check_tenant(tenant)
        check_name(name)
        new_note = note or VersionNote()

        def add(state: NameState | None, last_version: int, now: float) -> tuple[NameState, int, AdapterVersion | None]:
            if state is not None and must_be_new:
                raise NameTaken(f"there is an adapter {quote(name)} already")
            if state is not None:
                candidates = [state.current] if activate else [state.current, *versions_of(state.current)]
                identity = digest, response_template, own_text
                same = next(
                    (
                        candidate
                        for candidate in candidates
                        if (candidate.digest, candidate.response_template, candidate.own_text) == identity
                    ),
                    None,
                )
                if same is not None:
                    return state, last_version, same
            version = last_version + 1
            facts = (digest, module_ranks, num_bytes, now, packed_bytes, base, response_template, invocation_token_ids)
            upload = AdapterVersion(tenant, name, version, *facts, own_text, num_labels)
            return with_upload(state, upload, new_note, activate=activate, now=now), version, None

        state, duplicate, version = await self._change(f"{tenant}/{name}", add, entry, admission, new_note.user, bounds)
        if duplicate is not None:
            return duplicate, state.current, False
        new_version = state.current if activate else state.find(str(version))
        return new_version, state.current, True

    async def change(
        self,
        tenant: str,
        name: str,
        change: Callable[[NameState, float], NameState],
        entry: AuditEntry | None = None,
        admission: Admission | None = None,
        most_pinned_bytes: int | None = None,
    ) -> NameState:
        """The name after `change`, which gets it and the Unix time. `admission`, `entry`: see `register`.

        `most_pinned_bytes`: that its tenant may have pinned afterwards if this adds any, beside the tenant's quota.
        Raises NoSuchName, CallerGone, what `change` raises, QuotaExceeded if more would be pinned than may be, and
        VersionRefused if its tenant has MAX_CANARIES, or MAX_PINS, already.
        """

        def apply(state: NameState | None, last_version: int, now: float) -> tuple[NameState, int, None]:
            return change(_existing(state, name), now), last_version, None

        field, owner = f"{tenant}/{name}", owner_of(name)
        state, _, _ = await self._change(field, apply, entry, admission, owner, (), most_pinned_bytes)
        return state

    async def delete(
        self, tenant: str, name: str, entry: AuditEntry | None = None, admission: Admission | None = None
    ) -> AdapterDeleted | None:
        """Removes the name with all its versions; None: there is no such name. Other arguments, CallerGone: see
        `register`.
        """
        field, owner = f"{tenant}/{name}", owner_of(name)

        def removal(rows: Snapshot) -> Transaction:
            before, _ = _read_name(rows, field)
            if before is None:
                return Transaction()
            check_caller(rows, tenant, admission, owner, _CALLER_GONE)
            version = before.current.version
            transaction = Transaction(value=version, entry=entry, result=str(version))
            transaction.writes += [("HDEL", ADAPTERS, field), ("ZREM", NAMES, field), ("HDEL", VERSION_NOTES, field)]
            transaction.writes.append(("ZREM", CANARIES, field))
            add_storage_change(transaction, rows, tenant, before, None)
            _add_pin_change(transaction, field, before, None)
            transaction.events.append(("delete", field, Numbered(f"{version} ")))
            return transaction

        written = await self._store.change(removal, _rows_of(field, admission, owner), _SUBJECT)
        return None if written.value is None else AdapterDeleted(tenant, name, written.value, written.last_event + 1)

    async def _change(
        self,
        field: str,
        change: Callable[[NameState | None, int, float], tuple[NameState, int, AdapterVersion | None]],
        entry: AuditEntry | None = None,
        admission: Admission | None = None,
        owner: str = "",
        bounds: Sequence[StorageBound] = (),
        most_pinned_bytes: int | None = None,
    ) -> tuple[NameState, AdapterVersion | None, int]:
        tenant = field.partition("/")[0]

        def make(rows: Snapshot) -> Transaction:
            before, last_version = _read_name(rows, field)
            after, new_last, adapter = change(before, last_version, self._clock())
            current = after.current
            transaction = Transaction(value=(after, adapter, new_last))
            if after == before and (before is None or current.rollout == before.current.rollout):
                return transaction
            check_caller(rows, tenant, admission, owner, _CALLER_GONE)
            # A change without a new version, such as a rollback, hardly needs memory.
            transaction.when_full = new_last == last_version
            transaction.result = str(current.version if transaction.when_full else new_last)
            if entry is not None:
                changed = {**entry.changed, **changed_fields(before, after)}
                transaction.entry = structs.replace(entry, changed=changed)
            if after.rollout.canary is None:
                canary_write: Write = ("ZREM", CANARIES, field)
            else:
                canary_write = ("ZADD", CANARIES, 0, field)
                if before is None or before.rollout.canary is None:
                    counter = (1, "ZLEXCOUNT", CANARIES, f"[{tenant}/", f"({tenant}0")
                    transaction.bounds.append(Bound(MAX_CANARIES - 1, [counter], _refuse_canary))
            quota = None
            if current.rollout and (record := rows["HGET", TENANTS, tenant]) is not None:
                quota = decode_tenant(record).quota.pinned_bytes
            _add_pin_change(transaction, field, before, after, (most_pinned_bytes, quota))
            add_storage_change(transaction, rows, tenant, before, after, bounds)
            text = Numbered(f'{current.version} {current.digest} {{"revision":', f",{encode_facts(current)}")
            notes_write: Write = ("HDEL", VERSION_NOTES, field)
            if after.notes != NO_NOTES:
                notes_write = ("HSET", VERSION_NOTES, field, _encode(after.notes).decode())
            writes: list[Write] = [
                ("HSET", ADAPTERS, field, text),
                ("ZADD", NAMES, 0, field),
                ("HSET", VERSIONS, field, new_last),
            ]
            transaction.writes += [*writes, notes_write, canary_write]
            transaction.events.append(("set", field, text))
            return transaction

        written = await self._store.change(make, _rows_of(field, admission, owner), _SUBJECT)
        after, adapter, last_version = written.value
        if written.events:
            after = replace(after, current=replace(after.current, revision=written.last_event + 1))
        return after, adapter, last_version


def _rows_of(field: str, admission: Admission | None = None, owner: str = "") -> list[Command]:
    caller = caller_rows(field.partition("/")[0], admission, owner)
    return [("HGET", ADAPTERS, field), ("HGET", VERSIONS, field), ("HGET", VERSION_NOTES, field), *caller]


def _read_name(rows: Snapshot, field: str) -> tuple[NameState | None, int]:
    """The name and its last version."""
    state = decode_name(field, rows["HGET", ADAPTERS, field], rows["HGET", VERSION_NOTES, field])
    return state, int(rows["HGET", VERSIONS, field] or 0)


def _refuse_canary(_: int) -> None:
    raise VersionRefused(f"{MAX_CANARIES} adapters have a canary, which is the most that a tenant may have: stop one")


def _add_pin_change(
    transaction: Transaction,
    field: str,
    before: NameState | None,
    after: NameState | None,
    limits: Sequence[int | None] = (),
) -> None:
    """Adds what a change of a name pins, within `limits` of the tenant's bytes; None: no limit.

    The bytes of the pages of a pinned name's current version count, once for each gang that keeps it. A version from
    before pages were recorded counts its tensors.
    """
    tenant = field.partition("/")[0]
    old_pin, old_bytes = _pinned_bytes(before)
    pin, num_bytes = _pinned_bytes(after)
    if pin is None and old_pin is None:
        return
    transaction.increases.append((PINNED, tenant, bool(pin) - bool(old_pin), num_bytes - old_bytes))
    transaction.writes.append(("HDEL", PINS, field) if pin is None else ("HSET", PINS, field, f"{pin[0]} {pin[1]}"))
    more = num_bytes - old_bytes
    for limit in limits:
        if limit is not None and more > 0:
            refuse = partial(_refuse_pinned_bytes, limit, more)
            transaction.bounds.append(Bound(limit - more, [(2, "HGET", PINNED, tenant)], refuse))
    if old_pin is None:
        of_tenant, of_all = [(1, "HGET", PINNED, tenant)], [(1, "HLEN", PINS)]
        transaction.bounds += [
            Bound(MAX_PINS - 1, of_tenant, partial(_refuse_pin, MAX_PINS, "your")),
            Bound(MAX_PINS_IN_ALL - 1, of_all, partial(_refuse_pin, MAX_PINS_IN_ALL, "all tenants'")),
        ]


def _pinned_bytes(state: NameState | None) -> tuple[Pin | None, int]:
    pin = None if state is None else pin_of(state.current)
    if state is None or pin is None:
        return None, 0
    return pin, pin[1] * (state.current.packed_bytes or state.current.num_bytes)


def _refuse_pinned_bytes(limit: int, more: int, num_bytes: int) -> None:
    check_pinned(limit, num_bytes + more)


def _refuse_pin(limit: int, whose: str, _: int) -> None:
    raise VersionRefused(f"{limit} of {whose} adapters are pinned, which is the most that may be: unpin one")


def _existing(state: NameState | None, name: str) -> NameState:
    if state is None:
        raise no_such_name(name)
    return state


def no_such_name(name: str) -> NoSuchName:
    return NoSuchName(f"The adapter `{name}` does not exist.")
