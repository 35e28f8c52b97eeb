"""Who changed what: an entry of the audit log. It never holds a key, nor anything that a client generated with one."""

from __future__ import annotations

from typing import Literal

import msgspec

ActorKind = Literal["operator", "key", "token"]


class Actor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who asks for a change."""

    kind: ActorKind
    id: str = ""  # of the key, or the subject of the token; empty: the operators
    tenant: str = ""  # whose key or token it is; empty: the operators'
    request_id: str = ""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change that was asked for and done."""

    action: str  # such as "key.create"
    tenant: str  # whose things have changed
    target: str = ""  # id of a key, name of an adapter; empty: the tenant itself
    changed: dict[str, object] = {}  # the fields that were given, and their new values
    actor: Actor


class WrittenEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry as the log has it."""

    id: str  # later entries have later ids
    at: float  # Unix time of Redis, seconds
    result: str = ""  # such as the version that an upload has made
    entry: AuditEntry


def encode_entry(entry: AuditEntry | None) -> str:
    """For a script, which writes it with the change; None: nothing is written."""
    return "" if entry is None else msgspec.json.encode(entry).decode()


def decode_entry(entry_id: str, entry: str, result: str) -> WrittenEntry:
    milliseconds, _, _ = entry_id.partition("-")
    found = msgspec.json.decode(entry, type=AuditEntry)
    return WrittenEntry(id=entry_id, at=int(milliseconds) / 1000, result=result, entry=found)
