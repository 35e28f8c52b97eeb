"""Grants in Redis: what a router obtains for them and reports of them, in batches, one message of a grant at a time.

A batch whose answer is late delays no other grants. A grant whose message had no answer is in an outage of its own: no
request waits for it until Redis has answered, and others' requests still do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from ...adapters.ended_tasks import end_tasks
from ..metrics import QuotaCall
from .grants import EXCHANGE, REPORT_INTERVAL_US, Grant, GrantMessage, Waiter

RETRY_S: Final = 0.5  # between tries of a grant that has no answer: no request waits for it meanwhile
LATE_S: Final = 0.1  # a later answer counts as late
_MAX_BATCH: Final = 256  # messages, so that one is answered in time also where thousands wait
_MAX_CALLS: Final = 8  # batches under way
_OVERTAKEN_S: Final = 0.02  # after which a batch without an answer no longer delays the others
_MAX_LOST: Final = 3  # connections that may break, one after the other, before a batch has failed
_LATENESS_S: Final = 0.05  # of a timer: this process was held up, and Redis may have answered in time

Costs = Sequence[tuple[Grant, int]]

_log = logging.getLogger(__name__)


class RedisAway(Exception):  # noqa: N818
    """Redis has not answered in time."""


class GrantSender:
    """Belongs to one event loop. `num_routers`: of the fleet. `wait_s`: for Redis.

    `call_outcomes`: unanswered: not within `wait_s`; unreachable: connections were refused or broke.
    """

    def __init__(self, client: Redis, num_routers: Callable[[], int], wait_s: float) -> None:
        self._client: Any = client
        self._num_routers, self.wait_s = num_routers, wait_s
        self.call_outcomes: Counter[QuotaCall] = Counter()
        self._due: dict[Grant, float] = {}  # when each is reported, in this order
        self._unsent: dict[Grant, None] = {}  # with a message for Redis, in this order
        self._under_way: set[Grant] = set()  # whose message is in a batch that has no answer yet
        self._outages: dict[Grant, float] = {}  # grants that Redis did not answer, by when each is tried again
        self._is_failing = False  # the last batch that ended had no answer
        self._next_try_us = 0.0  # of one batch, while Redis fails
        self._task: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._refused: WeakSet[Grant] = WeakSet()  # to whose last message Redis replied with an error

    async def drain(self) -> None:
        """Ends when what there is to send has been sent, or Redis does not answer soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.wait_s):
                while tasks := [task for task in (self._task, *self._calls) if task is not None]:
                    await asyncio.wait(tasks)
        self._unsent.clear()  # else a batch that is cancelled would start the next one
        await end_tasks(self._task, *self._calls)

    async def obtain(self, costs: Costs, *, is_resumed: bool = False, timeout_s: float = math.inf) -> Costs:
        """Has Redis add the costs to the grants. Returns those of which Redis had too little.

        Raises RedisAway after `wait_s`, or after `timeout_s` if that is shorter, and at once if one of the grants had
        no answer the last time.
        """
        if any(grant in self._outages for grant, _ in costs):
            raise RedisAway
        waiters = []
        for grant, cost in costs:
            waiters.append(Waiter(cost, asyncio.get_running_loop().create_future(), is_resumed and cost > 0))
            grant.waiters.append(waiters[-1])
            self.send(grant)
        futures = [waiter.is_short for waiter in waiters]
        try:
            await _wait(futures, min(self.wait_s, timeout_s))
            for (grant, _), future in zip(costs, futures, strict=True):
                if not future.done() and timeout_s >= self.wait_s:
                    self._enter_outage(grant)
        finally:
            for future in futures:
                _ = future.cancel() or future.exception()
        if any(future.cancelled() or future.exception() for future in futures):
            raise RedisAway
        return [cost for cost, future in zip(costs, futures, strict=True) if future.result()]

    def queue(self, grant: Grant) -> None:
        """Has the grant reported to Redis within REPORT_INTERVAL_US, if there is anything to report."""
        if grant.needs_report:
            self._due.setdefault(grant, clock_us() + REPORT_INTERVAL_US)

    def send(self, grant: Grant) -> None:
        """Has the grant reported to Redis now, or when its message under way is answered."""
        if grant in self._outages:
            self.queue(grant)
            return
        self._unsent[grant] = None
        self._start()

    def send_due(self) -> None:
        """Sends the reports of grants that were queued REPORT_INTERVAL_US ago, and tries grants without an answer."""
        now_us = clock_us()
        for grant in _until(self._due, now_us):
            del self._due[grant]
            if grant.needs_report:
                self.send(grant)
        if not self._is_failing or now_us >= self._next_try_us:
            retries = itertools.islice(_until(self._outages, now_us), _MAX_BATCH if self._is_failing else None)
            for grant in retries:
                del self._outages[grant]
                self._outages[grant] = self._next_try_us = now_us + RETRY_S * 1e6
                self._unsent[grant] = None
            self._start()

    def _start(self) -> None:
        if self._task is None and self._unsent:
            self._task = asyncio.create_task(self._send_all(), name="quotas in redis")

    async def _send_all(self) -> None:
        try:
            while True:
                ready = (grant for grant in self._unsent if grant not in self._under_way)
                batch = list(itertools.islice(ready, _MAX_BATCH))
                if not batch:
                    return  # a batch under way starts this again when it ends
                for grant in batch:
                    del self._unsent[grant]
                self._under_way.update(batch)
                call = asyncio.create_task(self._exchange(batch), name="quotas in redis: a batch")
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                await asyncio.wait((call,), timeout=_OVERTAKEN_S)
                while len(self._calls) >= _MAX_CALLS:
                    await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._task = None

    async def _exchange(self, batch: Sequence[Grant]) -> None:
        """Sends the messages of grants, and applies the replies."""
        began_us, num_routers = clock_us(), self._num_routers()
        messages = [grant.message(began_us, num_routers) for grant in batch]
        try:
            replies = await self._call(messages)
            self.call_outcomes["late" if clock_us() - began_us > LATE_S * 1e6 else "prompt"] += 1
            if self._is_failing:
                self._is_failing = False
                _log.info("quotas: redis is there again")
            for grant, message, reply in zip(batch, messages, replies, strict=True):
                self._outages.pop(grant, None)
                if isinstance(reply, Exception):
                    self._refuse(grant, reply)
                    continue
                grant.apply(message, reply, began_us)
                self._refused.discard(grant)
                if grant.waiters:
                    self._unsent[grant] = None
                self.queue(grant)
        except TimeoutError as error:
            self._fail(batch, "unanswered", error)
        except (RedisTimeout, RedisError, OSError) as error:
            self._fail(batch, "unanswered" if isinstance(error, RedisTimeout) else "unreachable", error)
        except Exception as error:  # else those that wait would wait for ever
            _log.exception("quotas: a reply of redis could not be read")
            self._fail(batch, "unreachable", error)
        finally:
            self._under_way.difference_update(batch)
            self._start()

    async def _call(self, messages: Sequence[GrantMessage]) -> list[Any]:
        """Raises RedisError, OSError or TimeoutError; then Redis may have got some of the messages."""
        call = asyncio.create_task(self._execute(messages))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await _wait((call,), self.wait_s)
            if not call.done():
                raise TimeoutError(f"no answer within {self.wait_s:g} s")
            return call.result()
        finally:
            call.cancel()

    async def _execute(self, messages: Sequence[GrantMessage]) -> list[Any]:
        """The replies; a ResponseError in place of one is that message's alone.

        Messages that Redis has carried out change nothing if they are sent again.
        """
        num_lost = 0
        while True:
            pipeline = self._client.pipeline(transaction=False)
            for message in messages:
                keys, args = EXCHANGE.parameters(**message.parameters)
                pipeline.evalsha(EXCHANGE.sha, len(keys), *keys, *args)
            try:
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
            except RedisConnectionError:
                num_lost += 1
                if num_lost == _MAX_LOST:
                    raise
                continue
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                return replies
            await self._client.script_load(EXCHANGE.source)

    def _refuse(self, grant: Grant, error: Exception) -> None:
        """Redis cannot carry out the grant's message, which is sent again later; other grants go on."""
        if not self._refused:  # else there would be a line for each grant where Redis refuses all
            _log.error("quotas: redis refused the message of %s: %s", grant.key, error)
        self._refused.add(grant)
        grant.fail(RedisAway())
        self.queue(grant)

    def _fail(self, batch: Sequence[Grant], outcome: QuotaCall, error: Exception) -> None:
        """Redis has not answered to the messages of the batch, which are sent again later."""
        self.call_outcomes[outcome] += 1
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "quotas: a message to redis was %s, grants are all that is left: %s",
                outcome,
                error or type(error).__name__,
            )
        for grant in batch:
            self._enter_outage(grant)

    def _enter_outage(self, grant: Grant) -> None:
        """Requests stop waiting for this grant until Redis has answered a message of it."""
        self._outages.setdefault(grant, clock_us() + RETRY_S * 1e6)
        grant.fail(RedisAway())
        self.queue(grant)


async def _wait(futures: Sequence[asyncio.Future[Any]], timeout_s: float) -> None:
    """Returns when all are done, or after `timeout_s`; not before they could be seen to be done."""
    loop = asyncio.get_running_loop()
    began_s, pending = loop.time(), set(futures)
    for _ in range(2):
        if pending:
            _, pending = await asyncio.wait(pending, timeout=timeout_s)
        if loop.time() <= began_s + timeout_s + _LATENESS_S:
            return


def _until(at_us: dict[Grant, float], now_us: float) -> Sequence[Grant]:
    """The grants whose time has come."""
    return [grant for grant, _ in itertools.takewhile(lambda item: item[1] <= now_us, at_us.items())]


def clock_us() -> float:
    return time.monotonic() * 1e6
