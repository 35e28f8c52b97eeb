"""Quotas of tenants and keys: requests and tokens a minute, and answers at once, over all routers.

Routers hold grants (`grants.py`), which Redis has deducted from the tenant's budget, so a request waits for Redis only
if a grant lacks what it needs. Units that are idle for a quarter of a second go back. Without Redis the grants are all
that may be used, until their leases end; then requests of tenants with quotas get a 503.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4
from weakref import WeakValueDictionary

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from ...adapters.ended_tasks import end_tasks
from ...adapters.registry.tenants.records import Quota
from ..accounts.account import Account, AnswerRequest, Ending, Progress
from ..loop_share import LoopShare
from ..openai_api.errors import unavailable
from ..tenants.identity import Identity
from .grants import EXCHANGE, REPORT_INTERVAL_US, Grant, Message, Taken, Waiter
from .limits import PERIOD_US, Level, Limit, limits_of
from .refusals import Headers, headers_of, refusal, zero_refusal

WAIT_S: Final = 0.1  # for Redis, of a request
RETRY_S: Final = 0.5  # after Redis has failed, no request waits for it until then
RENEW_S: Final = 5.0  # leases of answers under way, and charges of those that exceed what they took
_TICK_S: Final = 0.05
_RETURNED_S: Final = 0.5  # by then other routers have given back what they do not need
_MAX_BATCH: Final = 256  # messages, so that one is answered in time also where thousands wait
_LATENESS_S: Final = 0.05  # of a timer: this process was held up, and Redis may have answered in time
MAX_TAKEOVERS: Final = 4  # connections that may resume one stream while the ones before have not ended

_MAX_DEBT_S: Final = 2 * PERIOD_US / 1e6  # of tokens: with more, streams are not resumed either
Costs = Sequence[tuple[Grant, int]]

_log = logging.getLogger(__name__)


class RedisAway(Exception):  # noqa: N818
    """Redis has not answered in time."""


@dataclass(slots=True)
class _Holder:
    """The limits of one key's requests, by these quotas of its tenant and its own. `grants`: of limits above 0."""

    quotas: tuple[Quota, Quota]
    limits: tuple[Limit, ...]
    grants: tuple[Grant, ...]

    def check_zero(self) -> None:
        """Raises the 429 of a quota of 0, for which waiting does not help."""
        if len(self.grants) < len(self.limits):
            raise zero_refusal(next(limit for limit in self.limits if not limit.limit))

    def levels(self, now_us: float) -> list[Level]:
        zeros = [Level(limit) for limit in self.limits if not limit.limit]
        return [*(grant.level(now_us) for grant in self.grants), *zeros]


class QuotaAccount:
    """Of one answer. `places`: grants of `streams` of which it has a place; `reserved`: its tokens, by grant."""

    def __init__(self, request: AnswerRequest, on_end: Callable[[QuotaAccount, Ending], None]) -> None:
        self.request = request
        self.headers: Headers = []
        self.places: list[Grant] = []
        self.reserved: list[tuple[Grant, Taken]] = []
        self.has_own_places = True  # False: Redis does not know of them as this router's
        self.num_takeovers = 0  # of its places, by connections that resumed its stream
        self.before: QuotaAccount | None = None  # while it is opened: the connection whose places it took over
        self.has_ended = False
        self._on_end = on_end

    def settle(self, ending: Ending) -> None:
        self.has_ended = True
        self._on_end(self, ending)


class _NoLimits:
    headers: Sequence[tuple[bytes, bytes]] = ()

    def settle(self, ending: Ending) -> None: ...


_NO_LIMITS: Final = _NoLimits()


class Quotas:
    """An `Accountant`. Owned by one event loop; from `start` to `stop`.

    `num_routers`: of the fleet, as far as this router knows. `wait_s`: for Redis.
    """

    def __init__(self, client: Redis, num_routers: Callable[[], int], *, wait_s: float = WAIT_S) -> None:
        self._client: Any = client
        self._num_routers, self._wait_s = num_routers, wait_s
        self._router = uuid4().hex[:12]
        self._holders: dict[tuple[str, str], _Holder] = {}  # by tenant's id and key
        # By key in Redis: there is one of each limit, for as long as a holder, an account or a request has it.
        self._grants: WeakValueDictionary[str, Grant] = WeakValueDictionary()
        self._accounts: dict[str, QuotaAccount] = {}  # of answers under way, by response
        self._due: deque[tuple[float, Grant]] = deque()  # when grants give back what is idle
        self._unsent: dict[Grant, None] = {}  # with a message for Redis, in this order
        self._sender: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_away, self._away_until_s = False, 0.0

    def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="quotas")

    async def stop(self) -> None:
        """Gives back what this router holds, if Redis is there."""
        await end_tasks(self._keeper)
        for grant in list(self._grants.values()):
            if not grant.is_idle:
                self._send(grant)
        if self._sender is not None:
            await asyncio.wait((self._sender,), timeout=2 * self._wait_s)
        await end_tasks(self._sender)

    async def open(self, request: AnswerRequest) -> Account:
        holder = self._holder(request.identity)
        if not holder.limits:
            return _NO_LIMITS
        holder.check_zero()
        account = QuotaAccount(request, self._settle)
        if request.is_resumed:  # it was admitted before, and is charged for what it uses from now on
            units = {"requests": 0, "tokens": 0, "streams": 0 if self._take_places(account) else 1}
        else:
            num_tokens = request.num_prompt_tokens + request.num_new_tokens
            units = {"requests": 1, "tokens": num_tokens, "streams": 1}
        costs = [(grant, grant.limit.reserved(units[grant.limit.kind])) for grant in holder.grants]
        try:
            await self._obtain(costs, holder, is_resumed=request.is_resumed)
        except RedisAway as error:
            if not request.is_resumed:
                message = "The tenant's quotas cannot be read now, and this router has used up its part of them."
                raise unavailable(message, "registry_unavailable") from error
        except BaseException:
            self._give_back_places(account)
            raise
        self._open_account(account, costs)
        account.headers = headers_of(holder.levels(_now_us()))
        return account

    def precheck(self, identity: Identity, is_resuming: bool = False) -> Headers:
        """Headers of what is left as far as this router knows, before a request is read.

        Raises the 429 of a request that `open` would certainly refuse. `is_resuming`: it resumes a stream, which takes
        nothing of the quota of requests.
        """
        holder, now_us = self._holder(identity), _now_us()
        levels = holder.levels(now_us)
        if not is_resuming:
            holder.check_zero()
            for grant in holder.grants:
                # Requests are never given back, so no more are left than this router knows of.
                known = grant.level(now_us, with_held=False)
                if known.limit.kind == "requests" and not grant.has(1, now_us) and known.wait_s(1):
                    raise refusal([(known, 1)], levels)
        return headers_of(levels)

    async def look(self, identity: Identity) -> tuple[Sequence[Level], bool]:
        """How full each limit is, and whether that is as of now: False if Redis is away. Takes nothing."""
        holder, is_fleet_wide = self._holder(identity), True
        try:
            await self._ask([(grant, 0) for grant in holder.grants])
        except RedisAway:
            is_fleet_wide = False
        return holder.levels(_now_us()), is_fleet_wide

    def _holder(self, identity: Identity) -> _Holder:
        tenant_id, key_id = identity.tenant.tenant_id, identity.key.key_id
        holder, quotas = self._holders.get((tenant_id, key_id)), (identity.tenant.quota, identity.key.quota)
        if holder is None or holder.quotas != quotas:
            limits = limits_of(identity)
            holder = _Holder(quotas, limits, tuple(self._grant(tenant_id, limit) for limit in limits if limit.limit))
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

    async def _obtain(self, costs: Costs, holder: _Holder, *, is_resumed: bool) -> None:
        """Returns when all grants have their costs. Raises the 429 if Redis lacks one, and RedisAway."""
        may_wait, lacking = True, costs if is_resumed else _lacking(costs)
        while lacking:
            short = await self._ask(lacking, is_resumed=is_resumed)
            lacking, now_us = _lacking(short), _now_us()
            if not lacking:
                lacking = _lacking(costs)
            elif may_wait and all(grant.level(now_us, with_held=False).left >= cost for grant, cost in lacking):
                may_wait = False  # other routers hold enough, and may return it
                await asyncio.sleep(_RETURNED_S)
            else:
                raise refusal([(grant.level(now_us), cost) for grant, cost in lacking], holder.levels(now_us))
        for grant, _ in costs if is_resumed else ():
            level = grant.level(_now_us(), with_held=False)  # what routers hold is no debt
            if grant.limit.kind == "tokens" and level.full_in_s > _MAX_DEBT_S:
                raise refusal([(level, 0)], holder.levels(_now_us()))

    async def _ask(self, costs: Costs, *, is_resumed: bool = False) -> Costs:
        """Has Redis add the costs to the grants. Returns those of which Redis had too little. Raises RedisAway."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until_s:
            raise RedisAway
        waiters = []
        for grant, cost in costs:
            waiters.append(Waiter(cost, loop.create_future(), is_resumed and cost > 0))
            grant.waiters.append(waiters[-1])
            self._send(grant)
        shorts = await asyncio.gather(*(waiter.is_short for waiter in waiters), return_exceptions=True)
        for error in shorts:
            if isinstance(error, BaseException):
                raise error
        return [cost for cost, is_short in zip(costs, shorts, strict=True) if is_short]

    def _take_places(self, account: QuotaAccount) -> bool:
        """Takes over the places of the same stream's connection before, if that has not ended at this router."""
        before = self._accounts.get(account.request.response_id)
        if before is None or not before.places or before.num_takeovers >= MAX_TAKEOVERS:
            return False
        account.places, before.places = before.places, []
        account.has_own_places, account.num_takeovers = before.has_own_places, before.num_takeovers + 1
        account.before = before
        return True

    def _give_back_places(self, account: QuotaAccount) -> None:
        """The account, which is not opened, took over the places of the connection before, if it has any."""
        before = account.before
        if before is not None and not before.has_ended:
            before.places = account.places
            return
        for grant in account.places:
            grant.release(_now_us(), is_reusable=False)
            self._queue(grant)

    def _open_account(self, account: QuotaAccount, costs: Costs) -> None:
        now_us = _now_us()
        for grant, cost in costs:
            taken = grant.take(cost, now_us) if cost and grant.has(cost, now_us) else None
            if grant.limit.kind == "tokens":
                account.reserved.append((grant, taken or Taken(0, 0.0, 0, 0.0)))
            elif grant.limit.kind == "streams" and cost:
                account.places.append(grant)
                if taken is None:  # a resumed stream, while Redis is away
                    account.has_own_places = False
                    grant.add_place()
            self._queue(grant)
        account.before = None
        if account.places or account.reserved:
            self._accounts[account.request.response_id] = account

    def _charge(self, account: QuotaAccount, progress: Progress) -> None:
        """Charges what the answer has used beyond what it reserved."""
        used = progress.num_prompt_tokens + progress.num_completion_tokens
        for index, (grant, taken) in enumerate(account.reserved):
            if used > taken.units:
                account.reserved[index] = grant, grant.settle(taken, used)
                self._queue(grant)

    def _settle(self, account: QuotaAccount, ending: Ending) -> None:
        if self._accounts.get(account.request.response_id) is account:
            del self._accounts[account.request.response_id]
        progress, now_us = ending.progress, _now_us()
        used = progress.num_prompt_tokens + progress.num_completion_tokens
        if ending.error == "taken_over" and account.request.num_sequences == 1:
            used = 0  # the connection that took the stream over is charged for all of it
        for grant, taken in account.reserved:
            grant.settle(taken, used)
        # A client whose stream broke may have resumed it at another router, which has taken over its place.
        is_reusable = account.has_own_places and not ending.error and not ending.is_cancelled
        for grant in account.places:
            grant.release(now_us, is_reusable=is_reusable)
        for grant in {*account.places, *(grant for grant, _ in account.reserved)}:
            if grant.level(now_us).left * 2 < grant.limit.limit:
                self._send(grant)  # at once, where others may be short of it
            else:
                self._queue(grant)

    def _queue(self, grant: Grant) -> None:
        """Has the grant reported to Redis within REPORT_INTERVAL_US, if there is anything to report."""
        if not grant.is_queued and grant.needs_report:
            grant.is_queued = True
            self._due.append((_now_us() + REPORT_INTERVAL_US, grant))

    def _send(self, grant: Grant) -> None:
        """Has the grant reported to Redis now, or when its message under way is answered."""
        if asyncio.get_running_loop().time() < self._away_until_s:
            self._queue(grant)
            return
        self._unsent[grant] = None
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="quotas in redis")

    async def _send_all(self) -> None:
        batch: list[Grant] = []
        try:
            while self._unsent:
                batch = list(itertools.islice(self._unsent, _MAX_BATCH))
                for grant in batch:
                    del self._unsent[grant]
                sent_at_us, num_routers = _now_us(), self._num_routers()
                messages = [grant.message(sent_at_us, num_routers) for grant in batch]
                replies = await self._call(messages)
                if self._is_away:
                    self._is_away = False
                    _log.info("quotas: redis is there again")
                for grant, message, reply in zip(batch, messages, replies, strict=True):
                    grant.apply(message, reply, sent_at_us)
                    if grant.waiters:
                        self._unsent[grant] = None
                    self._queue(grant)
        except (RedisError, OSError, TimeoutError) as error:
            self._fail(batch, error)
        except Exception as error:  # else those that wait would wait for ever
            _log.exception("quotas: a reply of redis could not be read")
            self._fail(batch, error)
        finally:
            self._sender = None

    async def _call(self, messages: Sequence[Message]) -> list[Any]:
        """Raises RedisError, OSError or TimeoutError; then Redis may have got some of the messages."""
        loop = asyncio.get_running_loop()
        began_s, call = loop.time(), asyncio.create_task(self._execute(messages))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            done, _ = await asyncio.wait((call,), timeout=self._wait_s)
            if not done and loop.time() > began_s + self._wait_s + _LATENESS_S:
                done, _ = await asyncio.wait((call,), timeout=self._wait_s)
            if not done:
                raise TimeoutError(f"no answer within {self._wait_s:g} s")
            return call.result()
        finally:
            call.cancel()

    async def _execute(self, messages: Sequence[Message]) -> list[Any]:
        for may_load in (True, False):
            pipeline = self._client.pipeline(transaction=False)
            for message in messages:
                keys, args = EXCHANGE.parameters(**message.parameters)
                pipeline.evalsha(EXCHANGE.sha, len(keys), *keys, *args)
            try:
                replies: list[Any] = await pipeline.execute()
                return replies
            except NoScriptError:
                if not may_load:
                    raise
                await self._client.script_load(EXCHANGE.source)
        raise AssertionError

    def _fail(self, batch: Sequence[Grant], error: Exception) -> None:
        """Redis has not answered to the messages of the batch, which are sent again later."""
        if not self._is_away:
            _log.warning("quotas: redis is away, grants are all that is left: %s", error or type(error).__name__)
        self._is_away, self._away_until_s = True, asyncio.get_running_loop().time() + RETRY_S
        grants, self._unsent = [*batch, *self._unsent], {}
        for grant in grants:
            grant.fail(RedisAway())
            self._queue(grant)

    async def _keep(self) -> None:
        renew_at_us = _now_us() + RENEW_S * 1e6
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._send_due()
                if _now_us() >= renew_at_us:
                    renew_at_us = _now_us() + RENEW_S * 1e6
                    await self._renew()
            except Exception:  # else all answers under way would lose their places
                _log.exception("quotas: answers under way could not be renewed or charged")

    def _send_due(self) -> None:
        now_us, is_away = _now_us(), asyncio.get_running_loop().time() < self._away_until_s
        while self._due and self._due[0][0] <= now_us and not is_away:
            grant = self._due.popleft()[1]
            grant.is_queued = False
            if grant.needs_report:
                self._send(grant)

    async def _renew(self) -> None:
        now_us, share = _now_us(), LoopShare()
        for name, holder in list(self._holders.items()):
            if all(grant.is_idle and not grant.level(now_us).backlog_us for grant in holder.grants):
                del self._holders[name]
        for grant in list(self._grants.values()):
            if grant.in_use:
                self._send(grant)
        for response_id, account in list(self._accounts.items()):
            if account.reserved and self._accounts.get(response_id) is account:  # it has not ended
                self._charge(account, account.request.progress())
                await share.pause()


def redis_key(tenant_id: str, limit: Limit) -> str:
    """All limits of a tenant are in one slot of a Redis cluster."""
    return f"motet:{{tenant:{tenant_id}}}:quota:limit:{limit.name}"


def _lacking(costs: Costs) -> Costs:
    now_us = _now_us()
    return [(grant, cost) for grant, cost in costs if cost and not grant.has(cost, now_us)]


def _now_us() -> float:
    return time.monotonic() * 1e6
