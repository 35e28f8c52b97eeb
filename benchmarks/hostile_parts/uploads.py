"""Refused uploads beside a neighbour that asks for a few tokens, and beside one that uploads."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil

from motet.adapters.format.peft import tensor_name
from motet.adapters.format.tensor_file import write_tensors
from motet.benchmarks.rigs import upload_attack, upload_router
from motet.benchmarks.rigs.raw_requests import ask, completion, upload
from motet.benchmarks.rigs.upload_attack import CONFIG
from motet.benchmarks.rigs.upload_router import SHAPE, key_of
from motet.cluster.launch.redis_server import RedisServer

NEIGHBOUR = key_of(upload_router.TENANTS[0])
_PAUSE_S = 0.005  # of the neighbour, after an answer
_SETTLE_S = 1.0  # from an attack's begin to its measurement
_LINGER_S = 12.0  # for what a router still does of an attack that has ended

Measure = Callable[[float], Awaitable[list[float]]]


async def refused_uploads(seconds: float) -> dict[str, float]:
    """`upload_p99_ratio`: of a neighbour's completions, while two clients send headers of 8 MB that are refused.

    `router_mb_per_upload`: by which the router's own process grew at most meanwhile, for each of the two.
    """
    async with _router() as (port, router):
        request = completion(NEIGHBOUR)
        await _ask_for(port, request, 2.0)  # warm
        grown = _Growth(router)

        async def neighbour(for_s: float) -> list[float]:
            return await _ask_for(port, request, for_s)

        ratio, num_refused = await _beside(port, "headers", neighbour, seconds, "completions", grown)
    print(f"  refused uploads/s {num_refused / seconds:.1f}, the router grew by {grown.most / 1e6:.1f} MB at most")
    return {
        "upload_p99_ratio": round(ratio, 2),
        "router_mb_per_upload": round(grown.most / 1e6 / 2, 1),
    }


async def slow_expressions(seconds: float) -> dict[str, float]:
    """`regex_upload_p99_ratio`: of a neighbour's uploads, while four other tenants send slow expressions, two each.

    `regex_completion_p99_ratio`: of a neighbour's completions meanwhile.
    """
    async with _router() as (port, _):
        number = 0

        async def uploads(for_s: float) -> list[float]:
            nonlocal number
            took: list[float] = []
            while sum(took) < for_s or len(took) < 4:
                number += 1
                status, one_s = await ask(port, upload(NEIGHBOUR, "mine", CONFIG, _small_adapter(number)))
                if status != 201:
                    raise RuntimeError(f"the neighbour's upload was answered {status}")
                took.append(one_s)
            return took

        request = completion(NEIGHBOUR)

        async def completions(for_s: float) -> list[float]:
            return await _ask_for(port, request, for_s)

        await uploads(0.0)  # warm
        await completions(2.0)
        of_uploads, _ = await _beside(port, "expressions", uploads, seconds, "uploads")
        of_completions, _ = await _beside(port, "expressions", completions, seconds, "completions")
    return {
        "regex_upload_p99_ratio": round(of_uploads, 2),
        "regex_completion_p99_ratio": round(of_completions, 2),
    }


class _Growth:
    """Watches the resident memory of one process, without those beside it."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.most = 0

    async def watch(self) -> None:
        before = self._process.memory_info().rss
        while True:
            self.most = max(self.most, self._process.memory_info().rss - before)
            await asyncio.sleep(0.02)


async def _beside(
    port: int, attack: str, measure: Measure, seconds: float, what: str, growth: _Growth | None = None
) -> tuple[float, int]:
    """The ratio of p99 under the attack to that in quiet, before and after it; and how many uploads were refused."""
    quiet = await measure(seconds / 2)
    command = [sys.executable, "-m", upload_attack.__name__, str(port), attack]
    attackers = await asyncio.to_thread(_started, command)
    try:
        assert attackers.stdin is not None and attackers.stdout is not None
        assert await asyncio.to_thread(attackers.stdout.readline) == "attacking\n"
        watching = asyncio.create_task(growth.watch()) if growth is not None else None
        await asyncio.sleep(_SETTLE_S)
        attacked = await measure(seconds)
        if watching is not None:
            watching.cancel()
        attackers.stdin.close()
        num_refused = json.loads(await asyncio.to_thread(attackers.stdout.read))
    finally:
        attackers.kill()
        attackers.wait()
    await asyncio.sleep(_LINGER_S)
    quiet += await measure(seconds / 2)
    for name, took in (("quiet", quiet), (f"beside {attack}", attacked)):
        p50_ms, p99_ms = statistics.median(took) * 1e3, _p99(took) * 1e3
        print(f"  {what:12} {name:18} p50 {p50_ms:8.1f} ms  p99 {p99_ms:8.1f} ms  of {len(took)}")
    return _p99(attacked) / _p99(quiet), num_refused


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def _ask_for(port: int, request: bytes, seconds: float) -> list[float]:
    loop = asyncio.get_running_loop()
    until, took = loop.time() + seconds, []
    while loop.time() < until:
        status, one_s = await ask(port, request)
        if status != 200:
            raise RuntimeError(f"the neighbour was answered {status}")
        took.append(one_s)
        await asyncio.sleep(_PAUSE_S)
    return took


def _small_adapter(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(SHAPE.num_layers):
        for letter, shape in (("A", (4, 64)), ("B", (64, 4))):
            tensors[tensor_name(layer, "q_proj", letter)] = rng.standard_normal(shape, np.float32)
    file = BytesIO()
    write_tensors(file, tensors)
    return file.getvalue()


def _p99(took: list[float]) -> float:
    return sorted(took)[min(int(0.99 * len(took)), len(took) - 1)]


@asynccontextmanager
async def _router() -> AsyncIterator[tuple[int, psutil.Process]]:
    """Its port and its process."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        server = RedisServer(Path(folder) / "redis")
        command = [sys.executable, "-m", upload_router.__name__, server.start(), folder]
        router = await asyncio.to_thread(_started, command)
        try:
            assert router.stdout is not None
            yield int(await asyncio.to_thread(router.stdout.readline)), psutil.Process(router.pid)
        finally:
            await asyncio.to_thread(router.communicate)
            server.stop()
