"""The truth about names: which version each tenant's adapter name points to, and which key is whose.

Every change is one Lua script, so it happens whole or not at all, and is told on a stream. All keys share one hash tag
and so one slot of a cluster. Commands are those of Redis 7.0.
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

PREFIX = "motet:{registry}:"
_ADAPTERS = PREFIX + "adapters"  # hash: tenant/name -> "version digest facts"
_NAMES = PREFIX + "names"  # sorted set of tenant/name, all with score 0: sorted by name
_VERSIONS = PREFIX + "versions"  # hash: tenant/name -> last version, kept when the name is deleted
_KEYS = PREFIX + "keys"  # hash: SHA-256 of an API key -> tenant
_LAUNCH_KEYS = PREFIX + "launch_keys"  # set of "owner hash": who gave a key for as long as it goes on giving it
_BASE = PREFIX + "base"  # fingerprint and name of the base that all adapters are of
_NUMBER = PREFIX + "event_number"  # events so far
_EVENTS = PREFIX + "events"  # stream of (number, kind, field, value)
_NUM_EVENTS_KEPT = 10_000

_TELL = f"""
local function tell(kind, field, value)
  local number = redis.call('INCR', '{_NUMBER}')
  redis.call('XADD', '{_EVENTS}', 'MAXLEN', '~', {_NUM_EVENTS_KEPT}, '*',
             'number', number, 'kind', kind, 'field', field, 'value', value)
end
"""
_REGISTER = f"""{_TELL}
local current = redis.call('HGET', KEYS[1], ARGV[1])
if current and string.match(current, '^%d+ (%x+) ') == ARGV[2] then return {{0, current}} end
local version = redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
local record = string.format('%d', version) .. ' ' .. ARGV[2] .. ' ' .. ARGV[3]
redis.call('HSET', KEYS[1], ARGV[1], record)
redis.call('ZADD', KEYS[2], 0, ARGV[1])
tell('set', ARGV[1], record)
return {{1, record}}
"""
_DELETE = f"""{_TELL}
local current = redis.call('HGET', KEYS[1], ARGV[1])
if not current then return false end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
local version = string.match(current, '^%d+')
tell('delete', ARGV[1], version)
return version
"""
_SET_KEY = f"""{_TELL}
local before = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if before ~= '' and ARGV[2] ~= '' and before ~= ARGV[2] then return before end
for _, mark in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if string.match(mark, '%x+$') == ARGV[1] then redis.call('SREM', KEYS[2], mark) end
end
if before == ARGV[2] then return false end
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
tell('key', ARGV[1], ARGV[2])
return false
"""
# ARGV: owner, then hash and tenant of each key.
_SET_LAUNCH_KEYS = f"""{_TELL}
for i = 2, #ARGV, 2 do
  local before = redis.call('HGET', KEYS[1], ARGV[i])
  if before and before ~= ARGV[i + 1] then return {{ARGV[i + 1], before}} end
end
local marks = redis.call('SMEMBERS', KEYS[2])
local num_owners, given = {{}}, {{}}
for _, mark in ipairs(marks) do
  local hash = string.match(mark, '%x+$')
  num_owners[hash] = (num_owners[hash] or 0) + 1
end
for i = 2, #ARGV, 2 do
  given[ARGV[i]] = true
  local is_new = redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) == 1
  if is_new then tell('key', ARGV[i], ARGV[i + 1]) end
  if is_new or num_owners[ARGV[i]] then redis.call('SADD', KEYS[2], ARGV[1] .. ' ' .. ARGV[i]) end
end
for _, mark in ipairs(marks) do
  local owner, hash = string.match(mark, '^(%S+) (%x+)$')
  if owner == ARGV[1] and not given[hash] then
    redis.call('SREM', KEYS[2], mark)
    if num_owners[hash] == 1 then
      redis.call('HDEL', KEYS[1], hash)
      tell('key', hash, '')
    end
  end
end
return false
"""
_CLAIM_BASE = """
if redis.call('SETNX', KEYS[1], ARGV[1]) == 0 and ARGV[2] == '1' and redis.call('HLEN', KEYS[2]) == 0 then
  redis.call('SET', KEYS[1], ARGV[1])
end
return redis.call('GET', KEYS[1])
"""
_LIST = """
local names = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1] .. '/', '(' .. ARGV[1] .. '0')
local found = {}
for _, name in ipairs(names) do
  found[#found + 1] = name
  found[#found + 1] = redis.call('HGET', KEYS[1], name)
end
return found
"""


@dataclass(frozen=True)
class Snapshot:
    """All of a registry at one moment. `event_id` and `event_number` are those of the last event before it."""

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
    """A client that fails soon instead of trying again: the caller's caller may repeat."""
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
    """What the registry keeps of an API key. Keys are random, so one unsalted SHA-256 does not give them away."""
    return sha256(key.encode()).hexdigest()


class Registry:
    """Every method is one round trip. Raises RegistryUnavailable when Redis does not answer within `timeout_s`.

    A change whose answer got lost may have happened or not; repeating it is safe.
    """

    def __init__(self, client: Redis, timeout_s: float = 3.0, clock: Callable[[], float] = time.time) -> None:
        if not client.connection_pool.connection_kwargs.get("decode_responses"):
            raise ValueError("the registry needs a client that decodes responses: connect() makes one")
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._register_script = client.register_script(_REGISTER)
        self._delete_script = client.register_script(_DELETE)
        self._set_key_script = client.register_script(_SET_KEY)
        self._set_launch_keys_script = client.register_script(_SET_LAUNCH_KEYS)
        self._claim_base_script = client.register_script(_CLAIM_BASE)
        self._list_script = client.register_script(_LIST)

    async def ping(self) -> None:
        async with self._bounded():
            await self._command("PING")

    async def register(
        self, tenant: str, name: str, *, digest: str, module_ranks: Mapping[str, int], num_bytes: int
    ) -> tuple[AdapterVersion, bool]:
        """The name's current version, which now has this digest, and whether it was made just now."""
        check_tenant(tenant)
        check_name(name)
        field = f"{tenant}/{name}"
        facts = encode_facts(module_ranks, num_bytes, self._clock())
        async with self._bounded():
            created, record = await self._register_script(
                keys=[_ADAPTERS, _NAMES, _VERSIONS, _NUMBER, _EVENTS], args=[field, digest, facts]
            )
        return decode_adapter(field, record), bool(created)

    async def get(self, tenant: str, name: str) -> AdapterVersion | None:
        field = f"{tenant}/{name}"
        async with self._bounded():
            record = await self._command("HGET", _ADAPTERS, field)
        return None if record is None else decode_adapter(field, record)

    async def list(self, tenant: str) -> list[AdapterVersion]:
        """The tenant's adapters, sorted by name."""
        check_tenant(tenant)
        async with self._bounded():
            found = await self._list_script(keys=[_ADAPTERS, _NAMES], args=[tenant])
        return [decode_adapter(field, record) for field, record in zip(found[::2], found[1::2], strict=True)]

    async def delete(self, tenant: str, name: str) -> int | None:
        """Removes the name and returns the version that it had; None: there is no such name."""
        async with self._bounded():
            version = await self._delete_script(keys=[_ADAPTERS, _NAMES, _NUMBER, _EVENTS], args=[f"{tenant}/{name}"])
        return None if version is None else int(version)

    async def digests(self) -> set[str]:
        """All digests that a name points to."""
        async with self._bounded():
            records = await self._command("HVALS", _ADAPTERS)
        return {record.split(" ", 2)[1] for record in records}

    async def set_key(self, tenant: str, key: str) -> None:
        """The API key is the tenant's from now on, until it is deleted. Raises KeyTaken if it is another tenant's."""
        check_tenant(tenant)
        await self._change_key(key, tenant)

    async def set_launch_keys(self, owner: str, keys: Sequence[tuple[str, str]]) -> None:
        """These keys, as (tenant, key), are all that `owner` gives: those that it gave before and no more are deleted.

        `owner` is one word. Keys that `set_key` gave, and those that other owners give too, stay. Raises KeyTaken, with
        nothing changed, if any key is another tenant's.
        """
        for tenant, _ in keys:
            check_tenant(tenant)
        args = [part for tenant, key in keys for part in (hash_key(key), tenant)]
        async with self._bounded():
            taken = await self._set_launch_keys_script(
                keys=[_KEYS, _LAUNCH_KEYS, _NUMBER, _EVENTS], args=[owner, *args]
            )
        if taken is not None:
            raise _key_taken(*taken)

    async def tenants_besides(self, owner: str) -> set[str]:
        """Tenants that have a key which somebody else than this `owner` of launch keys gave."""
        async with self._bounded():
            transaction: Any = self._client.pipeline(transaction=True)
            transaction.hgetall(_KEYS).smembers(_LAUNCH_KEYS)
            key_tenants, marks = await transaction.execute()
        owners: dict[str, set[str]] = {}
        for mark in marks:
            one, _, key_hash = mark.partition(" ")
            owners.setdefault(key_hash, set()).add(one)
        return {tenant for key_hash, tenant in key_tenants.items() if owners.get(key_hash) != {owner}}

    async def claim_base(self, base: BaseIdentity, remedy: str, *, if_empty: bool) -> None:
        """Makes the registry this base's, if it is nobody's yet, or `if_empty` and it has no adapters.

        Raises OtherBase, with `remedy` in its message, if it is another's.
        """
        async with self._bounded():
            held = await self._claim_base_script(keys=[_BASE, _ADAPTERS], args=[str(base), int(if_empty)])
        base.check(BaseIdentity.parse(held), "the registry in Redis", remedy)

    async def delete_key(self, key: str) -> None:
        """The API key is nobody's from now on."""
        await self._change_key(key, "")

    async def tenant_of_key(self, key: str) -> str | None:
        async with self._bounded():
            tenant: str | None = await self._command("HGET", _KEYS, hash_key(key))
        return tenant

    async def snapshot(self) -> Snapshot:
        async with self._bounded():
            transaction: Any = self._client.pipeline(transaction=True)
            transaction.xrevrange(_EVENTS, count=1).get(_NUMBER).hgetall(_ADAPTERS).hgetall(_KEYS)
            newest, number, adapters, keys = await transaction.execute()
        return Snapshot(
            adapters=tuple(decode_adapter(field, record) for field, record in adapters.items()),
            key_tenants=keys,
            event_id=newest[0][0] if newest else "0-0",
            event_number=int(number or 0),
        )

    async def read_events(self, after: str, wait_s: float) -> Sequence[NumberedEvent]:
        """Events after the one with this id; waits up to `wait_s` if there are none yet, and may return none."""
        async with self._bounded(wait_s):
            client: Any = self._client
            answer = await client.xread({_EVENTS: after}, count=1000, block=max(1, int(wait_s * 1000)))
        entries = answer[0][1] if answer else []
        return [NumberedEvent(event_id, int(fields["number"]), decode_event(fields)) for event_id, fields in entries]

    async def _change_key(self, key: str, tenant: str) -> None:
        async with self._bounded():
            owner = await self._set_key_script(
                keys=[_KEYS, _LAUNCH_KEYS, _NUMBER, _EVENTS], args=[hash_key(key), tenant]
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
    # The key itself is a secret: it is not repeated.
    return KeyTaken(f"a key that was given for {tenant} is {owner}'s already: each tenant needs keys of its own")
