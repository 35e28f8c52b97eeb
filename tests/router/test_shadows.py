"""Shadow traffic: a version sees requests, and clients see nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from motet.router.text.text import TextService
from motet.router.versions.shadow_sender import MAX_AT_ONCE
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import failing, text_service, token_by_token
from motet.tests.rigs.version_rig import VersionRig, version_rigs
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def rig(redis_client: Redis, tmp_path: Path, text: TextService) -> AsyncIterator[VersionRig]:
    async with version_rigs(redis_client, tmp_path, text) as (rig,):
        await rig.upload(1)
        await rig.upload(2, activate="false")
        put = await rig.http.put("/v1/adapters/x/shadow", json={"version": 2, "share": 1.0})
        assert put.status_code == 200
        yield rig


def shadowed(rig: VersionRig) -> list[SequenceRequest]:
    asked = rig.dispatcher.submitted
    return [one for one in asked if one.adapter is not None and one.adapter.digest == rig.digests[2]]


async def seen(rig: VersionRig, num: int) -> dict[str, int]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found: dict[str, int] = (await rig.http.get("/v1/adapters/x/shadow")).json()["seen"]
            if found["answers"] >= num:
                return found
            await asyncio.sleep(0.02)


async def test_a_shadow_sees_requests_in_the_background_and_its_failures_are_only_counted(rig: VersionRig) -> None:
    fail = failing("internal", "it is broken")

    def script(request: SequenceRequest) -> list[SequenceUpdate]:
        is_shadow = request.adapter is not None and request.adapter.digest == rig.digests[2]
        return [*fail(request)] if is_shadow else token_by_token(rig.dispatcher.answer, request.sampling)

    rig.dispatcher.script = script
    for _ in range(3):
        response = await rig.complete()
        assert (response.status_code, response.headers["x-motet-version"]) == (200, "x@1")
        assert response.json()["choices"][0]["text"]
    found = await seen(rig, 3)
    assert (found["answers"], found["errors"]) == (3, 3)
    assert [one.is_background for one in shadowed(rig)] == [True] * 3
    assert [one.is_background for one in rig.dispatcher.submitted].count(False) == 3
    assert (await rig.http.get("/v1/adapters/x/canary")).status_code == 404


async def test_no_more_than_a_few_are_shadowed_at_once_and_nobody_waits_for_them(rig: VersionRig) -> None:
    hang = [SequenceUpdate(1, [5])]

    def script(request: SequenceRequest) -> list[SequenceUpdate]:
        is_shadow = request.adapter is not None and request.adapter.digest == rig.digests[2]
        return hang if is_shadow else token_by_token(rig.dispatcher.answer, request.sampling)

    rig.dispatcher.script = script
    rig.dispatcher.hangs = True
    for _ in range(2 * MAX_AT_ONCE):
        assert (await rig.complete()).status_code == 200
    assert 0 < len(shadowed(rig)) <= MAX_AT_ONCE
    assert (await rig.complete(n=2)).status_code == 200
    for stream in rig.dispatcher.streams:
        stream.cancel()


async def test_a_stopped_shadow_sees_nothing(rig: VersionRig) -> None:
    await rig.http.delete("/v1/adapters/x/shadow")
    await rig.complete()
    await rig.complete("x@1")
    assert shadowed(rig) == []
    assert (await rig.http.get("/v1/adapters/x/shadow")).status_code == 404
