"""Calls of scripts in batches: where thousands wait, each batch is answered in time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from redis.asyncio import Redis

from motet.router.quotas.script_batches import ScriptBatches

COMMAND_S = 0.004


class SlowRedis:
    """Takes its time for each command."""

    def __init__(self) -> None:
        self._commands: list[tuple[Any, ...]] = []

    def pipeline(self, transaction: bool) -> SlowRedis:
        return SlowRedis()

    def execute_command(self, *command: Any) -> None:
        self._commands.append(command)

    async def execute(self, raise_on_error: bool) -> list[int]:
        await asyncio.sleep(COMMAND_S * len(self._commands))
        return [command[-1] for command in self._commands]


async def test_many_calls_do_not_all_come_too_late() -> None:
    batches = ScriptBatches(cast(Redis, SlowRedis()), ("return 1",), wait_s=2.0)
    calls = [batches.call("return 1", ["key"], [number]) for number in range(600)]  # 2.4 s in all
    assert await asyncio.gather(*calls) == list(range(600))
    await batches.close()
