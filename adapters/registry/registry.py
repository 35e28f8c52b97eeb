"""The registry in Redis: which version each tenant's adapter name points to, and which API key belongs to which tenant.

Every change is one Lua script (`registry_scripts.py`), so that it happens completely or not at all, and adds an event
to a stream. The commands are those of Redis 7.0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from ..adapter import AdapterVersion
from ..base_identity import BaseIdentity
from ..errors import KeyTaken, RegistryUnavailable
from ..names import check_name, check_tenant
from .events import RegistryEvent, decode_adapter, decode_event, encode_facts
from .registry_scripts import (
    ADAPTERS,
    API_KEYS,
    BASE,
    CLAIM_BASE_SCRIPT,
    DELETE_SCRIPT,
    EVENTS,
    LAUNCH_KEYS,
    LIST_SCRIPT,
    NAMES,
    NUMBER,
    REGISTER_SCRIPT,
    SET_KEY_SCRIPT,
    SET_LAUNCH_KEYS_SCRIPT,
    STREAM_KEY,
    VERSIONS,
)


@dataclass(frozen=True)
class Snapshot:
    """The whole registry at one moment. `event_id` and `event_number` are those of the last event before it."""

    adapters: tuple[AdapterVersion, ...]
    key_tenants: dict[str, str]  # by the key's hash
    event_id: str
    event_number: int


@dataclass(frozen=True)
class NumberedEvent:
    """An event as read from the stream. Numbers follow one another; a gap means that events were missed."""

    event_id: str
    number: int
    event: RegistryEvent


def connect(url: str, timeout_s: float = 2.0) -> Redis:
    """A client that fails after `timeout_s` instead of trying again: whoever asked a motet server may try again."""
    client: Redis = Redis.from_url(
        url,
        decode_responses=True,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    return client


def hash_key(key: str) -> str:
    """The hash that the registry stores in place of an API key. Keys are random, so SHA-256 needs no salt."""
    return sha256(key.encode()).hexdigest()


class Registry:
    """Every method is one round trip. Raises RegistryUnavailable when Redis does not answer within `timeout_s`.

    A change whose answer was lost may or may not have happened; the same call may be repeated.
    """

    def __init__(self, client: Redis, timeout_s: float = 3.0, clock: Callable[[], float] = time.time) -> None:
        if not client.connection_pool.connection_kwargs.get("decode_responses"):
            raise ValueError("the registry needs a client that decodes responses: connect() makes one")
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._register_script = client.register_script(REGISTER_SCRIPT)
        self._delete_script = client.register_script(DELETE_SCRIPT)
        self._set_key_script = client.register_script(SET_KEY_SCRIPT)
        self._set_launch_keys_script = client.register_script(SET_LAUNCH_KEYS_SCRIPT)
        self._claim_base_script = client.register_script(CLAIM_BASE_SCRIPT)
        self._list_script = client.register_script(LIST_SCRIPT)

    async def ping(self) -> None:
        async with self._bounded():
            await self._command("PING")

    async def register(
        self, tenant: str, name: str, *, digest: str, module_ranks: Mapping[str, int], num_bytes: int
    ) -> tuple[AdapterVersion, bool]:
        """The name's current version, which has this digest, and whether this call made it."""
        check_tenant(tenant)
        check_name(name)
        field = f"{tenant}/{name}"
        facts = encode_facts(module_ranks, num_bytes, self._clock())
        async with self._bounded():
            created, record = await self._register_script(
                keys=[ADAPTERS, NAMES, VERSIONS, NUMBER, EVENTS], args=[field, digest, facts]
            )
        return decode_adapter(field, record), bool(created)

    async def get(self, tenant: str, name: str) -> AdapterVersion | None:
        """The name's current version; None: there is no such name."""
        field = f"{tenant}/{name}"
        async with self._bounded():
            record = await self._command("HGET", ADAPTERS, field)
        return None if record is None else decode_adapter(field, record)

    async def list(self, tenant: str) -> list[AdapterVersion]:
        """The tenant's adapters, sorted by name."""
        check_tenant(tenant)
        async with self._bounded():
            found = await self._list_script(keys=[ADAPTERS, NAMES], args=[tenant])
        return [decode_adapter(field, record) for field, record in zip(found[::2], found[1::2], strict=True)]

    async def delete(self, tenant: str, name: str) -> int | None:
        """Removes the name and returns the version that it had; None: there is no such name."""
        async with self._bounded():
            version = await self._delete_script(keys=[ADAPTERS, NAMES, NUMBER, EVENTS], args=[f"{tenant}/{name}"])
        return None if version is None else int(version)

    async def digests(self) -> set[str]:
        """All digests that a name points to."""
        async with self._bounded():
            records = await self._command("HVALS", ADAPTERS)
        return {record.split(" ", 2)[1] for record in records}

    async def set_key(self, tenant: str, key: str) -> None:
        """Gives the API key to the tenant, until `delete_key`. Raises KeyTaken if it belongs to another tenant."""
        check_tenant(tenant)
        await self._change_key(key, tenant)

    async def set_launch_keys(self, owner: str, keys: Sequence[tuple[str, str]]) -> None:
        """Makes `keys`, as (tenant, key), all the keys that `owner` gives; deletes others that it gave before.

        `owner` is one word that names a launch. Keys from `set_key` stay, and so do keys that another owner gives, too.
        Raises KeyTaken and changes nothing if any key belongs to another tenant.
        """
        for tenant, _ in keys:
            check_tenant(tenant)
        args = [part for tenant, key in keys for part in (hash_key(key), tenant)]
        async with self._bounded():
            taken = await self._set_launch_keys_script(
                keys=[API_KEYS, LAUNCH_KEYS, NUMBER, EVENTS], args=[owner, *args]
            )
        if taken is not None:
            raise _key_taken(*taken)

    async def tenants_besides(self, owner: str) -> set[str]:
        """Tenants that have a key from `set_key` or from another owner of launch keys than this one."""
        async with self._bounded():
            transaction: Any = self._client.pipeline(transaction=True)
            transaction.hgetall(API_KEYS).smembers(LAUNCH_KEYS)
            key_tenants, marks = await transaction.execute()
        owners: dict[str, set[str]] = {}
        for mark in marks:
            giver, _, key_hash = mark.partition(" ")
            owners.setdefault(key_hash, set()).add(giver)
        return {tenant for key_hash, tenant in key_tenants.items() if owners.get(key_hash) != {owner}}

    async def claim_base(self, base: BaseIdentity, remedy: str, *, if_empty: bool) -> None:
        """Records that the registry belongs to `base`, if it belongs to none yet, or `if_empty` and it has no adapters.

        Raises OtherBase, with `remedy` in its message, if it belongs to another base.
        """
        async with self._bounded():
            held = await self._claim_base_script(keys=[BASE, ADAPTERS], args=[str(base), int(if_empty)])
        base.check(BaseIdentity.parse(held), "the registry in Redis", remedy)

    async def delete_key(self, key: str) -> None:
        """Deletes the API key."""
        await self._change_key(key, "")

    async def tenant_of_key(self, key: str) -> str | None:
        """The tenant that the API key belongs to; None: the key is not known."""
        async with self._bounded():
            tenant: str | None = await self._command("HGET", API_KEYS, hash_key(key))
        return tenant

    async def snapshot(self) -> Snapshot:
        """The whole registry now."""
        async with self._bounded():
            transaction: Any = self._client.pipeline(transaction=True)
            transaction.xrevrange(EVENTS, count=1).get(NUMBER).hgetall(ADAPTERS).hgetall(API_KEYS)
            newest, number, adapters, keys = await transaction.execute()
        return Snapshot(
            adapters=tuple(decode_adapter(field, record) for field, record in adapters.items()),
            key_tenants=keys,
            event_id=newest[0][0] if newest else "0-0",
            event_number=int(number or 0),
        )

    async def share_stream_key(self, key: bytes) -> bytes:
        """The secret with which all routers seal what they tell clients of their streams: `key` if there was none yet."""
        async with self._bounded():
            client: Any = self._client
            held = await client.set(STREAM_KEY, key.hex(), nx=True, get=True)
        return key if held is None else bytes.fromhex(held)

    async def read_events(self, after: str, wait_s: float) -> Sequence[NumberedEvent]:
        """Events after the event with the id `after`; waits up to `wait_s` for the first one, and may return none."""
        async with self._bounded(wait_s):
            client: Any = self._client
            answer = await client.xread({EVENTS: after}, count=1000, block=max(1, int(wait_s * 1000)))
        entries = answer[0][1] if answer else []
        return [NumberedEvent(event_id, int(fields["number"]), decode_event(fields)) for event_id, fields in entries]

    async def num_events(self) -> int:
        """The number of events so far, which is the number of the newest one."""
        async with self._bounded():
            return int(await self._command("GET", NUMBER) or 0)

    async def _change_key(self, key: str, tenant: str) -> None:
        async with self._bounded():
            owner = await self._set_key_script(
                keys=[API_KEYS, LAUNCH_KEYS, NUMBER, EVENTS], args=[hash_key(key), tenant]
            )
        if owner is not None:
            raise _key_taken(tenant, owner)

    async def _command(self, *parts: str) -> Any:
        client: Any = self._client
        return await client.execute_command(*parts)

    @asynccontextmanager
    async def _bounded(self, extra_s: float = 0.0) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s + extra_s):
                yield
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
            raise RegistryUnavailable(f"the registry cannot be reached ({problem}): try again in a moment") from error


def _key_taken(tenant: str, owner: str) -> KeyTaken:
    # The key itself is a secret and is left out.
    return KeyTaken(f"a key that was given for {tenant} is {owner}'s already: each tenant needs keys of its own")
