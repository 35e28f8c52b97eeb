"""Quotas of tenants, users and keys: requests and tokens a minute, and answers at once, over all routers.

Routers hold grants (`grants.py`), which Redis has deducted from the tenant's budget, so a request waits for Redis only
if a grant lacks what it needs. Units that are idle for a quarter of a second are returned. Without Redis only the
grants can be used, until their leases end; then requests of tenants with quotas get a 503.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4
from weakref import WeakValueDictionary

from redis.asyncio import Redis

from ...adapters.ended_tasks import end_tasks
from ...adapters.registry.tenants.records import Quota
from ..http.auth import Identity
from ..http.errors import RETRY_AFTER_S, ApiError, insufficient_quota, unavailable
from ..http.loop_turns import LoopShare
from ..metrics import QuotaCall
from .account import Account, AnswerRequest, Ending, Progress
from .grant_sender import Costs, GrantSender, RedisAway, clock_us
from .grants import PERIOD_US, Grant, Kind, Level, Limit, Taken, limits_of, quotas_of

# Limits in answers to clients: headers, and refusals as OpenAI words them.

Headers = list[tuple[bytes, bytes]]
_KINDS: Final[tuple[Kind, ...]] = ("requests", "tokens", "streams")  # of answers


def headers_of(levels: Sequence[Level]) -> Headers:
    """OpenAI's rate-limit headers. Where tenant, user and key have a limit, of the one that has less left."""
    headers: Headers = []
    for kind in _KINDS:
        level = min(
            (candidate for candidate in levels if candidate.limit.kind == kind),
            key=lambda candidate: candidate.num_left,
            default=None,
        )
        if level is None:
            continue
        name = kind.encode()
        headers += [
            (b"x-ratelimit-limit-" + name, b"%d" % level.limit.limit),
            (b"x-ratelimit-remaining-" + name, b"%d" % level.num_left),
        ]
        if level.limit.is_rate:
            headers.append((b"x-ratelimit-reset-" + name, duration(level.full_in_s).encode()))
    return headers


def zero_refusal(limit: Limit) -> ApiError:
    unit = f"{limit.kind} a minute" if limit.is_rate else "answers at once"
    return insufficient_quota(f"This {limit.owner}'s quota of {unit} is 0: ask the operators for more.")


def refusal(lacking: Sequence[tuple[Level, int]], levels: Sequence[Level]) -> ApiError:
    """The 429 for a request whose cost some limits do not have. `levels`: of all its limits."""
    level, cost = max(lacking, key=lambda pair: pair[0].wait_s(pair[1]) if pair[0].limit.is_rate else 0.0)
    limit, wait_s = level.limit, float(RETRY_AFTER_S)
    if limit.is_rate:
        wait_s = max(level.wait_s(cost), 1e-6)
        message = (
            f"Rate limit reached for this {limit.owner}'s {limit.kind} a minute: limit {limit.limit}, left "
            f"{level.num_left}, requested {cost}. Try again in {duration(wait_s)}."
        )
        if limit.kind == "tokens":
            message += " The prompt is counted, and max_tokens of each sequence."
    else:
        message = (
            f"This {limit.owner} may have {limit.limit} answers made at once, and has no more left: try again when one "
            "has ended."
        )
    headers = {name.decode(): value.decode() for name, value in headers_of(levels)}
    headers["Retry-After"] = str(max(RETRY_AFTER_S, math.ceil(wait_s)))
    headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 8.64s, 6m0s.

    >>> duration(0.25), duration(61.5), duration(3600)
    ('250ms', '1m2s', '60m0s')
    """
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 100) / 100:g}s"
    minutes, remainder = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{remainder}s"


WAIT_S: Final = 2.0  # that a request waits for Redis
MAX_WAITING: Final = 256  # requests of a tenant that wait for Redis at a router
RENEW_S: Final = 5.0  # leases of running answers, and charges of those that exceed their reservation
_TICK_S: Final = 0.05
_RETURNED_S: Final = 0.5  # within which other routers return grants that they do not need
MAX_TAKEOVERS: Final = 4  # connections that may resume one stream while earlier ones have not ended

_MAX_DEBT_S: Final = 2 * PERIOD_US / 1e6  # of tokens: with a larger debt streams cannot be resumed either

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Holder:
    """The limits of one key's requests, from the quotas of tenant, user and key. `grants`: for limits above 0."""

    tenant_id: str
    quotas: tuple[Quota, ...]
    limits: tuple[Limit, ...]
    grants: tuple[Grant, ...]

    def check_zero(self, *, of_uploads: bool = False) -> None:
        """Raises the 429 of a quota of 0, for which waiting does not help."""
        if len(self.grants) < len(self.limits):
            for limit in self.limits:
                if not limit.limit and (limit.kind == "uploads") == of_uploads:
                    raise zero_refusal(limit)

    def levels(self, now_us: float) -> list[Level]:
        zeros = [Level(limit) for limit in self.limits if not limit.limit]
        return [*(grant.level(now_us) for grant in self.grants), *zeros]


@dataclass(slots=True, eq=False)
class QuotaAccount:
    """Account of one answer. `places`: grants of `streams` that it holds a place of; `reserved`: tokens by grant."""

    request: AnswerRequest
    on_end: Callable[[QuotaAccount, Ending], None]
    headers: Headers = field(default_factory=list)
    places: list[Grant] = field(default_factory=list)
    reserved: list[tuple[Grant, Taken]] = field(default_factory=list)
    has_own_places: bool = True  # False: Redis does not count them for this router
    num_takeovers: int = 0  # of its places, by connections that resumed its stream

    def settle(self, ending: Ending) -> None:
        self.on_end(self, ending)


class Quotas:
    """An `Accountant`. Owned by one event loop; used between `start` and `stop`.

    `num_routers`: of the fleet, as far as this router knows. `wait_s`: how long requests wait for Redis.
    """

    def __init__(self, client: Redis, num_routers: Callable[[], int], *, wait_s: float = WAIT_S) -> None:
        self._sender = GrantSender(client, num_routers, wait_s)
        self._router = uuid4().hex[:12]
        self._holders: dict[tuple[str, str], _Holder] = {}  # by tenant's id and key
        # By key in Redis: one for each limit, as long as a holder, an account or a request refers to it.
        self._grants: WeakValueDictionary[str, Grant] = WeakValueDictionary()
        self._num_waiting: Counter[str] = Counter()  # for Redis, by tenant's id
        self._accounts: dict[str, QuotaAccount] = {}  # of answers under way, by response
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="quotas")

    async def stop(self) -> None:
        """Returns all grants of this router, if Redis can be reached."""
        await end_tasks(self._keeper)
        for grant in list(self._grants.values()):
            if not grant.is_idle:
                self._sender.send(grant)
        await self._sender.drain()

    async def open(self, request: AnswerRequest) -> Account:
        holder, account = self._holder(request.identity), QuotaAccount(request, self._settle)
        if not holder.limits:
            return account
        holder.check_zero()
        while True:
            earlier = self._earlier_connection(request)
            costs = _costs(holder, request, has_place=earlier is not None)
            try:
                await self._obtain(costs, holder, is_resumed=request.is_resumed, deadline=request.deadline)
            except RedisAway as error:
                if not request.is_resumed:
                    raise _quotas_unread() from error
            if earlier is None or (earlier := self._earlier_connection(request)) is not None:
                break  # else the earlier connection ended meanwhile, and a place is needed
        if earlier is not None:
            account.places, earlier.places = earlier.places, []
            account.has_own_places, account.num_takeovers = earlier.has_own_places, earlier.num_takeovers + 1
        self._take(account, costs)
        account.headers = headers_of(holder.levels(clock_us()))
        return account

    def precheck(self, identity: Identity, is_resuming: bool = False) -> Headers:
        """Headers with what is left as far as this router knows, before a request is read.

        Raises the 429 of a request that `open` would certainly refuse. `is_resuming`: it resumes a stream, which does
        not count as a request.
        """
        holder, now_us = self._holder(identity), clock_us()
        levels = holder.levels(now_us)
        if not is_resuming:
            holder.check_zero()
            for grant in holder.grants:
                # Requests are never returned, so this router's count of them is an upper bound.
                level = grant.level(now_us, with_held=False)
                if level.limit.kind == "requests" and not grant.has(1, now_us) and level.wait_s(1):
                    raise refusal([(level, 1)], levels)
        return headers_of(levels)

    async def take_upload(self, identity: Identity) -> None:
        """Takes one upload of an adapter, which is charged even if it fails.

        Raises a 429 if the tenant or key has none left, and a 503 if that cannot be read.
        """
        holder = self._holder(identity)
        holder.check_zero(of_uploads=True)
        costs = [(grant, 1) for grant in holder.grants if grant.limit.kind == "uploads"]
        try:
            await self._obtain(costs, holder, is_resumed=False)
        except RedisAway as error:
            raise _quotas_unread() from error
        now_us = clock_us()
        for grant, _ in costs:
            grant.take(1, now_us)
            self._sender.queue(grant)

    async def look(self, identity: Identity) -> tuple[Sequence[Level], bool]:
        """The level of each limit, and whether it is current: False if Redis is unreachable. Takes nothing."""
        holder, is_fleet_wide = self._holder(identity), True
        try:
            await self._exchange(holder, [(grant, 0) for grant in holder.grants])
        except RedisAway:
            is_fleet_wide = False
        return holder.levels(clock_us()), is_fleet_wide

    def _holder(self, identity: Identity) -> _Holder:
        tenant_id, key_id = identity.tenant.tenant_id, identity.key.key_id
        holder = self._holders.get((tenant_id, key_id))
        quotas = tuple([quota for _, quota, _ in quotas_of(identity)])
        if holder is None or holder.quotas != quotas:
            limits = limits_of(identity)
            grants = tuple(self._grant(tenant_id, limit) for limit in limits if limit.limit)
            holder = _Holder(tenant_id, quotas, limits, grants)
            if limits:
                self._holders[tenant_id, key_id] = holder
        return holder

    def _grant(self, tenant_id: str, limit: Limit) -> Grant:
        key = redis_key(tenant_id, limit)
        grant = self._grants.get(key)
        if grant is None:
            grant = self._grants[key] = Grant(key, limit, self._router)
        grant.update(limit)
        return grant

    @property
    def call_outcomes(self) -> Mapping[QuotaCall, int]:
        """How Redis has answered the batches of this router's messages."""
        return self._sender.call_outcomes

    async def _exchange(
        self, holder: _Holder, costs: Costs, *, is_resumed: bool = False, deadline: float | None = None
    ) -> Costs:
        """As `GrantSender.obtain`. Raises RedisAway also if too many requests of the tenant wait already."""
        if self._num_waiting[holder.tenant_id] >= MAX_WAITING:
            raise RedisAway
        timeout_s = math.inf if deadline is None else max(0.0, deadline - time.perf_counter())
        self._num_waiting[holder.tenant_id] += 1
        try:
            return await self._sender.obtain(costs, is_resumed=is_resumed, timeout_s=timeout_s)
        finally:
            self._num_waiting[holder.tenant_id] -= 1
            if not self._num_waiting[holder.tenant_id]:
                del self._num_waiting[holder.tenant_id]

    async def _obtain(self, costs: Costs, holder: _Holder, *, is_resumed: bool, deadline: float | None = None) -> None:
        """Returns when all grants have their costs. Raises the 429 if Redis lacks one, and RedisAway."""
        may_wait, lacking = True, costs if is_resumed else _lacking(costs)
        while lacking:
            short = await self._exchange(holder, lacking, is_resumed=is_resumed, deadline=deadline)
            lacking, now_us = _lacking(short), clock_us()
            if not lacking:
                lacking = _lacking(costs)
            elif may_wait and all(grant.level(now_us, with_held=False).num_left >= cost for grant, cost in lacking):
                may_wait = False  # other routers hold enough, and may return it
                await asyncio.sleep(_RETURNED_S)
            else:
                raise refusal([(grant.level(now_us), cost) for grant, cost in lacking], holder.levels(now_us))
        for grant, _ in costs if is_resumed else ():
            level = grant.level(clock_us(), with_held=False)  # what routers hold is not a debt
            if grant.limit.kind == "tokens" and level.full_in_s > _MAX_DEBT_S:
                raise refusal([(level, 0)], holder.levels(clock_us()))

    def _earlier_connection(self, request: AnswerRequest) -> QuotaAccount | None:
        """The connection of a resumed stream that has not ended at this router, and whose places may be taken over."""
        earlier = self._accounts.get(request.response_id) if request.is_resumed else None
        return earlier if earlier and earlier.places and earlier.num_takeovers < MAX_TAKEOVERS else None

    def _take(self, account: QuotaAccount, costs: Costs) -> None:
        now_us = clock_us()
        for grant, cost in costs:
            reservation = grant.take(cost, now_us) if cost and grant.has(cost, now_us) else None
            if grant.limit.kind == "tokens":
                account.reserved.append((grant, reservation or Taken(0, 0.0, 0, 0.0)))
            elif grant.limit.kind == "streams" and cost:
                account.places.append(grant)
                if reservation is None:  # a resumed stream, while Redis is away
                    account.has_own_places = False
                    grant.add_place()
            self._sender.queue(grant)
        if account.places or account.reserved:
            self._accounts[account.request.response_id] = account

    def _charge(self, account: QuotaAccount, progress: Progress) -> None:
        """Charges what the answer has used beyond what it reserved."""
        used = progress.num_prompt_tokens + progress.num_completion_tokens
        for index, (grant, reservation) in enumerate(account.reserved):
            if used > reservation.units:
                account.reserved[index] = grant, grant.settle(reservation, used)
                self._sender.queue(grant)

    def _settle(self, account: QuotaAccount, ending: Ending) -> None:
        if self._accounts.get(account.request.response_id) is account:
            del self._accounts[account.request.response_id]
        progress, now_us = ending.progress, clock_us()
        used = progress.num_prompt_tokens + progress.num_completion_tokens
        if ending.error == "taken_over" and account.request.num_sequences == 1:
            used = 0  # the connection that took the stream over is charged for all of it
        for grant, reservation in account.reserved:
            grant.settle(reservation, used)
        # A client whose stream broke may have resumed it at another router, which has taken over its place.
        is_reusable = account.has_own_places and not ending.error and not ending.is_cancelled
        for grant in account.places:
            grant.release(now_us, is_reusable=is_reusable)
        for grant in {*account.places, *(grant for grant, _ in account.reserved)}:
            if grant.level(now_us).num_left * 2 < grant.limit.limit:
                self._sender.send(grant)  # at once, since other routers may need it
            else:
                self._sender.queue(grant)

    async def _keep(self) -> None:
        renew_at_us = clock_us() + RENEW_S * 1e6
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._sender.send_due()
                if clock_us() >= renew_at_us:
                    renew_at_us = clock_us() + RENEW_S * 1e6
                    await self._renew()
            except Exception:  # else all answers under way would lose their places
                _log.exception("quotas: answers under way could not be renewed or charged")

    async def _renew(self) -> None:
        now_us, share = clock_us(), LoopShare()
        for name, holder in list(self._holders.items()):
            is_idle = all(grant.is_idle and not grant.level(now_us).backlog_us for grant in holder.grants)
            if is_idle and self._holders.get(name) is holder:
                del self._holders[name]
            await share.pause()
        for grant in list(self._grants.values()):
            if grant.in_use:
                self._sender.send(grant)
            await share.pause()
        for response_id, account in list(self._accounts.items()):
            if account.reserved and self._accounts.get(response_id) is account:  # it has not ended
                self._charge(account, account.request.progress())
                await share.pause()


def _quotas_unread() -> ApiError:
    message = "The tenant's quotas cannot be read now, and this router has used up its grants."
    return unavailable(message, "registry_unavailable")


def redis_key(tenant_id: str, limit: Limit) -> str:
    """The key of a limit. All limits of a tenant are in one slot of a Redis cluster."""
    return f"motet:{{tenant:{tenant_id}}}:quota:limit:{limit.name}"


def _costs(holder: _Holder, request: AnswerRequest, *, has_place: bool) -> Costs:
    units: dict[Kind, int] = {"requests": 1, "streams": 1, "uploads": 0}
    units["tokens"] = request.num_prompt_tokens + request.num_new_tokens
    if request.is_resumed:  # it was admitted before, and is charged for what it uses from now on
        units = {"requests": 0, "tokens": 0, "streams": 0 if has_place else 1, "uploads": 0}
    return [(grant, grant.limit.reserved(units[grant.limit.kind])) for grant in holder.grants]


def _lacking(costs: Costs) -> Costs:
    now_us = clock_us()
    return [(grant, cost) for grant, cost in costs if cost and not grant.has(cost, now_us)]
