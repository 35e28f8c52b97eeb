"""Grants in Redis: what a router obtains for them and reports of them, in batches, one message of a grant at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakSet

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from ...adapters.ended_tasks import end_tasks
from .grants import EXCHANGE, REPORT_INTERVAL_US, Grant, Message, Waiter

RETRY_S: Final = 0.5  # after Redis has failed, no request waits for it until then
_MAX_BATCH: Final = 256  # messages, so that one is answered in time also where thousands wait
_LATENESS_S: Final = 0.05  # of a timer: this process was held up, and Redis may have answered in time

Costs = Sequence[tuple[Grant, int]]

_log = logging.getLogger(__name__)


class RedisAway(Exception):  # noqa: N818
    """Redis has not answered in time."""


class GrantSender:
    """Belongs to one event loop. `num_routers`: of the fleet. `wait_s`: for Redis, of one batch."""

    def __init__(self, client: Redis, num_routers: Callable[[], int], wait_s: float) -> None:
        self._client: Any = client
        self._num_routers, self.wait_s = num_routers, wait_s
        self._due: dict[Grant, float] = {}  # when each is reported, in this order
        self._unsent: dict[Grant, None] = {}  # with a message for Redis, in this order
        self._task: asyncio.Task[None] | None = None
        self._away_until_s = 0.0  # above 0 since Redis has failed, until it answers
        self._refused: WeakSet[Grant] = WeakSet()  # to whose last message Redis replied with an error

    async def drain(self) -> None:
        """Ends when what there is to send has been sent, or Redis does not answer soon."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=2 * self.wait_s)
        await end_tasks(self._task)

    async def obtain(self, costs: Costs, *, is_resumed: bool = False) -> Costs:
        """Has Redis add the costs to the grants. Returns those of which Redis had too little. Raises RedisAway."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until_s:
            raise RedisAway
        waiters = []
        for grant, cost in costs:
            waiters.append(Waiter(cost, loop.create_future(), is_resumed and cost > 0))
            grant.waiters.append(waiters[-1])
            self.send(grant)
        shorts = await asyncio.gather(*(waiter.is_short for waiter in waiters))
        return [cost for cost, is_short in zip(costs, shorts, strict=True) if is_short]

    def queue(self, grant: Grant) -> None:
        """Has the grant reported to Redis within REPORT_INTERVAL_US, if there is anything to report."""
        if grant.needs_report:
            self._due.setdefault(grant, clock_us() + REPORT_INTERVAL_US)

    def send(self, grant: Grant) -> None:
        """Has the grant reported to Redis now, or when its message under way is answered."""
        if asyncio.get_running_loop().time() < self._away_until_s:
            self.queue(grant)
            return
        self._unsent[grant] = None
        if self._task is None:
            self._task = asyncio.create_task(self._send_all(), name="quotas in redis")

    def send_due(self) -> None:
        """Sends the reports of grants that were queued REPORT_INTERVAL_US ago."""
        if asyncio.get_running_loop().time() < self._away_until_s:
            return
        now_us = clock_us()
        for grant, _ in list(itertools.takewhile(lambda item: item[1] <= now_us, self._due.items())):
            del self._due[grant]
            if grant.needs_report:
                self.send(grant)

    async def _send_all(self) -> None:
        batch: list[Grant] = []
        try:
            while self._unsent:
                batch = list(itertools.islice(self._unsent, _MAX_BATCH))
                for grant in batch:
                    del self._unsent[grant]
                sent_at_us, num_routers = clock_us(), self._num_routers()
                messages = [grant.message(sent_at_us, num_routers) for grant in batch]
                replies = await self._call(messages)
                if self._away_until_s:
                    self._away_until_s = 0.0
                    _log.info("quotas: redis is there again")
                for grant, message, reply in zip(batch, messages, replies, strict=True):
                    if isinstance(reply, Exception):
                        self._refuse(grant, reply)
                        continue
                    grant.apply(message, reply, sent_at_us)
                    self._refused.discard(grant)
                    if grant.waiters:
                        self._unsent[grant] = None
                    self.queue(grant)
        except (RedisError, OSError, TimeoutError) as error:
            self._fail(batch, error)
        except Exception as error:  # else those that wait would wait for ever
            _log.exception("quotas: a reply of redis could not be read")
            self._fail(batch, error)
        finally:
            self._task = None

    async def _call(self, messages: Sequence[Message]) -> list[Any]:
        """Raises RedisError, OSError or TimeoutError; then Redis may have got some of the messages."""
        loop = asyncio.get_running_loop()
        began_s, call = loop.time(), asyncio.create_task(self._execute(messages))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            done, _ = await asyncio.wait((call,), timeout=self.wait_s)
            if not done and loop.time() > began_s + self.wait_s + _LATENESS_S:
                done, _ = await asyncio.wait((call,), timeout=self.wait_s)
            if not done:
                raise TimeoutError(f"no answer within {self.wait_s:g} s")
            return call.result()
        finally:
            call.cancel()

    async def _execute(self, messages: Sequence[Message]) -> list[Any]:
        """The replies; a ResponseError in place of one is that message's alone."""
        while True:
            pipeline = self._client.pipeline(transaction=False)
            for message in messages:
                keys, args = EXCHANGE.parameters(**message.parameters)
                pipeline.evalsha(EXCHANGE.sha, len(keys), *keys, *args)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                return replies
            await self._client.script_load(EXCHANGE.source)  # those that Redis has run change nothing if sent again

    def _refuse(self, grant: Grant, error: Exception) -> None:
        """Redis cannot carry out the grant's message, which is sent again later; other grants go on."""
        if not self._refused:  # else there would be a line for each grant where Redis refuses all
            _log.error("quotas: redis refused the message of %s: %s", grant.key, error)
        self._refused.add(grant)
        grant.fail(RedisAway())
        self.queue(grant)

    def _fail(self, batch: Sequence[Grant], error: Exception) -> None:
        """Redis has not answered to the messages of the batch, which are sent again later."""
        if not self._away_until_s:
            _log.warning("quotas: redis is away, grants are all that is left: %s", error or type(error).__name__)
        self._away_until_s = asyncio.get_running_loop().time() + RETRY_S
        grants, self._unsent = [*batch, *self._unsent], {}
        for grant in grants:
            grant.fail(RedisAway())
            self.queue(grant)


def clock_us() -> float:
    return time.monotonic() * 1e6
