"""Answers with grammars whose gang is lost midway, through a router, connections and engines: nothing is changed."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.text.text import TextService
from motet.tests.rigs.engine_dispatcher import client_of
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.router_rig import BASE, events_of
from motet.tests.rigs.stand_in_engine import adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.loop import EngineLoop
from motet.workers.wire.messages import SequenceUpdate

DEMO = Path(__file__).resolve().parents[2] / "examples/demo"
ADAPTER = "pirate"
TOKEN = "a secret"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 12},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["answer", "numbers"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
REQUESTED: list[dict[str, Any]] = [
    {"response_format": FORMAT, "seed": 1, "n": 2},
    {"response_format": FORMAT, "seed": 2, "model": ADAPTER, "stream": True, "frequency_penalty": 0.5},
    {"regex": "[a-f]{20,40}", "seed": 3, "bad_words": ["b"], "min_tokens": 12, "logit_bias": {"70": 2.0}},
    {"regex": "[a-f]{20,40}!", "seed": 4, "model": ADAPTER, "stop": ["cab"], "temperature": 1.5},
]


class Gang:
    """Lost once it has generated `most_tokens`."""

    def __init__(self, stock: Stock, most_tokens: int | None = None) -> None:
        self._engine = engine = stock.engine(num_pages=1000).engine
        self._step, self._most_tokens = engine.step, most_tokens
        engine.step = self._counted_step  # type: ignore[method-assign]
        self.server = FrameServer(EngineLoop(engine, PATIENCE_S), engine.info, TOKEN, leader_config())

    @property
    def num_tokens(self) -> int:
        return self._engine.load().counters.num_generated_tokens

    def _counted_step(self) -> list[SequenceUpdate]:
        if self._most_tokens is not None and self.num_tokens >= self._most_tokens:
            raise RuntimeError("this gang is lost now")
        return self._step()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("grammars")
    return Stock.make(DEMO / "base", {ADAPTER: DEMO / "adapters" / ADAPTER}, folder / "store", block_size=16)


@asynccontextmanager
async def router(stock: Stock) -> AsyncIterator[tuple[FleetDispatcher, httpx.AsyncClient]]:
    dispatcher = FleetDispatcher(
        TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
    )
    text = TextService.from_folder(DEMO / "base")
    try:
        yield dispatcher, client_of(dispatcher, stock, ADAPTER, text=text)
    finally:
        await dispatcher.close()


async def answered(client: httpx.AsyncClient, requested: dict[str, Any]) -> list[str]:
    body = {"model": BASE, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 120, **requested}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if not requested.get("stream"):
        return [choice["message"]["content"] for choice in response.json()["choices"]]
    chunks = [event.chunk["choices"] for event in events_of(response.content) if event.data != "[DONE]"]
    return ["".join(choice["delta"].get("content") or "" for choices in chunks for choice in choices)]


async def test_a_lost_gang_changes_no_answer_with_a_grammar(stock: Stock) -> None:
    gangs = [Gang(stock)]
    addresses = [await gangs[0].server.start("127.0.0.1")]
    try:
        async with router(stock) as (dispatcher, client):
            dispatcher.update({"0": addresses[0]})
            await eventually_in_loop(dispatcher.gangs)
            expected = [await answered(client, requested) for requested in REQUESTED]
            assert {*json.loads(expected[0][0])} == {*json.loads(expected[1][0])} == {"answer", "numbers"}
            assert re.fullmatch("[ac-f]{20,40}", expected[2][0])
        num_tokens = gangs[0].num_tokens
        generator = random.Random(num_tokens)
        for _ in range(3):
            gangs.append(lost := Gang(stock, generator.randrange(1, num_tokens)))
            addresses.append(await lost.server.start("127.0.0.1"))
            async with router(stock) as (dispatcher, client):
                dispatcher.update({"lost": addresses[-1]})
                await eventually_in_loop(dispatcher.gangs)
                asking = asyncio.gather(*(answered(client, requested) for requested in REQUESTED))
                await eventually_in_loop(lambda: lost.num_tokens > 0)
                dispatcher.update({"lost": addresses[-1], "0": addresses[0]})
                assert await asyncio.wait_for(asking, PATIENCE_S) == expected
                assert dispatcher.num_resumed > 0
    finally:
        for gang in gangs:
            await gang.server.stop()
