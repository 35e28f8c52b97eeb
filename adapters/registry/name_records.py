"""The registry's records of names. A change reads the record, computes the new one, and compares and swaps.

A change is a pure function of `NameState` (`name_state.py`) and is written by one script or not at all; if another
change came first it is computed again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import structs
from redis.asyncio import Redis

from ..adapter import AdapterVersion
from ..errors import CallerGone, NameTaken, NoSuchName, RegistryUnavailable, VersionRefused, quote
from ..names import check_name, check_tenant, owner_of
from .events import decode_adapter, encode_facts
from .redis_deadline import answered_within
from .registry_keys import bind_script
from .stored_counts import bound_args, use_of
from .tenants.records import Admission, AuditEntry, StorageBound, check_pinned, check_storage, encode_entry, log_entry
from .versions.name_state import NameNotes, NameState, VersionNote, changed_fields, with_upload
from .versions.rollout import MAX_CANARIES, MAX_PINS, MAX_PINS_IN_ALL, versions_of

_MAX_TRIES: Final = 64  # of a change that conflicts with others
_encode = msgspec.json.Encoder().encode
_decode_notes = msgspec.json.Decoder(NameNotes).decode


class NameRecords:
    """Raises RegistryUnavailable when Redis does not answer; then a change may or may not have happened."""

    def __init__(self, client: Redis, timeout_s: float = 3.0, clock: Callable[[], float] = time.time) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._read_name = bind_script(client, "read_name.lua", no_writes=True)
        self._change_name = bind_script(client, "change_name.lua")
        self._change_name_when_full = bind_script(client, "change_name.lua", allow_oom=True)

    async def get(self, tenant: str, name: str) -> NameState:
        """Raises NoSuchName if the tenant has no adapter of this name."""
        state, *_ = await self._read(f"{tenant}/{name}")
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
        activate: bool = True,
        must_be_new: bool = False,
        note: VersionNote | None = None,
        admission: Admission | None = None,
        entry: AuditEntry | None = None,
        bounds: Sequence[StorageBound] = (),
    ) -> tuple[AdapterVersion, AdapterVersion, bool]:
        """The version that has this digest and response template, the name's current version, and whether this is new.

        The current version with the same two is taken for the same upload; where the new one would not be current,
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
                identity = digest, response_template
                same = next(
                    (
                        candidate
                        for candidate in candidates
                        if (candidate.digest, candidate.response_template) == identity
                    ),
                    None,
                )
                if same is not None:
                    return state, last_version, same
            version = last_version + 1
            facts = digest, module_ranks, num_bytes, now, packed_bytes, base, response_template
            upload = AdapterVersion(tenant, name, version, *facts)
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
        for _ in range(_MAX_TRIES):
            before, last_version, record, notes = await self._read(field)
            after, new_last, adapter = change(before, last_version, self._clock())
            if after == before and (before is None or after.current.rollout == before.current.rollout):
                return after, adapter, new_last
            result = str(new_last if new_last != last_version else after.current.version)
            written_entry = entry and structs.replace(entry, changed={**entry.changed, **changed_fields(before, after)})
            new_notes = "" if after.notes == NameNotes() else _encode(after.notes).decode()
            # A change without a new version, such as a rollback, hardly needs memory.
            change_name = self._change_name if new_last != last_version else self._change_name_when_full
            async with answered_within(self._timeout_s):
                written = await change_name(
                    field=field,
                    old_record=record,
                    old_version=last_version,
                    old_notes=notes,
                    head=f"{after.current.version} {after.current.digest} ",
                    facts=encode_facts(after.current),
                    new_version=new_last,
                    new_notes=new_notes,
                    has_canary=after.rollout.canary is not None,
                    entry=encode_entry(written_entry),
                    result=result,
                    owner=owner,
                    user="" if admission is None else admission.user,
                    incarnation=None if admission is None else admission.incarnation,
                    last_event=None if admission is None else admission.last_event,
                    max_canaries=MAX_CANARIES,
                    max_pins=MAX_PINS,
                    max_pins_in_all=MAX_PINS_IN_ALL,
                    max_pinned_bytes=most_pinned_bytes,
                    bounds=bound_args(bounds),
                )
            if written == 0:
                raise CallerGone("this tenant, or its user, was deleted meanwhile")
            if written == 1:
                message = f"{MAX_CANARIES} adapters have a canary, which is the most that a tenant may have: stop one"
                raise VersionRefused(message)
            if isinstance(written, list):
                _refuse(bounds, *written)
            if written is not None:
                if written_entry is not None:
                    log_entry(written_entry, result)
                return NameState(decode_adapter(field, written), after.notes), adapter, new_last
            await asyncio.sleep(random.uniform(0.0, 0.01))
        raise RegistryUnavailable("this adapter keeps changing: try again")

    async def _read(self, field: str) -> tuple[NameState | None, int, str, str]:
        """The name, its last version, and record and notes as Redis holds them."""
        async with answered_within(self._timeout_s):
            record, last_version, notes = await self._read_name(field=field)
        state = None
        if record:
            state = NameState(decode_adapter(field, record), _decode_notes(notes) if notes else NameNotes())
        return state, int(last_version or 0), record or "", notes or ""


def _refuse(bounds: Sequence[StorageBound], owner: str, *counts: int | str) -> None:
    if owner == "pinned_bytes":
        num_bytes, limit_bytes = map(int, counts)
        check_pinned(limit_bytes, num_bytes)
    if owner in ("pins", "pins_in_all"):
        whose = "your" if owner == "pins" else "all tenants'"
        raise VersionRefused(f"{counts[0]} of {whose} adapters are pinned, which is the most that may be: unpin one")
    bound = next(bound for bound in bounds if bound.owner == owner and not bound.is_open)
    check_storage(bound, use_of(*counts[:2]), use_of(*counts[2:]))
    raise AssertionError(f"{bound} was exceeded, and is not")


def _existing(state: NameState | None, name: str) -> NameState:
    if state is None:
        raise no_such_name(name)
    return state


def no_such_name(name: str) -> NoSuchName:
    return NoSuchName(f"The adapter `{name}` does not exist.")
