"""The events that a registry publishes, and the text form of events and of records of adapters."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import msgspec

from ..adapter import AdapterVersion
from .tenants.records import KeyRecord, TenantRecord


@dataclass(frozen=True)
class AdapterSet:
    """A name has a new current version."""

    adapter: AdapterVersion


@dataclass(frozen=True)
class AdapterDeleted:
    """A name was deleted. `version` is the one that it pointed to; later records have a higher order."""

    tenant: str
    name: str
    version: int
    revision: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Comparable with that of records."""
        return self.revision, self.version


@dataclass(frozen=True)
class KeySet:
    """The API key with this hash belongs to a tenant; None: it was deleted."""

    key_hash: str
    tenant: str | None
    record: KeyRecord | None = None  # None: only its tenant is known


@dataclass(frozen=True)
class TenantSet:
    """The record of a tenant has changed."""

    tenant: TenantRecord


@dataclass(frozen=True)
class UserDeleted:
    """The keys of a tenant's user are gone. Requests that were admitted before leave nothing of that user."""

    tenant: str
    user: str


RegistryEvent = AdapterSet | AdapterDeleted | KeySet | TenantSet | UserDeleted
KEY_ID_CHARS = 16  # of the hash
_keys = msgspec.json.Decoder(KeyRecord)
_tenants = msgspec.json.Decoder(TenantRecord)


def key_id_of(key_hash: str) -> str:
    """The public name of a key: keys are random, so part of a hash reveals nothing."""
    return key_hash[:KEY_ID_CHARS]


def decode_key(key_hash: str, record: str) -> KeyRecord:
    """The key that a field and a value of API_KEYS describe."""
    if record.startswith("{"):
        return _keys.decode(record)
    return KeyRecord(key_id=key_id_of(key_hash), tenant=sys.intern(record))


def decode_tenant(record: str) -> TenantRecord:
    return _tenants.decode(record)


class _Facts(msgspec.Struct):
    """The JSON behind version and digest in a record."""

    module_ranks: dict[str, int]
    num_bytes: int
    created_at: float
    packed_bytes: int = 0  # none in records from before it was counted
    base: str = ""  # none in records from before it was kept
    response_template: str = ""
    invocation_token_ids: tuple[int, ...] = ()
    own_text: str = msgspec.field(default="", name="chat_template")  # which it was at first
    num_labels: int = 0
    revision: int = 0  # none in records from before versions had a history: those are older than all others
    rollout: msgspec.Raw = msgspec.Raw()


_decode_facts = msgspec.json.Decoder(_Facts).decode


def encode_facts(adapter: AdapterVersion) -> str:
    """What follows version, digest and revision in a record: JSON without the opening brace."""
    facts: dict[str, object] = {
        "module_ranks": dict(adapter.module_ranks),
        "num_bytes": adapter.num_bytes,
        "created_at": adapter.created_at,
    }
    if adapter.packed_bytes:
        facts["packed_bytes"] = adapter.packed_bytes
    if adapter.base:
        facts["base"] = adapter.base
    if adapter.response_template:
        facts["response_template"] = adapter.response_template
    if adapter.invocation_token_ids:
        facts["invocation_token_ids"] = adapter.invocation_token_ids
    if adapter.own_text:
        facts["chat_template"] = adapter.own_text
    if adapter.num_labels:
        facts["num_labels"] = adapter.num_labels
    if adapter.rollout:
        facts["rollout"] = msgspec.Raw(adapter.rollout)
    return msgspec.json.encode(facts).decode()[1:]


def decode_adapter(field: str, record: str) -> AdapterVersion:
    """The version that `field`, "tenant/name", and `record`, "version digest facts", describe."""
    tenant, name = field.split("/", 1)
    version, digest, text = record.split(" ", 2)
    facts = _decode_facts(text)
    return AdapterVersion(
        tenant=tenant,
        name=name,
        version=int(version),
        digest=digest,
        module_ranks=facts.module_ranks,
        num_bytes=facts.num_bytes,
        created_at=facts.created_at,
        packed_bytes=facts.packed_bytes,
        base=sys.intern(facts.base),
        response_template=sys.intern(facts.response_template),
        invocation_token_ids=facts.invocation_token_ids,
        own_text=facts.own_text,
        num_labels=facts.num_labels,
        revision=facts.revision,
        rollout=bytes(facts.rollout),
    )


def decode_event(fields: dict[str, str]) -> RegistryEvent:
    """The event that an entry of the stream describes."""
    kind, field, value = fields["kind"], fields["field"], fields["value"]
    if kind == "set":
        return AdapterSet(decode_adapter(field, value))
    if kind == "delete":
        tenant, name = field.split("/", 1)
        return AdapterDeleted(tenant, name, *map(int, value.split(" ")))
    if kind == "key":
        if value.startswith("{"):
            record = decode_key(field, value)
            return KeySet(field, record.tenant, record)
        return KeySet(field, value or None)
    if kind == "tenant":
        return TenantSet(decode_tenant(value))
    if kind == "user":
        return UserDeleted(*field.split("/", 1))
    raise ValueError(f"an event of kind {kind!r} is not known: set, delete, key, tenant and user are")
