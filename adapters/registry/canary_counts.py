"""What all routers count of the answers of canaries and of the versions beside them, in Redis.

Each answer counts once, by its id, however often it is told: a router tells again what Redis did not confirm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from redis.asyncio import Redis

from ..versions.canary_policy import FIRST_TOKEN_EDGES_S, PER_TOKEN_EDGES_S, ArmCounts
from .redis_deadline import answered_within
from .registry_scripts import CANARIES, HOLD_SWEEP_SCRIPT, PREFIX

Arm = Literal["stable", "canary", "shadow"]
MAX_ANSWERS: Final = 100_000  # of a tenant, that are remembered; the oldest go first
ANSWERS_KEPT_S: Final = 86_400  # how long feedback on one is taken
COUNTS_KEPT_S: Final = 7 * 86_400  # after the last answer
MAX_COMMENTS: Final = 100  # of a canary
_FAILURE_KEPT_S: Final = 600

_COUNTS: Final = PREFIX + "canary:"  # + id: hash of counts, by "arm what"
_COMMENTS: Final = PREFIX + "canary_comments:"  # + id: list, the newest first
_ANSWERS: Final = PREFIX + "answers:"  # + tenant: hash: response id -> "canary arm", with " rated" once somebody did
_ORDER: Final = PREFIX + "answer_order:"  # + tenant: sorted set of response ids, by when they were counted
_FAILED: Final = PREFIX + "failed:"  # + tenant/name@version: why a gang could not load it; expires
_JUDGE: Final = PREFIX + "canary_judge"  # the router that judges, as a string that expires

OF_A_TENANT: Final = (_ANSWERS, _ORDER)
OF_A_TRIAL: Final = (_COUNTS, _COMMENTS)

# response id, "canary arm", Unix time, most answers, seconds of answers, seconds of counts, then what to count.
# Returns 1 if the answer had not been counted.
_COUNT_SCRIPT: Final = """
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
if redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[4]) then
  redis.call('HDEL', KEYS[1], redis.call('ZPOPMIN', KEYS[2])[1])
end
for i = 7, #ARGV do redis.call('HINCRBY', KEYS[3], ARGV[i], 1) end
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('EXPIRE', KEYS[3], ARGV[6])
return 1
"""
# response id, "canary arm", what to count, comment (empty: none), most comments, seconds of counts. Returns 1 if it
# counted.
_RATE_SCRIPT: Final = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' rated')
redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
redis.call('EXPIRE', KEYS[2], ARGV[6])
if ARGV[4] ~= '' then
  redis.call('LPUSH', KEYS[3], ARGV[4])
  redis.call('LTRIM', KEYS[3], 0, tonumber(ARGV[5]) - 1)
  redis.call('EXPIRE', KEYS[3], ARGV[6])
end
return 1
"""


@dataclass(frozen=True)
class Outcome:
    """An answer as it counts. `counted`: names of counts, as `ArmCounts` reads them."""

    tenant: str
    response_id: str
    canary_id: str
    arm: Arm
    counted: tuple[str, ...]


class CanaryCounts:
    """Raises RegistryUnavailable when Redis does not answer; every call may be repeated."""

    def __init__(self, client: Redis, timeout_s: float = 3.0, clock: Callable[[], float] = time.time) -> None:
        self._client: Any = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._count_script = client.register_script(_COUNT_SCRIPT)
        self._rate_script = client.register_script(_RATE_SCRIPT)
        self._hold_script = client.register_script(HOLD_SWEEP_SCRIPT)

    async def add(self, outcomes: Sequence[Outcome]) -> None:
        """Counts answers, each of them unless it was counted before."""
        now = self._clock()
        async with answered_within(self._timeout_s), self._client.pipeline(transaction=False) as pipeline:
            for one in outcomes:
                keys = [_ANSWERS + one.tenant, _ORDER + one.tenant, _COUNTS + one.canary_id]
                fields = [f"{one.arm} {what}" for what in one.counted]
                bounds = [MAX_ANSWERS, ANSWERS_KEPT_S, COUNTS_KEPT_S]
                args: list[Any] = [one.response_id, f"{one.canary_id} {one.arm}", now, *bounds, *fields]
                await self._count_script(keys=keys, args=args, client=pipeline)
            await pipeline.execute()

    async def rate(self, tenant: str, response_id: str, *, is_good: bool, comment: str = "") -> bool:
        """Counts what somebody thinks of an answer; whether it counted.

        It does not if the tenant has had no such answer in a trial within ANSWERS_KEPT_S, or if it was rated before.
        """
        async with answered_within(self._timeout_s):
            known: str | None = await self._client.hget(_ANSWERS + tenant, response_id)
            if known is None or known.endswith(" rated"):
                return False
            canary_id, arm = known.split(" ")
            keys = [_ANSWERS + tenant, _COUNTS + canary_id, _COMMENTS + canary_id]
            said = f"{arm} {'up' if is_good else 'down'}"
            remark = f"{said}: {comment}" if comment else ""
            counted = await self._rate_script(
                keys=keys, args=[response_id, known, said, remark, MAX_COMMENTS, COUNTS_KEPT_S]
            )
        return bool(counted)

    async def read(self, canary_id: str) -> Mapping[Arm, ArmCounts]:
        """The counts of a trial, of both of its versions, or of a shadow."""
        async with answered_within(self._timeout_s):
            counts = await self._client.hgetall(_COUNTS + canary_id)
        return {arm: _arm(arm, counts) for arm in ("stable", "canary", "shadow")}

    async def comments(self, canary_id: str) -> list[str]:
        """What people said of its answers, the newest first, each behind "arm up: " or "arm down: "."""
        async with answered_within(self._timeout_s):
            found: list[str] = await self._client.lrange(_COMMENTS + canary_id, 0, -1)
        return found

    async def running(self) -> list[tuple[str, str]]:
        """Tenant and name of all adapters that have a canary."""
        async with answered_within(self._timeout_s):
            fields = await self._client.smembers(CANARIES)
        return [(tenant, name) for tenant, name in (field.split("/") for field in sorted(fields))]

    async def hold_judging(self, router_id: str, hold_s: float) -> bool:
        """Makes one router the judge for `hold_s`, as often as it asks; 0 ends it. False: another one is."""
        async with answered_within(self._timeout_s):
            held = await self._hold_script(keys=[_JUDGE], args=[router_id, math.ceil(hold_s * 1000)])
        return bool(held)

    async def note_failure(self, tenant: str, name: str, version: int, reason: str | None) -> None:
        """Why a gang could not load a version; None: one can. It is forgotten after ten minutes."""
        key = f"{_FAILED}{tenant}/{name}@{version}"
        async with answered_within(self._timeout_s):
            await (self._client.delete(key) if reason is None else self._client.set(key, reason, ex=_FAILURE_KEPT_S))

    async def failures(self, tenant: str, name: str, versions: Sequence[int]) -> dict[int, str]:
        """Why gangs could not load versions lately."""
        async with answered_within(self._timeout_s):
            found = await self._client.mget([f"{_FAILED}{tenant}/{name}@{version}" for version in versions])
        return {version: reason for version, reason in zip(versions, found, strict=True) if reason is not None}


def _arm(arm: str, counts: Mapping[str, str]) -> ArmCounts:
    def count(what: str) -> int:
        return int(counts.get(f"{arm} {what}", 0))

    return ArmCounts(
        answers=count("answers"),
        errors=count("errors"),
        refused=count("refused"),
        first_token=tuple(count(f"first_token {place}") for place in range(len(FIRST_TOKEN_EDGES_S) + 1)),
        per_token=tuple(count(f"per_token {place}") for place in range(len(PER_TOKEN_EDGES_S) + 1)),
        thumbs_up=count("up"),
        thumbs_down=count("down"),
    )
