"""Alerts fire on pages of real routers that had the fault, and are silent on those of before it."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from motet.adapters.registry.launches import Starts
from motet.adapters.registry.registry import Registry, connect
from motet.cluster.launch.redis_server import RedisServer
from motet.cluster.launch_secrets import LaunchSecrets
from motet.cluster.replicas.replica_start import ReplicaStart
from motet.router.text.text import TextService
from motet.tests.rigs.prometheus_binaries import ROOT, promtool
from motet.tests.rigs.router_rig import BASE, OPERATORS, RouterRig, failing, text_service

RULES = ROOT / "deploy" / "prometheus" / "motet.rules.yaml"
CLUSTER = "cluster-1"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    return RouterRig(tmp_path / "spool", text)


async def page_of(rig: RouterRig) -> str:
    async with rig.client() as client:
        return (await client.get("/metrics", headers=OPERATORS)).raise_for_status().text


def fires(alert: str, folder: Path, before: str, after: str, interval_s: int = 15, num_intervals: int = 80) -> bool:
    """Whether the alert fires at the end of twenty minutes in which what has happened between two pages goes on.

    Counters rise by as much in each interval, and gauges stay as they are afterwards.
    """
    values = [series_of(page) for page in (before, after)]
    series = []
    for name, (is_counter, now) in values[1].items():
        was = values[0].get(name, (is_counter, 0.0))[1]
        step = f"{was}{now - was:+}x{num_intervals}" if is_counter else f"{was} {now}x{num_intervals}"
        series.append({"series": name, "values": step})
    test = {
        "interval": f"{interval_s}s",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": f"{interval_s * num_intervals}s",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}],
            }
        ],
    }
    path = folder / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]}))
    try:
        promtool("test", "rules", path)
    except AssertionError as error:
        if "got:nil" in str(error).replace(" ", "").replace("\n", ""):
            return False
        raise
    return True


def series_of(page: str) -> dict[str, tuple[bool, float]]:
    """Of each series whether it only rises, and its value."""
    return {
        f"{sample.name}{{{', '.join(f'{name}={json.dumps(value)}' for name, value in labels.items())}}}": (
            family.type in ("counter", "histogram"),
            sample.value,
        )
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        for labels in [{"job": "motet", **sample.labels}]
    }


async def check(alert: str, rig: RouterRig, folder: Path, make_fault: Callable[[], Awaitable[None]]) -> None:
    before = await page_of(rig)
    assert not fires(alert, folder, before, before)
    await make_fault()
    assert fires(alert, folder, before, await page_of(rig))


async def stream(rig: RouterRig) -> str:
    async with rig.client() as client:
        body = {"model": BASE, "prompt": "hello", "max_tokens": 8, "stream": True}
        return (await client.post("/v1/completions", json=body)).raise_for_status().text


async def test_streams_that_break(rig: RouterRig, tmp_path: Path) -> None:
    rig.dispatcher.answer = rig.ids("the quick brown fox")
    await stream(rig)  # one that does not

    async def broken() -> None:
        rig.dispatcher.script = failing("internal", "the gang is lost", rig.ids("the quick"))
        assert '"error"' in await stream(rig)

    await check("MotetBrokenStreams", rig, tmp_path, broken)


async def test_tokens_that_are_slow(rig: RouterRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.dispatcher.answer = rig.ids("the quick brown fox")
    await stream(rig)

    async def slow() -> None:
        more_s = count(step=3)
        clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + next(more_s))
        with monkeypatch.context() as patched:
            patched.setattr("motet.router.generation.generation.time", clock)
            assert "[DONE]" in await stream(rig)

    await check("MotetTokensSlow", rig, tmp_path, slow)


async def test_a_redis_that_is_almost_full(rig: RouterRig, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis", max_bytes=8 << 20)
    client = connect(server.start())
    registry = Registry(client)
    try:
        rig.metrics.redis_memory = await registry.memory()

        async def fill() -> None:
            memory = rig.metrics.redis_memory
            for number in range(200):
                memory = await registry.memory()
                if memory.used_bytes > 0.85 * memory.max_bytes:
                    break
                await client.set(f"of another program: {number}", b"x" * (64 << 10))
            rig.metrics.redis_memory = memory

        await check("MotetRedisMemory", rig, tmp_path, fill)
    finally:
        await client.aclose()
        server.stop()


@pytest.mark.parametrize("waits", [True, False])
async def test_gangs_that_cannot_start(rig: RouterRig, tmp_path: Path, waits: bool) -> None:
    """`waits`: for what is away; else the start fails."""
    server = RedisServer(tmp_path / "redis")
    url = server.start()
    client = connect(url)

    class SeenError(Exception):
        pass

    async def sleep(seconds: float) -> None:
        if not rig.metrics.starts:
            rig.metrics.starts = await Starts(client, CLUSTER).reports()
        if waits:
            raise SeenError

    async def cannot() -> None:
        start = ReplicaStart("gang", "r1", CLUSTER, sleep=sleep)
        start.secrets = LaunchSecrets(redis_url=url)

        async def ask() -> None:
            raise OSError("the volume is away")

        async def begin() -> None:
            async with start:
                if waits:
                    await start.until("the model", ask)
                raise MemoryError("the GPU is full")

        with pytest.raises((SeenError, MemoryError)):
            await begin()
        assert [report.has_failed for report in rig.metrics.starts or ()] == [not waits]

    try:
        await check("MotetCannotStart", rig, tmp_path, cannot)
    finally:
        await client.aclose()
        server.stop()
