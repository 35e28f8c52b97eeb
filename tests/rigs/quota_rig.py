"""Routers' quotas on one Redis, and answers that are opened there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from motet.adapters.registry.registry import connect
from motet.adapters.registry.tenants.records import KeyRecord, Quota, TenantRecord
from motet.router.http.auth import Identity
from motet.router.http.errors import ApiError
from motet.router.tenancy.account import Account, AnswerRequest, Ending, Progress
from motet.router.tenancy.quotas import Quotas
from motet.tests.rigs.patience import PATIENCE_S

NUMBERS = itertools.count()
A_WHILE_S = 30.0  # for Redis, where a test is not about one that is slow


def identity(
    tenant: Quota | None = None, key: Quota | None = None, name: str = "acme", key_id: str = "k1", num_ended: int = 0
) -> Identity:
    return Identity(
        TenantRecord(name=name, num_ended=num_ended, quota=tenant or Quota()),
        KeyRecord(key_id=key_id, tenant=name, quota=key or Quota()),
    )


def progress(prompt: int = 0, completion: int = 0) -> Progress:
    return Progress(num_prompt_tokens=prompt, num_cached_tokens=0, num_completion_tokens=completion)


def requested(
    caller: Identity,
    *,
    prompt: int = 10,
    new: int = 10,
    response_id: str = "",
    is_resumed: bool = False,
    is_stream: bool = True,
    by_now: Callable[[], Progress] = progress,
) -> AnswerRequest:
    return AnswerRequest(
        identity=caller,
        response_id=response_id or f"cmpl-{next(NUMBERS)}",
        model="base",
        version=None,
        user="",
        num_prompt_tokens=prompt,
        num_new_tokens=new,
        num_sequences=1,
        is_resumed=is_resumed,
        is_stream=is_stream,
        progress=by_now,
    )


def ending(prompt: int = 10, completion: int = 0, error: str = "", is_cancelled: bool = False) -> Ending:
    return Ending(
        progress=progress(prompt, completion),
        error=error,
        is_cancelled=is_cancelled,
        first_token_s=None,
        duration_s=0.1,
    )


async def try_open(quotas: Quotas, one: AnswerRequest) -> Account | ApiError:
    try:
        return await quotas.open(one)
    except ApiError as error:
        return error


async def left(quotas: Quotas, caller: Identity) -> dict[str, int]:
    """What is left of each limit, by its name."""
    return {level.limit.name: level.num_left for level in (await quotas.look(caller))[0]}


async def is_left(quotas: Quotas, caller: Identity, least: dict[str, int]) -> bool:
    now = await left(quotas, caller)
    return all(now[name] >= units for name, units in least.items())


def wait_for_redis(fleet: list[Quotas], wait_s: float) -> None:
    """From now on routers wait so long for Redis."""
    for quotas in fleet:
        quotas._sender.wait_s = wait_s


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Returns once the check holds, and fails if it never does."""
    async with asyncio.timeout(PATIENCE_S):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def routers(
    url: str, count: int, *, wait_s: float = A_WHILE_S, known: int | None = None
) -> AsyncIterator[list[Quotas]]:
    """`known`: how many routers each takes the fleet for; None: as many as there are."""
    clients: list[Redis] = [connect(url, PATIENCE_S) for _ in range(count)]
    fleet = [Quotas(client, lambda: known or count, wait_s=wait_s) for client in clients]
    for quotas in fleet:
        quotas.start()
    try:
        yield fleet
    finally:
        for quotas in fleet:
            await quotas.stop()
        for client in clients:
            await client.aclose()
