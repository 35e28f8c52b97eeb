"""A client of a Redis server for code in simulated time: calls are made at once, and take a drawn time."""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import Any

import redis


class InlineRedis:
    """What quotas and the ledger use of `redis.asyncio.Redis`. The key `now` has the simulated microseconds."""

    def __init__(self, client: redis.Redis, rng: random.Random) -> None:
        self.client, self._rng = client, rng
        self.is_away = False  # nothing reaches the server, or its answers do not come back
        self.is_dead = False  # the process of this client has died

    def pipeline(self, transaction: bool) -> _Pipeline:
        assert not transaction
        return _Pipeline(self)

    def register_script(self, source: str) -> Any:
        async def run(keys: list[Any], args: list[Any], client: _Pipeline | None = None) -> Any:
            if client is None:
                return await self.call("eval", source, len(keys), *keys, *args)
            client.eval(source, len(keys), *keys, *args)
            return None

        return run

    async def script_load(self, source: str) -> Any:
        return await self.call("script_load", source)

    async def smembers(self, key: str) -> Any:
        return await self.call("smembers", key)

    async def zrange(self, *args: Any, **options: Any) -> Any:
        return await self.call("zrange", *args, **options)

    async def xrange(self, *args: Any, **options: Any) -> Any:
        return await self.call("xrange", *args, **options)

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        return raised_first(await self.run([(name, args, options)]))[0]

    async def run(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """The replies; an error of one call is its reply."""
        await asyncio.sleep(self._rng.expovariate(1 / 0.001))
        if self.is_dead or (self.is_away and self._rng.random() < 0.5):
            await asyncio.sleep(self._rng.choice([0.0, 10.0]))
            raise redis.exceptions.ConnectionError("it is away")
        self.client.set("now", f"{1e15 + asyncio.get_running_loop().time() * 1e6:.0f}")
        replies = [self._reply(name, args, options) for name, args, options in calls]
        if self.is_away or self._rng.random() < 0.02:  # the server has done it, and its answer is lost
            raise redis.exceptions.ConnectionError("it went away")
        await asyncio.sleep(self._rng.expovariate(1 / 0.001))
        if self.is_dead:
            raise redis.exceptions.ConnectionError("it is away")
        return replies

    def _reply(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            return getattr(self.client, name)(*args, **options)
        except redis.exceptions.ResponseError as error:
            return error


def raised_first(replies: list[Any]) -> list[Any]:
    """The replies. Raises the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


class _Pipeline:
    def __init__(self, redis: InlineRedis) -> None:
        self._redis = redis
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    async def __aenter__(self) -> _Pipeline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def sadd(self, *args: Any) -> None:
        self._calls.append(("sadd", args, {}))

    def eval(self, *args: Any) -> None:
        self._calls.append(("eval", args, {}))

    def evalsha(self, *args: Any) -> None:
        self._calls.append(("evalsha", args, {}))

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        calls, self._calls = self._calls, []
        replies = await self._redis.run(calls)
        return raised_first(replies) if raise_on_error else replies
