"""Routers killed with kill -9, gangs lost and Redis restarted while clients stream: the ledger has what clients got.

Routers are processes of their own, on real gRPC to gangs and real HTTP to clients.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from motet.adapters.registry.registry import connect
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.upload import UploadService
from motet.cluster.launch.redis_server import RedisServer
from motet.router.config import CurrentConfig
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.rest_server import create_app
from motet.router.usage import usage as usage_module
from motet.router.usage.usage import UsageService
from motet.tests.rigs.part_configs import admission_config, leader_config, router_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import (
    BASE,
    HEADERS,
    OPERATOR_KEY,
    FakeUploads,
    FakeView,
    counts_of,
    encoded,
    events_of,
    text_service,
)
from motet.tests.rigs.stand_in_engine import INFO, adapter_pages
from motet.tests.rigs.usage_reconciliation import Received, reconcile
from motet.tests.router.test_router_loss import PASSAGE, TOKEN, Gang, ReadingEngine
from motet.workers.leader.frame_server import FrameServer


def router_process(redis_url: str, folder: Path, gangs: list[str], pipe: Any) -> None:
    """Runs a router until it is killed; sends its URL through the pipe."""
    usage_module.PROGRESS_INTERVAL_S = 0.05  # type: ignore[misc]
    usage_module.ADOPT_INTERVAL_S = 0.2  # type: ignore[misc]

    async def run() -> None:
        usage = UsageService(
            connect(redis_url),
            folder / "ledger",
            folder / "store" / "ledger",
            kept_days=3,
            spool_bytes=1 << 30,
            min_free_bytes=0,
            prices=None,
        )
        dispatcher = FleetDispatcher(
            TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
        )
        dispatcher.update({str(number): address for number, address in enumerate(gangs)})
        registry = FakeView()
        await usage.start()
        await eventually(lambda: dispatcher.gangs())
        app = create_app(
            config=CurrentConfig(router_config(BASE, folder / "spool")),
            dispatcher=dispatcher,
            view=cast(RegistryView, registry),
            uploads=cast(UploadService, FakeUploads(registry)),
            text=text_service(),
            operator_key=OPERATOR_KEY,
            accountants=[usage.metering],
            more_routes=usage.routes,
        )
        import uvicorn

        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve())
        await eventually(lambda: server.started)
        pipe.send(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        await serving

    asyncio.run(run())


@dataclass
class Router:
    process: BaseProcess
    url: str

    def kill(self) -> None:
        self.process.kill()  # with SIGKILL
        self.process.join()


class Scene:
    """A Redis server, two gangs, and routers as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis = RedisServer(folder / "redis")
        self.redis_url = self.redis.start()
        self.gangs: list[Gang] = []
        self.routers: list[Router] = []

    async def start(self) -> None:
        for _ in range(2):
            engine = ReadingEngine(encoded(text_service(), PASSAGE))
            info = msgspec.structs.replace(INFO, vocab_size=320)
            server = FrameServer(engine, info, TOKEN, leader_config(orphan_s=3.0))
            self.gangs.append(Gang(engine, server, await server.start("127.0.0.1")))

    async def add_router(self) -> Router:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        addresses = [gang.address for gang in self.gangs]
        process = context.Process(target=router_process, args=(self.redis_url, self.folder, addresses, theirs))
        process.start()
        await eventually(lambda: ours.poll() or not process.is_alive())
        router = Router(process, ours.recv())
        self.routers.append(router)
        return router

    async def close(self) -> None:
        for router in self.routers:
            router.kill()
        for gang in self.gangs:
            await gang.server.stop()
        await asyncio.to_thread(self.redis.stop)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    await scene.start()
    yield scene
    await scene.close()


class Client:
    """Streams one completion, and comes back for the rest of it, or does not."""

    def __init__(self, seed: int) -> None:
        self.seed = seed  # decides how many tokens there are
        self.body = {"model": BASE, "prompt": "hello", "max_tokens": 90, "seed": seed, "stream": True}
        self.body["stream_options"] = {"include_usage": True}
        self.events: list[Any] = []

    async def listen(self, router: Router, num_tokens: int | None = None) -> None:
        """Until the end, or until it has so many tokens, or as long as the router lives."""
        ids = [event.id for event in self.events if event.id]
        headers = {**HEADERS, **({"Last-Event-ID": ids[-1]} if ids else {})}
        got = b""
        before = [*self.events]
        async with httpx.AsyncClient(timeout=PATIENCE_S, headers=headers) as client:
            try:
                async with client.stream("POST", f"{router.url}/v1/completions", json=self.body) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    async for piece in answer.aiter_raw():
                        got += piece
                        self.events = before + events_of(got)
                        if num_tokens is not None and self.num_tokens >= num_tokens:
                            return
            except httpx.TransportError:
                pass  # it was killed

    @property
    def num_tokens(self) -> int:
        """An event may bring several, more so on a busy machine."""
        ids = [event.id for event in self.events if event.id]
        return int(counts_of(ids[-1])) if ids else 0

    @property
    def received_end(self) -> bool:
        return bool(self.events) and self.events[-1].data == "[DONE]"

    @property
    def received(self) -> Received | None:
        chunks = [event for event in self.events if event.data != "[DONE]"]
        if not chunks:
            return None
        answer, last = chunks[0].chunk["id"], chunks[-1]
        if self.received_end:
            used = last.chunk["usage"]
            cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return Received(answer, "acme", True, used["prompt_tokens"], used["completion_tokens"], cached)
        num_prompt = len(encoded(text_service(), "hello"))
        return Received(answer, "acme", False, num_prompt, int(counts_of(last.id)))


async def settled(scene: Scene, received: list[Received | None], generated: dict[str, int]) -> None:
    """Reconciles once the last router has taken over all that the dead left."""
    client = connect(scene.redis_url, PATIENCE_S)
    ledger = scene.folder / "ledger"
    alive = sum(router.process.is_alive() for router in scene.routers)
    await eventually(lambda: len([*ledger.glob("*.lock")]) == alive)
    problem: list[AssertionError] = []

    async def agrees() -> bool:
        try:
            await reconcile(client, [one for one in received if one is not None], generated)
        except AssertionError as error:
            problem[:] = [error]
            return False
        return True

    try:
        deadline = time.monotonic() + PATIENCE_S
        while not await agrees():  # lines go to Redis twice a second
            if time.monotonic() > deadline:
                raise problem[0]
            await asyncio.sleep(0.1)
    finally:
        await client.aclose()


def are_on_disk(scene: Scene, clients: list[Client]) -> bool:
    """Whether their router has written that they have answers under way."""
    written = b"".join(path.read_bytes() for path in (scene.folder / "ledger").glob("*.log"))
    return all(client.events[0].chunk["id"].encode() in written for client in clients)


async def test_killed_routers_lost_gangs_and_a_restarted_redis(scene: Scene) -> None:
    rng = random.Random(7)
    first = await scene.add_router()
    clients = [Client(seed) for seed in range(24)]
    complete, leaving, broken, resuming = clients[:6], clients[6:12], clients[12:18], clients[18:]
    await asyncio.gather(*(client.listen(first) for client in complete))
    for gang in scene.gangs:
        gang.engine.most_tokens = 20  # they leave before the end
    await asyncio.gather(*(client.listen(first, num_tokens=rng.randrange(2, 15)) for client in leaving))
    for gang in scene.gangs:
        gang.engine._step_s, gang.engine.most_tokens = 0.03, 25  # the rest is under way when it is killed
    listening = [asyncio.create_task(client.listen(first)) for client in broken + resuming]
    await eventually(lambda: all(client.num_tokens > 6 for client in broken + resuming))
    pid = scene.redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)  # it is started again
    await eventually(lambda: are_on_disk(scene, broken + resuming))
    first.kill()
    await asyncio.gather(*listening)
    second = await scene.add_router()
    going_on = [asyncio.create_task(client.listen(second)) for client in resuming]
    await eventually(lambda: all(client.num_tokens > 10 for client in resuming))
    await scene.gangs.pop(0).server.stop()  # its streams go on at the other one
    scene.gangs[0].engine.most_tokens = math.inf
    await asyncio.gather(*going_on)
    assert all(client.received_end for client in complete + resuming)
    assert not any(client.received_end for client in leaving + broken)
    received = {reported.id: client for client in clients if (reported := client.received) is not None}
    generated = {answer: 21 + client.seed for answer, client in received.items()}
    await settled(scene, [client.received for client in received.values()], generated)
