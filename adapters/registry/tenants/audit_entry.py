"""Entries of the audit log: who changed what. They never hold a key, nor anything that a client generated with one."""

from __future__ import annotations

import logging
from typing import Final, Literal

import msgspec

LOGGER: Final = "motet.adapters.audit"
ActorKind = Literal["operator", "key", "token", "configuration", "judge"]
_log = logging.getLogger(LOGGER)


class Actor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The originator of a change."""

    kind: ActorKind
    id: str = ""  # of the key, or the subject of the token; empty: the operators
    tenant: str = ""  # whose key or token it is; empty: the operators'
    user: str = ""  # of the tenant, whose key or token it is
    request_id: str = ""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change that was requested and done."""

    action: str  # such as "key.create"
    tenant: str  # whose things have changed; empty: all tenants
    target: str = ""  # id of a key, name of an adapter; empty: the tenant itself
    changed: dict[str, object] = {}  # fields and new values; of settings and versions: {"from": …, "to": …} each
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


def log_entry(entry: AuditEntry, result: str = "") -> None:
    """One line in this process's log, which is kept where logs are, for as long as they are."""
    actor = entry.actor
    fields = {
        "action": entry.action,
        "tenant": entry.tenant,
        "target": entry.target,
        "result": result,
        "actor": actor.kind,
        "actor_id": actor.id,
        "user": actor.user,
        "request_id": actor.request_id,
    }
    _log.info("audit", extra={"fields": {name: value for name, value in fields.items() if value}})
