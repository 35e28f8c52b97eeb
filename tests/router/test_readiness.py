"""A router whose gangs scale from zero: it is ready, keeps no gang running, and its first request makes one start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from motet.router.fleet.dispatch import PROBE_TENANT
from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import BASE, RouterRig, failing, text_service, token_by_token
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text, scales_from_zero=True, ready_interval_s=1e-9)
    rig.dispatcher.answer = rig.ids("hello")
    rig.dispatcher.is_connected = False
    return rig


def bring_a_gang(rig: RouterRig) -> None:
    """From now on the first sequence makes a gang start."""

    def script(request: SequenceRequest) -> Sequence[SequenceUpdate]:
        rig.dispatcher.is_connected = True
        return token_by_token(rig.dispatcher.answer, request.sampling)

    rig.dispatcher.script = script


async def status_of_ready(rig: RouterRig) -> int:
    async with rig.client() as client:
        return (await client.get("/ready")).status_code


async def complete(rig: RouterRig) -> int:
    async with rig.client() as client:
        return (await client.post("/v1/completions", json={"model": BASE, "prompt": "hello"})).status_code


async def test_ready_without_a_gang_and_without_waking_one(rig: RouterRig) -> None:
    assert await status_of_ready(rig) == 200
    assert rig.dispatcher.submitted == []


async def test_each_gang_is_probed_once(rig: RouterRig) -> None:
    rig.dispatcher.is_connected = True
    for _ in range(3):
        assert await status_of_ready(rig) == 200
    assert [request.tenant for request in rig.dispatcher.submitted] == [PROBE_TENANT]


async def test_a_gang_that_fails_its_probe_is_probed_again(rig: RouterRig) -> None:
    rig.dispatcher.is_connected = True
    rig.dispatcher.script = failing("internal", "broken")
    assert await status_of_ready(rig) == 503
    rig.dispatcher.script = None
    assert await status_of_ready(rig) == 200


async def test_the_first_requests_of_a_new_router_bring_a_gang(rig: RouterRig) -> None:
    """Without a gang the router does not know the model's limits: all requests wait for the same probe."""
    bring_a_gang(rig)
    assert await asyncio.gather(*(complete(rig) for _ in range(5))) == [200] * 5
    assert [request.tenant for request in rig.dispatcher.submitted].count(PROBE_TENANT) == 1


async def test_what_was_met_once_is_remembered(rig: RouterRig) -> None:
    bring_a_gang(rig)
    assert await complete(rig) == 200
    rig.dispatcher.is_connected = False
    assert await complete(rig) == 200
    assert [request.tenant for request in rig.dispatcher.submitted].count(PROBE_TENANT) == 1


async def test_no_gang_comes(rig: RouterRig) -> None:
    rig.dispatcher.script = failing("gang_lost", "no gang was connected within 5 s")
    async with rig.client() as client:
        answer = await client.post("/v1/completions", json={"model": BASE, "prompt": "hello"})
    assert answer.status_code == 503
    assert "within 5 s" in answer.json()["error"]["message"]


async def test_a_bad_request_wakes_no_gang(rig: RouterRig) -> None:
    async with rig.client() as client:
        answer = await client.post("/v1/completions", json={"model": "absent", "prompt": "hello"})
    assert answer.status_code == 404
    assert rig.dispatcher.submitted == []


async def test_a_config_that_changes_counts_from_the_next_request(rig: RouterRig) -> None:
    rig.dispatcher.is_connected = True

    async def ask() -> int:
        async with rig.client() as client:
            return (await client.post("/v1/completions", json={"model": BASE, "prompt": "hello", "n": 2})).status_code

    assert await ask() == 200
    before = rig.config.now
    rig.config.now = replace(before, max_sequences_per_request=1)
    assert await ask() == 400
    rig.config.now = before
    assert await ask() == 200
