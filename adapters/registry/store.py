"""The registry's records in Redis: read as of one moment, and changed completely or not at all.

A change reads rows, computes from them what is to be written, and writes it with one script if the rows are still the
same; otherwise it is computed again. Counters are not compared, but increased within bounds by the same script, so that
changes that only count do not conflict. Neither needs MULTI, which some servers refuse while their memory is full.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from redis.asyncio import Redis

from ..errors import CallerGone, RegistryUnavailable
from .events import decode_tenant
from .redis_deadline import TIMEOUT_S, answered_within
from .registry_keys import (
    AUDIT,
    AUDIT_ORDER,
    ENDED_USERS,
    EVENT_NUMBER,
    EVENTS,
    PREFIX,
    TENANTS,
    TENANTS_AUDIT,
    bind_script,
)
from .tenants.records import Admission, AuditEntry, encode_entry, log_entry

MAX_TRIES: Final = 64  # of a change that conflicts with others
MAX_OPERATOR_ENTRIES: Final = 100_000  # of the audit log
MAX_TENANT_ENTRIES: Final = 1_000  # of each tenant's own log, so that it cannot push out the entries of others
_MAX_EVENTS: Final = 10_000
_encode: Final = msgspec.msgpack.Encoder().encode


class Numbered(NamedTuple):
    """A text around the number that the change's `event`-th event will have."""

    before: str
    after: str = ""
    event: int = 1


Word: TypeAlias = str | int | float
Write: TypeAlias = Sequence[Word | Numbered]
# A read whose last word is a tuple (n,) is called for each word of the reply to the n-th command that is read with it.
Command: TypeAlias = tuple[Word | tuple[int], ...]


class Bound(NamedTuple):
    """The sum of counters may be at most `limit` before the change. Each is a place, from 1, in a command's reply.

    `refuse` is called with the sum if it is more, and raises the error.
    """

    limit: int
    counters: Sequence[Command]
    refuse: Callable[[int], object]


@dataclass(kw_only=True)
class Transaction:
    """What a change writes, in this order. Without writes and increases only bounds are checked."""

    value: Any = None  # for the caller
    bounds: list[Bound] = field(default_factory=list)
    increases: list[Command] = field(default_factory=list)  # key, field, numbers: a field with only zeros is removed
    writes: list[Write] = field(default_factory=list)
    events: list[tuple[str, str, str | Numbered]] = field(default_factory=list)  # kind, field, value
    entry: AuditEntry | None = None
    result: str = ""  # of the entry
    when_full: bool = True  # also while Redis is at its bound of memory: it frees some, or takes little
    last_event: int = 0  # set when it was written: the number of the last event before its own


class Snapshot:
    """Replies to reads, of one moment. Those that a change uses are compared when it is written.

    A row that was not read counts as empty; if it is not, the change is computed again.
    """

    def __init__(self, commands: Sequence[Command], replies: Sequence[Any]) -> None:
        self._replies = dict(zip(commands, replies, strict=True))
        self.used: dict[Command, Any] = {}

    def __getitem__(self, command: Command) -> Any:
        reply = self.used[command] = self._replies.get(command)
        return reply

    def peek(self, command: Command) -> Any:
        """The reply to a command that was read, without comparing it."""
        return self._replies[command]


class Store:
    """Raises RegistryUnavailable when Redis does not answer; then a change may or may not have happened."""

    def __init__(self, client: Redis, timeout_s: float = TIMEOUT_S, slot: str = PREFIX) -> None:
        """`slot`: any key of those that are used, which a Redis cluster has in one slot."""
        self._timeout_s, self._slot = timeout_s, slot
        self._read = bind_script(client, "read.lua", no_writes=True)
        self._transact = bind_script(client, "transact.lua")
        self._transact_when_full = bind_script(client, "transact.lua", allow_oom=True)

    async def read(self, *commands: Command) -> list[Any]:
        """The replies, all of one moment.

        `fields, records = await store.read(("ZRANGE", NAMES, 0, 9), ("HGET", ADAPTERS, (1,)))`
        """
        async with answered_within(self._timeout_s):
            replies: list[Any] = await self._read(slot=self._slot, commands=_encode(commands))
        return replies

    async def set_once(self, key: str, value: str) -> str:
        """Sets a key that has no value yet, and returns the value that it has then."""
        row = ("GET", key)

        def first(rows: Snapshot) -> Transaction:
            if rows[row] is not None:
                return Transaction(value=rows[row])
            return Transaction(value=value, writes=[("SET", key, value)])

        return str((await self.change(first, [row])).value)

    async def change(
        self, make: Callable[[Snapshot], Transaction], rows: Sequence[Command], subject: str = "these records keep"
    ) -> Transaction:
        """Writes what `make` returns, and returns it. `rows`: that it will use, as far as they are known before.

        `make` is pure: it is called again whenever a row that it used has changed. Passes on what it raises, and what a
        bound's `refuse` raises, without any change.
        """
        for _ in range(MAX_TRIES):
            read = Snapshot(rows, await self.read(*rows) if rows else [])
            transaction = make(read)
            if not (transaction.writes or transaction.increases or transaction.bounds):
                return transaction
            script = self._transact_when_full if transaction.when_full else self._transact
            async with answered_within(self._timeout_s):
                outcome, *numbers = await script(slot=self._slot, change=packed(transaction, read))
            if outcome == "done":
                transaction.last_event = numbers[0]
                if transaction.entry is not None:
                    log_entry(transaction.entry, transaction.result)
                return transaction
            if outcome == "bound":
                bound = transaction.bounds[numbers[0] - 1]
                bound.refuse(int(numbers[1]))
                raise AssertionError(f"{bound} was exceeded, and is not")
            rows = [*dict.fromkeys((*rows, *read.used))]
            await asyncio.sleep(random.uniform(0.0, 0.01))
        raise RegistryUnavailable(f"{subject} changing: try again")


def packed(transaction: Transaction, rows: Snapshot) -> bytes:
    """As transact.lua takes it."""
    events: list[Any] = [EVENT_NUMBER, EVENTS, _MAX_EVENTS, *transaction.events] if transaction.events else []
    entries: list[Any] = []
    entry = transaction.entry
    if entry is not None:
        owner, log, max_entries = entry.tenant, TENANTS_AUDIT + entry.tenant, MAX_TENANT_ENTRIES
        if entry.actor.kind in ("operator", "configuration"):
            owner, log, max_entries = "", AUDIT, MAX_OPERATOR_ENTRIES
        entries = [AUDIT_ORDER, (log, max_entries, owner, entry.tenant, encode_entry(entry), transaction.result)]
    checks = [(reply_text(reply), *command) for command, reply in rows.used.items()]
    bounds = [(bound.limit, *bound.counters) for bound in transaction.bounds]
    return _encode((checks, bounds, transaction.increases, transaction.writes, events, entries))


def reply_text(reply: Any) -> str:
    """A reply as transact.lua compares it."""
    if isinstance(reply, list):
        return "\n".join(map(reply_text, reply))
    return "" if reply is None else str(reply)


# What was under way when its tenant or its user was deleted leaves nothing to the next one of that name.


def caller_rows(tenant: str, admission: Admission | None, owner: str = "") -> list[Command]:
    """The tenant's record, and when its users were deleted."""
    record = ("HGET", TENANTS, tenant)
    if admission is None:
        return [record]
    return [record, ("ZMSCORE", ENDED_USERS + tenant, admission.user, owner, "")]


def check_caller(rows: Snapshot, tenant: str, admission: Admission | None, owner: str, error: str) -> None:
    """Raises CallerGone with this message if since the admission the tenant, its user or the owner was deleted."""
    if admission is None:
        return
    row, ended_row = caller_rows(tenant, admission, owner)
    record = rows[row]
    if record is not None:
        tenant_record = decode_tenant(record)
        if tenant_record.is_ending or tenant_record.num_ended != admission.incarnation:
            raise CallerGone(error)
    *ends, end_of_all = rows[ended_row]
    for user, end in zip((admission.user, owner), ends, strict=True):
        ended = end or end_of_all
        if user and ended is not None and int(ended) > admission.last_event:
            raise CallerGone(error)
