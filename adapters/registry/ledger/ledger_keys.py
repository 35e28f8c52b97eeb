"""Which keys of Redis the ledger has, and how a record is written there.

The keys of a tenant begin alike (`prefix_of`), so that a Redis cluster has them in one slot: scripts take that
beginning as their key. They contain the tenant's id: a new tenant with the name of a deleted one has other keys.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Final

from ..tenants.records import parse_tenant_id
from .entry import NUMBERS, Entry, Stage

TENANT_IDS: Final = "motet:{ledger}:tenants"  # set: ids of tenants that may have a ledger
ARCHIVIST: Final = "motet:{ledger}:archivist"  # the router that archives, as a string that expires

# Below the prefix; a day is like 20261122, a month like 202611.
RECORDS: Final = "records:"  # + day: sorted map (packed_map.lua), field of an id -> record, until the day is archived
GROUPS: Final = "groups:"  # + day: hash, number -> group and group -> number, of the day's records
PENDING: Final = "pending"  # sorted set: days that have records, by when one changed last, Unix time in microseconds
HOURS: Final = "hours:"  # + day: hash, "hour\tgroup" -> numbers
# + month: hash, "day\tgroup" -> numbers, "day\t" -> how many groups the day has; "folded": single users no more
DAYS: Final = "days:"

# Written by versions before records; take.lua and archive.py still read them.
OLD_ENTRIES: Final = "entries"  # stream: each entry that changed something, as JSON in the field e
OLD_SEEN: Final = "seen:"  # + day: hash, id -> "stage\ngroup\nnumbers"; expires

_KINDS: Final = {"cmpl-": "c", "chatcmpl-": "h", "shadow-": "s"}  # of ids, which are most of a record
_OTHER_KIND: Final = "="


def prefix_of(tenant_id: str) -> str:
    return f"motet:{{tenant:{tenant_id}}}:ledger:"


def field_of(id_text: str) -> str:
    """A short name of an answer's id."""
    prefix, dash, rest = id_text.partition("-")
    kind = _KINDS.get(prefix + dash)
    return f"{_OTHER_KIND}{id_text}" if kind is None else kind + rest


def entry_of(tenant_id: str, day: date, field: str, record: str, group: str) -> Entry:
    """The entry that a record encodes.

    A record is `<stage> <group> <second of the day> <numbers>`, as decimal numbers. The numbers are those that
    `NUMBERS` names, without zeros at the end. A group below 0 is summed with `OTHERS`, one with a + with all other
    users of its adapter. A tab and the error follow if there is one.

    >>> entry_of("acme", date(2026, 11, 22), "=x", "2 1 61 1 0 9", "key\\tsql\\t3\\tab12").prompt_tokens
    9
    """
    texts, _, error = record.partition("\t")
    stage, _, second, *numbers = map(int, texts.split(" "))
    tenant, num_ended = parse_tenant_id(tenant_id)
    *user, key_id, adapter, version, digest = group.split("\t")
    midnight = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
    kind, rest = field[0], field[1:]
    prefix = next((prefix for prefix, short in _KINDS.items() if short == kind), "")
    return Entry(
        id=prefix + rest,
        tenant=tenant,
        num_ended=num_ended,
        began_at=midnight + second,
        stage=Stage(stage),
        key_id=key_id,
        user="".join(user),
        adapter=adapter,
        version=int(version),
        digest=digest,
        error=error,
        **dict(zip(NUMBERS, numbers, strict=False)),
    )
