"""Quotas of tenants and keys: requests and tokens a minute, and answers at once, over all routers.

Every bounded request asks Redis once, in one script (`quota_scripts.py`), and one without quotas never does. Redis
away: the router goes by its share of the fleet's quotas (`local_shares.py`), and tells Redis what it let through when
that is back. Until all routers can have told theirs, which takes a moment, each goes on with its share. What Redis was
asked for and has not answered in time may be taken there nevertheless, so that is given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal
from uuid import uuid4

from redis.asyncio import Redis

from ...adapters.ended_tasks import end_tasks
from ..accounts.account import Account, AnswerRequest
from ..tenants.identity import Identity
from .bounds import Bounds, bounds_of
from .known_buckets import KnownBuckets
from .local_shares import Held, LocalShares, Report
from .quota_account import UNBOUNDED, Opened, QuotaAccount
from .quota_scripts import Outcome
from .redis_quotas import RedisQuotas
from .script_batches import RedisAway
from .standing import Costs, Headers, Standing, headers_of, rate_refusal, refusal

WAIT_S: Final = 0.1  # for Redis, of a request
RENEW_S: Final = 5.0
RETRY_S: Final = 0.5  # while Redis is away
GRACE_S: Final = 2.0  # in which every router finds Redis again, and tells what it let through
_MAX_UNSENT: Final = 10_000

_log = logging.getLogger(__name__)
_State = Literal["fleet", "away", "returning"]


class Quotas:
    """An `Accountant`. Owned by one event loop; from `start` to `stop`.

    `num_routers`: of the fleet, as this router has last heard. `wait_s`: for Redis.
    """

    def __init__(self, client: Redis, num_routers: Callable[[], int], *, wait_s: float = WAIT_S) -> None:
        self._redis = RedisQuotas(client, wait_s)
        self._num_routers = num_routers
        self._state: _State = "fleet"
        self._router = uuid4().hex[:12]
        self._num_leases = 0
        self._known = KnownBuckets()
        self._shares = LocalShares()
        self._accounts: dict[str, QuotaAccount] = {}  # that are open, by lease
        self._streams: dict[tuple[str, str], int] = {}  # answers under way here, by life and key ("": all keys)
        self._unsent: dict[str, tuple[QuotaAccount, int]] = {}  # ended while Redis was away: tokens used, by lease
        self._unanswered: dict[str, Opened] = {}  # that Redis may have opened, and that go by the share; by lease
        self._keeper: asyncio.Task[None] | None = None
        self._returner: asyncio.Task[None] | None = None

    @property
    def is_local(self) -> bool:
        """Whether this router goes by its share."""
        return self._state != "fleet"

    def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="quotas")

    async def stop(self) -> None:
        await end_tasks(self._keeper, self._returner)
        await self._redis.close()

    async def open(self, asked: AnswerRequest) -> Account:
        bounds = bounds_of(asked.identity)
        if bounds is None:
            return UNBOUNDED
        account = QuotaAccount(bounds, self._new_lease(), asked, self._settle)
        costs: Costs = {"requests": 1, "tokens": account.num_tokens}
        outcome, standing = await self._ask(account, costs) or self._open_here(account, costs)
        if outcome is not Outcome.ADMITTED:
            raise refusal(standing, costs, outcome)
        account.headers = headers_of(standing)
        self._accounts[account.lease] = account
        self._count_stream(bounds, 1)
        return account

    def precheck(self, identity: Identity, is_resuming: bool = False) -> Headers:
        """Headers of what is known to be left, before a request is read.

        Raises the 429 that it would get anyway for the requests that were made before it. `is_resuming`: for the rest
        of a stream, which is not charged again; so `open` decides.
        """
        bounds = bounds_of(identity)
        if bounds is None:
            return []
        now_us = _now_us()
        limits = [float(rate.limit) for rate in bounds.rates]
        standing = Standing(bounds, now_us, self._known.of(bounds), limits, 0, 0)
        if not (self.is_local or is_resuming):
            # Requests hardly ever come back, and other routers only take more of them.
            over = rate_refusal(standing, {"requests": 1})
            if over is not None:
                raise over
        return headers_of(standing)

    async def look(self, identity: Identity) -> Standing | None:
        """What is left now; None: nothing is bounded. Takes nothing."""
        bounds = bounds_of(identity)
        if bounds is None:
            return None
        if not self.is_local:
            try:
                return await self._redis.look(bounds)
            except RedisAway as error:
                self._lose(error)
        return self._shares.open(bounds, self._known.of(bounds), {}, _now_us(), self._num_routers())[1]

    async def _ask(self, account: QuotaAccount, costs: Costs) -> tuple[Outcome, Standing] | None:
        """What Redis says; None: it is away."""
        if self.is_local:
            return None
        asked_at_us = _now_us()
        try:
            outcome, standing = await self._redis.open(account, costs)
        except RedisAway as error:
            self._lose(error)
            if len(self._unanswered) < _MAX_UNSENT:
                self._unanswered[account.lease] = account.opened
            account.lease = self._new_lease()
            return None
        except asyncio.CancelledError:
            self._tell(account, 0, has_ended=True)  # it may have been admitted
            raise
        self._known.keep(standing, asked_at_us)
        return outcome, standing

    def _open_here(self, account: QuotaAccount, costs: Costs) -> tuple[Outcome, Standing]:
        """Goes by this router's share."""
        bounds, num_routers = account.bounds, max(1, self._num_routers())
        counts = [self._streams.get((bounds.life, key_id), 0) for key_id in ("", bounds.key_id)]
        limits = bounds.tenant_streams, bounds.key_streams
        # At least one, unless the fleet may have none. What others have is counted as theirs.
        rooms = [
            None if limit is None else (limit and max(1, limit // num_routers)) - count
            for limit, count in zip(limits, counts, strict=True)
        ]
        # What is resumed was admitted at a router that is gone, and none can tell others of that now.
        has_room = account.asked.is_resumed or all(room is None or room > 0 for room in rooms)
        taken = {} if account.asked.is_resumed or not has_room else costs
        admitted, standing, held = self._shares.open(bounds, self._known.of(bounds), taken, _now_us(), num_routers)
        account.held = None if account.asked.is_resumed else held
        account.is_unheard = account.is_kept
        streams = [(limit or 0) - max(0, room or 0) for limit, room in zip(limits, rooms, strict=True)]
        standing = replace(standing, tenant_streams=streams[0], key_streams=streams[1])
        if not has_room:
            return Outcome.TOO_MANY_STREAMS, standing
        return Outcome.ADMITTED if admitted else Outcome.RATE_EXCEEDED, standing

    def _settle(self, account: QuotaAccount, used: int) -> None:
        """The answer has ended with so many tokens used."""
        if self._accounts.pop(account.lease, None) is None:
            return
        self._count_stream(account.bounds, -1)
        self._charge(account, used, has_ended=True)
        if account.held is not None and account.is_kept and not account.is_unheard:
            self._tell(account, 0, has_ended=True)  # its place, which Redis was told of when it was found again

    def _charge(self, account: QuotaAccount, used: int, *, has_ended: bool) -> None:
        if account.held is None:
            if account.is_kept:
                self._tell(account, used, has_ended=has_ended)
        elif self.is_local:
            life, now_us = account.bounds.life, _now_us()
            account.held = [self._shares.use(life, held, used, now_us, has_ended=has_ended) for held in account.held]
        else:
            self._report_more(account, used)

    def _report_more(self, account: QuotaAccount, used: int) -> None:
        """Redis has heard what the answer was given here when it was found again; what it uses beyond that is new.

        What it does not use has drained within a minute, and is not given back.
        """
        limits = {rate.name: rate.limit for rate in account.bounds.rates}
        held = account.held or []
        more = [
            Report(account.bounds.life, one.name, limits[one.name], used - one.units)
            for one in held
            if used > one.units
        ]
        for reply in self._redis.report(more):
            reply.add_done_callback(self._hear)
        account.held = [Held(one.name, max(one.units, float(used)), one.end_us) for one in held]

    def _tell(self, account: QuotaAccount, used: int, *, has_ended: bool) -> None:
        if has_ended and len(self._unsent) < _MAX_UNSENT:
            self._unsent[account.lease] = account, used  # until Redis has heard it
        if self._state == "away":
            return
        reply = self._redis.use(account, used, has_ended=has_ended)
        reply.add_done_callback(self._hear)
        if has_ended:
            reply.add_done_callback(lambda heard: _is_well(heard) and self._unsent.pop(account.lease, None))

    def _hear(self, reply: asyncio.Future[int]) -> None:
        if not _is_well(reply):
            error = None if reply.cancelled() else reply.exception()
            self._lose(error if isinstance(error, RedisAway) else RedisAway("it was not heard"))

    def _lose(self, error: RedisAway) -> None:
        if self._state == "fleet":
            _log.warning("quotas: redis is away, this router goes by its share: %s", error)
            self._returner = asyncio.create_task(self._return(), name="quotas return")
        self._state = "away"

    async def _return(self) -> None:
        """Finds Redis again, tells it what this router let through, and ends when all routers can have done so."""
        loop, found_at = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(RETRY_S if self._state == "away" else RETRY_S / 4)
            try:
                await self._tell_all()
                if self._state == "returning" and loop.time() >= found_at + GRACE_S:
                    self._go_back()
                    return
            except RedisAway:
                self._state = "away"
                continue
            except Exception:  # nobody else would bring this router back
                _log.exception("quotas: redis could not be told what this router let through")
                self._state = "away"
                continue
            if self._state == "away":
                self._state, found_at = "returning", loop.time()

    def _go_back(self) -> None:
        # Before anything that is asked from now on.
        for reply in (*self._report_shares(), *self._hold_unheard()):
            reply.add_done_callback(self._hear)
        self._shares.clear()
        self._state = "fleet"
        _log.info("quotas: redis is there again")

    async def _tell_all(self) -> None:
        """Raises RedisAway; then what was not heard is told the next time."""
        await self._redis.knock()
        heard = await asyncio.gather(*self._report_shares(), return_exceptions=True)
        unanswered = list(self._unanswered.values())
        voided = await asyncio.gather(*map(self._redis.void, unanswered), return_exceptions=True)
        for opened, reply in zip(unanswered, voided, strict=True):
            if not isinstance(reply, BaseException):
                self._unanswered.pop(opened.lease, None)
        unsent = list(self._unsent.items())
        ends = [self._redis.use(account, used, has_ended=True) for _, (account, used) in unsent]
        told = await asyncio.gather(*ends, return_exceptions=True)
        for (lease, _), reply in zip(unsent, told, strict=True):
            if not isinstance(reply, BaseException):
                self._unsent.pop(lease, None)
        _raise_first((*heard, *voided, *told))
        goes_on = *self._hold_unheard(), *self._redis.renew(self._accounts)  # what was voided is no more
        _raise_first(await asyncio.gather(*goes_on, return_exceptions=True))

    def _report_shares(self) -> Sequence[asyncio.Future[int]]:
        reports = self._shares.reports(_now_us())
        replies = self._redis.report(reports)
        for report, reply in zip(reports, replies, strict=True):
            reply.add_done_callback(partial(self._hear_report, report))
        return replies

    def _hold_unheard(self) -> Sequence[asyncio.Future[int]]:
        accounts = [account for account in self._accounts.values() if account.is_unheard]
        replies = [self._redis.hold(account) for account in accounts]
        for account, reply in zip(accounts, replies, strict=True):
            account.is_unheard = False
            reply.add_done_callback(partial(self._hear_hold, account))
        return replies

    def _hear_hold(self, account: QuotaAccount, reply: asyncio.Future[int]) -> None:
        account.is_unheard = not _is_well(reply)

    def _hear_report(self, report: Report, reply: asyncio.Future[int]) -> None:
        if _is_well(reply):
            self._shares.heard(report)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                self._keep_up()
            except Exception:  # else all answers under way would lose their places
                _log.exception("quotas: answers under way could not be renewed or charged")

    def _keep_up(self) -> None:
        if not self.is_local:
            for reply in self._redis.renew(self._accounts):
                reply.add_done_callback(self._hear)
        for account in list(self._accounts.values()):
            if account.may_exceed:
                self._charge(account, account.used(), has_ended=False)
        self._known.forget_full(_now_us())

    def _new_lease(self) -> str:
        self._num_leases += 1
        return f"{self._router}:{self._num_leases}"

    def _count_stream(self, bounds: Bounds, change: int) -> None:
        if bounds.has_streams:
            for key in ((bounds.life, ""), (bounds.life, bounds.key_id)):
                count = self._streams.pop(key, 0) + change
                if count:
                    self._streams[key] = count


def _is_well(reply: asyncio.Future[int]) -> bool:
    return not reply.cancelled() and reply.exception() is None


def _raise_first(replies: Iterable[object]) -> None:
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply


def _now_us() -> float:
    return time.monotonic() * 1e6
