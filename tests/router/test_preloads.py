"""Versions are brought to gangs before they are requested, and every router reports the state."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.preloads import Preloads
from motet.adapters.registry.tenants.records import TenantRecord
from motet.router.http.errors import ApiError
from motet.router.text.text import TextService
from motet.router.versions.residency_api import MAX_IN_ALL, MAX_OF_TENANT, Preloader, may_begin, reason_of
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import failing, text_service
from motet.tests.rigs.version_rig import VersionRig, version_rigs
from motet.workers.wire.messages import SequenceError

ZENITH = {"Authorization": "Bearer key-of-zenith"}
PRELOAD, RESIDENCY = "/v1/adapters/x/preload", "/v1/adapters/x/residency"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def rigs(redis_client: Redis, tmp_path: Path, text: TextService) -> AsyncIterator[Sequence[VersionRig]]:
    async with version_rigs(redis_client, tmp_path, text, num=2) as rigs:
        yield rigs


async def residency(rig: VersionRig, **expected: Any) -> dict[str, Any]:
    """The state of the newest version that the router reports, once it is this."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found: dict[str, Any] = (await rig.http.get(RESIDENCY)).json()["data"][0]
            if expected.items() <= found.items():
                return found
            await asyncio.sleep(0.005)


async def test_what_was_brought_to_gangs_is_reported_by_every_router(rigs: Sequence[VersionRig]) -> None:
    rig, other = rigs
    await rig.upload(1)
    rig.dispatcher.num_gangs = 2
    begun = await rig.http.post(PRELOAD, json={"gangs": 3})
    assert (begun.status_code, begun.json()["version"], begun.json()["gangs"]) == (202, 1, 2)
    for router in rigs:
        router.dispatcher.tiers = {"gang-1": "device", "gang-2": "host"}
        found = await residency(router, tier="device", state="ready")
        assert sorted((gang["tier"], gang["state"]) for gang in found["gangs"]) == [
            ("device", "ready"),
            ("host", "ready"),
        ]
    assert "gang-1" not in str(found)
    for request in rig.dispatcher.submitted:
        assert request.is_background and request.tenant == "acme" and request.sampling.max_tokens == 1
        assert request.adapter is not None and request.adapter.digest == rig.digests[1]
    assert other.dispatcher.submitted == []


async def test_it_is_coming_until_its_gang_has_it(rigs: Sequence[VersionRig]) -> None:
    rig, other = rigs
    await rig.upload(1)
    rig.dispatcher.hangs, rig.dispatcher.script = True, lambda request: []
    await rig.http.post(PRELOAD)
    other.dispatcher.tiers = {"gang-1": "device"}  # for another
    for router in rigs:
        found = await residency(router, state="coming", tier="store")
        assert [gang["state"] for gang in found["gangs"]] == ["coming"]
    rig.dispatcher.streams[0].cancel()
    await residency(other, state="ready", tier="device")


async def test_a_version_that_cannot_be_loaded_says_why_until_it_can(rigs: Sequence[VersionRig]) -> None:
    rig, other = rigs
    await rig.upload(1)
    rig.dispatcher.script = failing("adapter_failed", "its file is cut short")
    assert (await rig.http.post(PRELOAD)).status_code == 202
    found = await residency(other, state="failed", tier="store")
    assert "its file is cut short" in found["reason"]
    assert "its file is cut short" in found["gangs"][0]["reason"]
    async with asyncio.timeout(PATIENCE_S):
        while (await other.http.get("/v1/adapters/x/versions/1")).json()["state"] != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    rig.dispatcher.script = None
    assert (await rig.http.post(PRELOAD, json={"version": 1})).status_code == 202
    assert (await residency(other, state="ready"))["reason"] is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [("invalid_request", "can never fit the pool of 64"), ("store_unavailable", "the store hangs in 8 reads")],
)
async def test_what_is_no_fault_of_the_version_is_reported_of_the_gang(
    rigs: Sequence[VersionRig], kind: Any, message: str
) -> None:
    rig, other = rigs
    await rig.upload(1)
    rig.dispatcher.script = failing(kind, message)
    await rig.http.post(PRELOAD)
    assert message in (await residency(other, state="failed"))["reason"]
    await asyncio.sleep(0.5)  # in which failures of versions would be noted
    assert (await rig.http.get("/v1/adapters/x/versions/1")).json()["state"] == "ready"


async def test_what_may_not_be_requested(rigs: Sequence[VersionRig]) -> None:
    rig, _ = rigs
    await rig.upload(1)
    codes = {}
    for name, body, headers in (
        ("x", {"version": 9}, {}),
        ("unknown", {}, {}),
        ("x", {}, ZENITH),
        ("x", {"gangs": 0}, {}),
        ("x", {"gangs": 17}, {}),
        ("x", {"tier": "device"}, {}),
    ):
        answer = await rig.http.post(f"/v1/adapters/{name}/preload", json=body, headers=headers)
        codes[name, str(body), bool(headers)] = (answer.status_code, answer.json()["error"]["code"])
    assert [*codes.values()] == [
        (404, "version_not_found"),
        (404, "adapter_not_found"),
        (404, "adapter_not_found"),
        (400, "invalid_value"),
        (400, "invalid_value"),
        (400, "invalid_value"),
    ]
    rig.dispatcher.is_connected = False
    away = await rig.http.post(PRELOAD)
    assert (away.status_code, away.json()["error"]["code"]) == (503, "not_ready")
    assert rig.dispatcher.submitted == []


async def test_a_tenant_has_so_many_under_way_and_no_more(rigs: Sequence[VersionRig]) -> None:
    rig, _ = rigs
    await rig.upload(1)
    rig.dispatcher.hangs, rig.dispatcher.script = True, lambda request: []
    answers = [await rig.http.post(PRELOAD) for _ in range(MAX_OF_TENANT + 1)]
    assert {answer.status_code for answer in answers[:-1]} == {202}
    assert (answers[-1].status_code, answers[-1].json()["error"]["code"]) == (429, "overloaded")
    assert "Retry-After" in answers[-1].headers
    rig.dispatcher.streams[0].cancel()
    async with asyncio.timeout(PATIENCE_S):
        while (await rig.http.post(PRELOAD)).status_code != 202:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_few_tenants_who_bring_much_keep_no_other_out(rigs: Sequence[VersionRig], redis_client: Redis) -> None:
    rig, _ = rigs
    await rig.upload(1)
    rig.dispatcher.hangs, rig.dispatcher.script = True, lambda request: []
    rig.dispatcher.num_gangs = MAX_OF_TENANT
    version = await rig.view.resolve("acme", "x")
    assert version is not None
    preloader = Preloader(rig.dispatcher, Preloads(redis_client), rig.canaries)
    for number in range(MAX_IN_ALL // MAX_OF_TENANT // 2):
        await preloader.begin(TenantRecord(name=f"busy-{number}"), version, MAX_OF_TENANT)
    with pytest.raises(ApiError, match=r"0 preloads of yours .* or with one gang") as refused:
        await preloader.begin(TenantRecord(name="greedy"), version, MAX_OF_TENANT)
    assert str(MAX_OF_TENANT) not in str(refused.value)
    assert str(preloader.num_running) not in str(refused.value)
    assert await preloader.begin(TenantRecord(name="quiet"), version, 1) == 1
    with pytest.raises(ApiError, match="1 preloads of yours"):
        await preloader.begin(TenantRecord(name="quiet"), version, 1)
    for stream in rig.dispatcher.streams:
        stream.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while preloader.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", range(10))
def test_no_few_tenants_keep_another_one_from_bringing_a_version(seed: int) -> None:
    chooser, running = random.Random(seed), Counter[str]()
    num_greedy = chooser.randrange(1, MAX_IN_ALL)
    for _ in range(2000):
        tenant, num_gangs = f"greedy {chooser.randrange(num_greedy)}", chooser.randint(1, MAX_OF_TENANT)
        if chooser.random() < 0.2 and running[tenant]:
            running[tenant] -= 1
        elif may_begin(num_gangs, running[tenant], running.total()):
            running[tenant] += num_gangs
        assert running.total() <= MAX_IN_ALL and max(running.values()) <= MAX_OF_TENANT
        if num_greedy <= MAX_IN_ALL // 2:
            assert may_begin(1, 0, running.total())


def test_reasons_say_what_to_do() -> None:
    assert reason_of(None) == ""
    assert "pool was full" in reason_of(SequenceError("overloaded", "it waited", reason="waited"))
    assert reason_of(SequenceError("invalid_request", "too large " * 100)).startswith("invalid_request: too large")
    assert len(reason_of(SequenceError("invalid_request", "too large " * 100))) <= 300
