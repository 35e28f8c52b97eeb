"""Versions over REST, with a real registry behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from redis.asyncio import Redis

from motet.router.text.text import TextService
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import events_of, text_service
from motet.tests.rigs.version_rig import VersionRig, version_rigs

ZENITH = {"Authorization": "Bearer key-of-zenith"}


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def rigs(redis_client: Redis, tmp_path: Path, text: TextService) -> AsyncIterator[Sequence[VersionRig]]:
    async with version_rigs(redis_client, tmp_path, text, 2) as rigs:
        yield rigs


@pytest.fixture
def rig(rigs: Sequence[VersionRig]) -> VersionRig:
    return rigs[0]


async def test_a_trial_a_promotion_and_the_way_back(rigs: Sequence[VersionRig]) -> None:
    rig, other = rigs
    assert (await rig.upload(1, note="the first")).status_code == 201
    tried = await rig.upload(2, activate="false", note="second thoughts")
    assert (tried.status_code, tried.json()["version"]) == (201, 2)
    assert await rig.version_for("x") == "x@1"
    assert await rig.version_for("x@2") == "x@2"
    answer = (await rig.complete("x@2")).json()
    assert answer["model"] == "x@2"
    assert rig.dispatcher.submitted[-1].adapter is not None
    assert rig.dispatcher.submitted[-1].adapter.digest == tried.json()["digest"]
    assert (await rig.http.get("/v1/models/x@2")).json()["id"] == "x@2"

    promoted = await rig.http.post("/v1/adapters/x/promote", json={"version": 2})
    assert (promoted.status_code, promoted.json()["is_current"]) == (200, True)

    await _until(other, "x", "x@2")
    back = await other.http.post("/v1/adapters/x/rollback")
    assert (back.status_code, back.json()["version"], back.json()["note"]) == (200, 1, "the first")
    await _until(rig, "x", "x@1")
    again = await rig.http.post("/v1/adapters/x/rollback")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "version_refused")


async def test_the_history_has_each_version(rig: VersionRig) -> None:
    await rig.upload(1, note="the first")
    await rig.upload(2)
    await rig.http.put("/v1/adapters/x/aliases/prod", json={"version": 1})
    second, first = (await rig.http.get("/v1/adapters/x/versions")).json()["data"]
    assert (second["version"], second["is_current"], second["note"], second["aliases"]) == (2, True, "", [])
    assert (first["version"], first["is_current"], first["note"], first["aliases"]) == (1, False, "the first", ["prod"])
    assert first["uploaded_by"] and first["state"] == "ready"
    assert (await rig.http.get("/v1/adapters/x/versions/prod")).json() == first
    patched = await rig.http.patch("/v1/adapters/x/versions/2", json={"note": "louder"})
    assert patched.json() == {**second, "note": "louder"}
    assert (await rig.http.get("/v1/adapters/x/versions/2")).json()["note"] == "louder"


async def test_aliases_name_versions(rigs: Sequence[VersionRig]) -> None:
    rig, other = rigs
    await rig.upload(1)
    await rig.upload(2)
    put = await rig.http.put("/v1/adapters/x/aliases/prod", json={"version": 1})
    assert put.json() == {"name": "x", "alias": "prod", "version": 1, "object": "alias"}
    assert await rig.version_for("x@prod") == "x@1"
    await rig.http.put("/v1/adapters/x/aliases/prod", json={"version": "2"})
    await _until(other, "x@prod", "x@2")
    assert (await rig.http.get("/v1/adapters/x/aliases")).json()["data"] == [{**put.json(), "version": 2}]
    assert (await rig.http.delete("/v1/adapters/x/aliases/prod")).json()["deleted"] is True
    assert (await rig.complete("x@prod")).status_code == 404
    assert (await rig.http.delete("/v1/adapters/x/aliases/prod")).status_code == 404


@pytest.mark.parametrize("model", ["x@9", "x@absent", "x@", "x@1@1", "y@1", "@1", "x@01"])
async def test_a_version_that_is_not_there_is_not_found(rig: VersionRig, model: str) -> None:
    await rig.upload(1)
    response = await rig.complete(model)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_what_is_wrong_is_refused_with_a_reason(rig: VersionRig) -> None:
    refused = await rig.upload(1, activate="false")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_refused")
    await rig.upload(1)
    assert (await rig.upload(2, activate="maybe")).status_code in (400, 413)
    assert (await rig.upload(2, activate="no")).status_code == 400
    assert (await rig.upload(2, note="n" * 1001)).status_code == 413
    post, put = rig.http.post, rig.http.put
    assert (await post("/v1/adapters/x/promote", json={})).json()["error"]["code"] == "version_refused"
    assert (await post("/v1/adapters/x/promote", json={"version": 7})).json()["error"]["code"] == "version_not_found"
    assert (await post("/v1/adapters/x/promote", json={"verison": 7})).status_code == 400
    assert (await post("/v1/adapters/x/promote", content=b"x" * 20_000)).status_code == 413
    assert (await put("/v1/adapters/x/aliases/1st", json={"version": 1})).status_code == 400


async def test_another_tenant_finds_nothing(rig: VersionRig) -> None:
    await rig.upload(1)
    for method, path, body in (
        ("GET", "versions", None),
        ("GET", "versions/1", None),
        ("PATCH", "versions/1", {"note": "mine"}),
        ("POST", "promote", {"version": 1}),
        ("POST", "rollback", None),
        ("GET", "aliases", None),
        ("PUT", "aliases/prod", {"version": 1}),
        ("DELETE", "aliases/prod", None),
    ):
        found = await rig.http.request(method, f"/v1/adapters/x/{path}", json=body, headers=ZENITH)
        other = await rig.http.request(method, f"/v1/adapters/y/{path}", json=body, headers=ZENITH)
        assert found.status_code == other.status_code == 404
        assert found.text.replace("`x`", "`y`") == other.text
    assert (await rig.complete("x@1")).status_code == 200
    denied = await rig.http.post("/v1/completions", json={"model": "x@1", "prompt": "hi"}, headers=ZENITH)
    assert denied.status_code == 404


async def test_a_stream_goes_on_with_the_version_that_it_began_with(rig: VersionRig) -> None:
    await rig.upload(1)
    body = {"model": "x", "prompt": "hello", "max_tokens": 3, "stream": True}
    events = events_of((await rig.http.post("/v1/completions", json=body)).content)
    await rig.upload(2)
    await rig.upload(3)
    resumed = await rig.http.post("/v1/completions", json=body, headers={"Last-Event-ID": events[0].id})
    assert (resumed.status_code, resumed.headers["x-motet-version"]) == (200, "x@1")
    assert events_of(resumed.content) == events[1:]
    changed = {**body, "prompt": "hallo"}
    refused = await rig.http.post("/v1/completions", json=changed, headers={"Last-Event-ID": events[0].id})
    assert refused.status_code == 400


async def _until(rig: VersionRig, model: str, version: str) -> None:
    """Waits for the version to answer."""
    async with asyncio.timeout(PATIENCE_S):
        while (await rig.complete(model)).headers.get("x-motet-version") != version:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_residency_shows_gangs_by_opaque_names_of_each_tenant(rig: VersionRig) -> None:
    await rig.upload(1)
    await rig.upload(2)
    rig.dispatcher.resident.add(("acme", rig.digests[1]))
    second, first = (await rig.http.get("/v1/adapters/x/residency")).json()["data"]
    assert (second["version"], second["gangs"], second["tier"]) == (2, [], "store")
    assert (first["version"], first["tier"], first["state"]) == (1, "device", "ready")
    assert [(gang["tier"], gang["state"]) for gang in first["gangs"]] == [("device", "ready")]
    assert "gang-1" not in str(first)
    denied = await rig.http.get("/v1/adapters/x/residency", headers=ZENITH)
    assert denied.status_code == 404


async def test_residency_does_not_show_whether_another_tenant_runs_the_same_bytes(rig: VersionRig) -> None:
    await rig.upload(1)
    rig.dispatcher.resident.add(("acme", rig.digests[1]))
    found = {}
    for name, seed in (("same", 1), ("other", 9)):  # what acme runs, and what no tenant does
        assert (await rig.upload(seed, name, headers=ZENITH)).status_code == 201
        found[name] = (await rig.http.get(f"/v1/adapters/{name}/residency", headers=ZENITH)).json()
    assert found["same"] == found["other"]
