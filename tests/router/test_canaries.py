"""Canaries with routers, a real registry and answers that fail: shared out, counted, judged and taken back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry.canary_counts import CanaryCounts, Outcome
from motet.adapters.registry.registry import connect, hash_key
from motet.adapters.registry.tenants.records import KeyRecord, Scope
from motet.adapters.registry.versions.canary_policy import MIN_ANSWERS
from motet.cluster.launch.redis_server import RedisServer
from motet.router.text.text import TextService
from motet.router.versions.canary_book import CanaryBook
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import HEADERS, failing, text_service, token_by_token
from motet.tests.rigs.version_rig import VersionRig, version_rigs
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate


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


async def on_trial(rigs: Sequence[VersionRig], share: float = 0.5) -> None:
    """Version 1 is current, and 2 on trial, as all routers know."""
    await rigs[0].upload(1)
    await rigs[0].upload(2, activate="false")
    put = await rigs[0].http.put("/v1/adapters/x/canary", json={"version": 2, "share": share})
    assert (put.status_code, put.json()["state"]) == (200, "running")
    for rig in rigs:
        await eventually(lambda rig=rig: _has_canary(rig))  # type: ignore[misc]


def _has_canary(rig: VersionRig) -> bool:
    found = rig.view._names.find(("acme", "x"))[1]
    return found is not None and b'"canary"' in found.rollout


def break_version_2(rigs: Sequence[VersionRig], kind: str = "internal") -> None:
    digest = rigs[0].digests[2]
    fail = failing(kind, "it is broken")

    def script(request: SequenceRequest) -> Sequence[SequenceUpdate]:
        if request.adapter is not None and request.adapter.digest == digest:
            return fail(request)
        return token_by_token(rigs[0].dispatcher.answer, request.sampling)

    for rig in rigs:
        rig.dispatcher.script = script


async def canary(rig: VersionRig) -> Any:
    return (await rig.http.get("/v1/adapters/x/canary")).json()


async def counted(rig: VersionRig, arm: str, num: int) -> Any:
    """The canary, once so many answers of it are counted."""
    async with asyncio.timeout(PATIENCE_S):
        while (found := await canary(rig))[arm]["answers"] < num:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


async def test_each_user_stays_with_a_version_at_all_routers_and_a_larger_share_only_adds(
    rigs: Sequence[VersionRig],
) -> None:
    await on_trial(rigs, 0.3)
    users = [f"u{number}" for number in range(60)]
    first = {user: await rigs[0].version_for(user=user) for user in users}
    assert {user: await rigs[1].version_for(user=user, prompt="else") for user in users} == first
    assert 5 <= sum(version == "x@2" for version in first.values()) <= 35
    await rigs[0].http.put("/v1/adapters/x/canary", json={"version": 2, "share": 0.7})
    later = {user: await rigs[0].version_for(user=user) for user in users}
    assert {user for user in users if first[user] == "x@2"} < {user for user in users if later[user] == "x@2"}
    assert await rigs[0].version_for("x@1", user=min(u for u in users if later[u] == "x@2")) == "x@1"


async def test_a_conversation_stays_with_a_version(rig: VersionRig, rigs: Sequence[VersionRig]) -> None:
    await on_trial(rigs)
    found = []
    for number in range(20):
        messages = [{"role": "user", "content": f"hello {number}"}]
        answers = []
        for _ in range(2):
            response = await rig.http.post(
                "/v1/chat/completions", json={"model": "x", "messages": messages, "max_tokens": 1}
            )
            answers.append(response.headers["x-motet-version"])
            messages += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
        assert answers[0] == answers[1]
        found.append(answers[0])
    assert set(found) == {"x@1", "x@2"}


@pytest.mark.parametrize("kind", ["internal", "adapter_failed", "adapter_overflow"])
async def test_a_canary_that_fails_is_taken_back_everywhere_by_itself(rigs: Sequence[VersionRig], kind: str) -> None:
    await on_trial(rigs)
    break_version_2(rigs, kind)
    num_requested = 0
    async with asyncio.timeout(PATIENCE_S):
        while (await canary(rigs[0]))["state"] == "running":
            for rig in rigs:
                await rig.complete(user=f"u{num_requested}")
                num_requested += 1
    ended = await canary(rigs[1])
    assert ended["state"] == "rolled_back"
    what = "answers refused" if kind != "internal" else "answers that failed"
    assert what in ended["reason"]
    bad = "refused" if kind != "internal" else "errors"
    assert ended["canary"][bad] == ended["canary"]["answers"] >= MIN_ANSWERS
    for rig in rigs:
        await eventually(lambda rig=rig: not _has_canary(rig))  # type: ignore[misc]
        assert {await rig.version_for(user=f"u{number}") for number in range(40)} == {"x@1"}
    version = (await rigs[0].http.get("/v1/adapters/x/versions/2")).json()
    failed = ("failed", "it is broken") if kind != "internal" else ("ready", None)
    assert (version["state"], version["reason"]) == failed


async def test_a_version_that_loads_again_is_no_longer_failed(rig: VersionRig, rigs: Sequence[VersionRig]) -> None:
    await on_trial(rigs)
    break_version_2(rigs, "adapter_failed")

    async def state() -> str:
        found: str = (await rig.http.get("/v1/adapters/x/versions/2")).json()["state"]
        return found

    for wanted in ("failed", "ready"):
        assert (await rig.complete("x@2")).status_code == (500 if wanted == "failed" else 200)
        async with asyncio.timeout(PATIENCE_S):
            while await state() != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        rig.dispatcher.script = None


async def test_a_canary_that_does_as_well_stays_and_can_be_promoted(rigs: Sequence[VersionRig]) -> None:
    await on_trial(rigs)
    for number in range(120):
        await rigs[number % 2].complete(user=f"u{number}")
    found = await counted(rigs[0], "canary", MIN_ANSWERS)
    assert found["state"] == "running" and found["stable"]["first_token_p50_s"] is not None
    await rigs[0].judge.judge()
    promoted = await rigs[0].http.post("/v1/adapters/x/promote")
    assert promoted.json()["version"] == 2
    assert (await canary(rigs[0]))["state"] == "promoted"
    assert await rigs[0].version_for() == "x@2"


async def test_a_canary_can_be_stopped_and_an_upload_ends_it(rig: VersionRig, rigs: Sequence[VersionRig]) -> None:
    assert (await rig.http.get("/v1/adapters/x/canary")).status_code == 404
    await on_trial(rigs)
    assert (await rig.http.delete("/v1/adapters/x/canary")).status_code == 200
    assert (await canary(rig))["state"] == "stopped"
    assert (await rig.http.delete("/v1/adapters/x/canary")).status_code == 404
    await rig.http.put("/v1/adapters/x/canary", json={"version": 2, "share": 0.5})
    await rig.upload(3)
    assert (await canary(rig))["state"] == "superseded"
    for share in (0, 1, -1, "half"):
        refused = await rig.http.put("/v1/adapters/x/canary", json={"version": 2, "share": share})
        assert refused.status_code == 400
    refused = await rig.http.put("/v1/adapters/x/canary", json={"version": 3, "share": 0.5})
    assert refused.status_code == 409  # it is current


async def test_feedback_counts_once_and_only_for_answers_of_the_same_tenant(
    rig: VersionRig, rigs: Sequence[VersionRig]
) -> None:
    await on_trial(rigs)
    response = await rig.complete(user="u1")
    arm = "canary" if response.headers["x-motet-version"] == "x@2" else "stable"
    await counted(rig, arm, 1)
    body = {"id": response.json()["id"], "thumb": "down", "comment": "meh"}
    zenith = {"Authorization": "Bearer key-of-zenith"}
    other = await rig.http.post("/v1/feedback", json=body, headers=zenith)
    unknown = await rig.http.post("/v1/feedback", json={**body, "id": "cmpl-1"}, headers=zenith)
    assert (
        (other.status_code, other.json()["counted"]) == (unknown.status_code, unknown.json()["counted"]) == (200, False)
    )
    reported = [(await rig.http.post("/v1/feedback", json=body)).json()["counted"] for _ in range(2)]
    assert reported == [True, False]
    found = await canary(rig)
    assert (found[arm]["thumbs_down"], found[arm]["thumbs_up"], found["comments"]) == (1, 0, [f"{arm} down: meh"])
    for wrong in (
        {"id": "a"},
        {"id": "a", "score": 2},
        {"id": "a", "score": 1, "thumb": "up"},
        {"id": "a", "score": 0},
    ):
        assert (await rig.http.post("/v1/feedback", json=wrong)).status_code == 400


async def test_feedback_on_a_private_adapter_is_its_users_and_the_administrators(rigs: Sequence[VersionRig]) -> None:
    rig = rigs[0]
    callers: Sequence[tuple[str, Scope, str]] = (
        ("admins", "admin", ""),
        ("ann", "upload", "ann"),
        ("eve", "upload", "eve"),
    )
    for name, scope, user in callers:
        scopes = frozenset[Scope](("infer", scope))
        record = KeyRecord(key_id=name, tenant="acme", scopes=scopes, user=user)
        rig.view._keys.set_key(hash_key(f"key-of-{name}"), record)
    ann, eve, admin = ({"Authorization": f"Bearer key-of-{name}"} for name in ("ann", "eve", "admins"))
    await rig.upload(1, headers=ann, private="true")
    await rig.upload(2, headers=ann, private="true", activate="false")
    trial = "/v1/adapters/x/canary"
    await rig.http.put(trial, json={"version": 2, "share": 0.5}, headers=ann)
    await rig.view.catch_up()
    ids = [(await rig.complete(headers=ann, user=f"u{number}")).json()["id"] for number in range(3)]
    await rig.canaries.flush()

    async def counts(answer: str, headers: Mapping[str, str]) -> bool:
        body = {"id": answer, "thumb": "down"}
        return bool((await rig.http.post("/v1/feedback", json=body, headers=headers)).json()["counted"])

    assert not await counts(ids[0], eve)
    assert not await counts(ids[0], HEADERS)
    assert [await counts(ids[0], ann), await counts(ids[1], admin)] == [True, True]
    found = (await rig.http.get(trial, headers=ann)).json()
    assert sum(found[arm]["thumbs_down"] for arm in ("stable", "canary")) == 2


async def test_feedback_may_come_as_soon_as_its_answer_and_at_another_router(
    rigs: Sequence[VersionRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.versions.versions_api.NEW_ANSWER_WAIT_S", PATIENCE_S)
    await on_trial(rigs)
    for number in range(5):
        response = await rigs[0].complete(user=f"u{number}")
        reported = await rigs[1].http.post("/v1/feedback", json={"id": response.json()["id"], "score": 1})
        assert reported.json()["counted"]


async def test_answers_count_once_however_often_they_are_reported(redis_client: Redis) -> None:
    counts = CanaryCounts(redis_client)
    outcomes = [Outcome("acme", "acme/x", f"cmpl-{number}", "c", "stable", ("answers",)) for number in range(10)]
    await counts.add(outcomes)
    await counts.add(outcomes)
    assert (await counts.read("c"))["stable"].answers == 10


async def test_one_router_judges_and_another_goes_on_when_it_dies(redis_client: Redis) -> None:
    counts = CanaryCounts(redis_client)
    assert await counts.hold_judging("a", 3600)
    assert not await counts.hold_judging("b", 0.2)
    assert await counts.hold_judging("a", 0.2)  # and dies
    async with asyncio.timeout(PATIENCE_S):
        while not await counts.hold_judging("b", 0.2):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_killing_redis_in_the_middle_loses_and_doubles_no_answer(tmp_path: Path, text: TextService) -> None:
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start(), PATIENCE_S)
    try:
        async with version_rigs(client, tmp_path, text, 2) as rigs:
            await on_trial(rigs)
            requested = 0
            for step in range(60):
                for rig in rigs:
                    assert (await rig.complete(user=f"u{requested}")).status_code == 200
                    requested += 1
                if step == 20:
                    assert server.pid is not None
                    os.kill(server.pid, signal.SIGKILL)  # it comes back by itself
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    found = await rigs[0].http.get("/v1/adapters/x/canary")
                    if found.status_code == 200:
                        arms = found.json()
                        if arms["stable"]["answers"] + arms["canary"]["answers"] >= requested:
                            break
                    await asyncio.sleep(0.05)
            await asyncio.sleep(2 * 0.2)
            arms = await canary(rigs[1])
            assert arms["stable"]["answers"] + arms["canary"]["answers"] == requested
            assert arms["state"] == "running"
    finally:
        await client.aclose()
        server.stop()


async def test_what_is_not_counted_while_redis_is_away_is_bounded(
    rigs: Sequence[VersionRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.versions.canary_book.MAX_PENDING", 10)
    await on_trial(rigs)
    reported: list[str] = []

    class Away(CanaryCounts):
        is_away = True

        async def add(self, outcomes: Sequence[Outcome]) -> None:
            if self.is_away:
                raise RegistryUnavailable("away")
            reported.extend(one.response_id for one in outcomes)

    away = Away(rigs[0].registry._client)
    book = CanaryBook(away)
    rigs[0].canaries.note = book.note  # type: ignore[method-assign]
    ids = [(await rigs[0].complete(user=f"u{number}")).json()["id"] for number in range(25)]
    with pytest.raises(RegistryUnavailable):
        await book.flush()
    away.is_away = False
    await book.flush()
    assert reported == ids[-10:]
