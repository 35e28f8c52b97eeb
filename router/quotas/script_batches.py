"""Calls of Lua scripts in Redis: all that wait go as one command, one batch at a time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

_MAX_BATCH: Final = 256  # calls, so that one is answered in time also where thousands wait
_LATENESS_S: Final = 0.05  # of a timer: then this process was held up, and Redis may have answered in time


class RedisAway(Exception):  # noqa: N818
    """Redis has not answered in time, or not what a script should."""


class ScriptBatches:
    """Owned by one event loop. What is called first is answered first.

    `wait_s`: for the answer to a batch. After that all calls that wait have failed, and may have happened.
    """

    def __init__(self, client: Redis, scripts: Sequence[str], wait_s: float) -> None:
        self._client: Any = client
        self._scripts = tuple(scripts)
        self._names = {script: hashlib.sha1(script.encode()).hexdigest() for script in scripts}  # as Redis names them
        self._wait_s = wait_s
        self._waiting: list[_Call] = []
        self._under_way: list[_Call] = []
        self._task: asyncio.Task[None] | None = None

    def call(self, script: str, keys: Sequence[str], args: Sequence[str | int]) -> asyncio.Future[Any]:
        """The script's reply. Raises RedisAway."""
        call = _Call(("EVALSHA", self._names[script], len(keys), *keys, *args))
        self._waiting.append(call)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="quotas in redis")
        return call.reply

    async def close(self) -> None:
        """Waits for the calls that were made, but not for long."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=2 * self._wait_s)
        self._fail(RedisAway("this router ends"))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            self._under_way, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
            batch = self._under_way
            timer = loop.call_later(self._wait_s, self._time_out, batch, loop.time() + self._wait_s, True)
            try:
                replies = await self._send(batch)
            except (RedisError, OSError, TimeoutError) as error:
                self._fail(RedisAway(str(error) or type(error).__name__))
                return
            finally:
                timer.cancel()
            for call, reply in zip(batch, replies, strict=True):
                if call.reply.done():
                    continue  # nobody waits for it any more
                if isinstance(reply, Exception):
                    call.reply.set_exception(RedisAway(str(reply)))
                else:
                    call.reply.set_result(reply)
        self._under_way, self._task = [], None

    async def _send(self, batch: Sequence[_Call]) -> list[Any]:
        replies = await self._execute(batch)
        lacking = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if lacking:  # Redis was started anew
            for script in self._scripts:
                await self._client.script_load(script)
            again = await self._execute([batch[index] for index in lacking])
            for index, reply in zip(lacking, again, strict=True):
                replies[index] = reply
        return replies

    async def _execute(self, batch: Sequence[_Call]) -> list[Any]:
        if len(batch) == 1:
            try:
                return [await self._client.execute_command(*batch[0].command)]
            except NoScriptError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        for call in batch:
            pipeline.execute_command(*call.command)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    def _time_out(self, batch: Sequence[_Call], due_at: float, may_wait: bool) -> None:
        if batch is not self._under_way:
            return
        loop = asyncio.get_running_loop()
        if may_wait and loop.time() > due_at + _LATENESS_S:
            loop.call_later(self._wait_s, self._time_out, batch, due_at, False)
            return
        task = self._task
        self._fail(RedisAway(f"no answer within {self._wait_s:g} s"))
        if task is not None:
            task.cancel()

    def _fail(self, error: RedisAway) -> None:
        failed, self._under_way, self._waiting, self._task = [*self._under_way, *self._waiting], [], [], None
        for call in failed:
            if not call.reply.done():
                call.reply.set_exception(RedisAway(str(error)))


class _Call:
    __slots__ = ("command", "reply")

    def __init__(self, command: tuple[Any, ...]) -> None:
        self.command = command
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
