"""Shadow traffic: a version sees requests, and clients see nothing of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from redis.asyncio import Redis

from motet.router.http.errors import ApiError
from motet.router.http.stream_position import parse_response_id
from motet.router.tenancy.account import Account, AnswerRequest, Ending
from motet.router.text.text import TextService
from motet.router.versions.shadow_sender import MAX_AT_ONCE, MAX_OF_TENANT, may_begin
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import failing, text_service, token_by_token
from motet.tests.rigs.version_rig import VersionRig, version_rigs
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate

ZENITH = {"Authorization": "Bearer key-of-zenith"}


class Books:
    """An accountant that lets no shadow be made while `has_room` is False."""

    headers: Sequence[tuple[bytes, bytes]] = ()

    def __init__(self) -> None:
        self.has_room = True
        self.requested: list[AnswerRequest] = []  # shadows
        self.settled: list[Ending] = []  # of all

    async def open(self, requested: AnswerRequest) -> Account:
        if requested.response_id.startswith("shadow-"):
            self.requested.append(requested)
            if not self.has_room:
                raise ApiError(429, "no tokens are left", code="rate_limit_exceeded")
        return self

    def settle(self, ending: Ending) -> None:
        self.settled.append(ending)


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def rig(redis_client: Redis, tmp_path: Path, text: TextService, books: Books) -> AsyncIterator[VersionRig]:
    async with version_rigs(redis_client, tmp_path, text, accountants=[books]) as (rig,):
        await with_shadow(rig)
        yield rig


async def with_shadow(rig: VersionRig, headers: dict[str, str] | None = None) -> None:
    await rig.upload(1, headers=headers)
    await rig.upload(2, headers=headers, activate="false")
    put = await rig.http.put("/v1/adapters/x/shadow", json={"version": 2, "share": 1.0}, headers=headers)
    assert put.status_code == 200


def shadowed(rig: VersionRig) -> list[SequenceRequest]:
    requested = rig.dispatcher.submitted
    return [one for one in requested if one.adapter is not None and one.adapter.digest == rig.digests[2]]


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


async def test_no_more_than_a_few_are_shadowed_at_once_and_no_answer_waits_for_them(rig: VersionRig) -> None:
    hang = [SequenceUpdate(1, [5])]

    def script(request: SequenceRequest) -> list[SequenceUpdate]:
        is_shadow = request.adapter is not None and request.adapter.digest == rig.digests[2]
        return hang if is_shadow else token_by_token(rig.dispatcher.answer, request.sampling)

    rig.dispatcher.script = script
    rig.dispatcher.hangs = True
    for _ in range(2 * MAX_OF_TENANT):
        assert (await rig.complete()).status_code == 200
    await eventually(lambda: len(shadowed(rig)) == MAX_OF_TENANT)
    await with_shadow(rig, ZENITH)  # one that takes all its places takes none of another tenant's
    assert (await rig.complete(headers=ZENITH)).status_code == 200
    await eventually(lambda: [one.tenant for one in shadowed(rig)].count("zenith") == 1)
    assert len(shadowed(rig)) == MAX_OF_TENANT + 1
    assert (await rig.complete(n=2)).status_code == 200
    for stream in rig.dispatcher.streams:
        stream.cancel()


async def test_a_stopped_shadow_sees_nothing(rig: VersionRig) -> None:
    await rig.http.delete("/v1/adapters/x/shadow")
    await rig.complete()
    await rig.complete("x@1")
    assert shadowed(rig) == []
    assert (await rig.http.get("/v1/adapters/x/shadow")).status_code == 404


async def test_a_shadow_is_its_tenant_s_own_in_all_books(rig: VersionRig, books: Books) -> None:
    assert (await rig.complete(max_tokens=2)).status_code == 200
    await seen(rig, 1)
    (requested,) = books.requested
    assert requested.version is not None
    assert (requested.identity.name, requested.model, requested.version.version) == ("acme", "x@2", 2)
    assert (requested.num_sequences, requested.num_new_tokens, requested.is_stream) == (1, 2, False)
    parsed = parse_response_id(requested.response_id)
    assert parsed is not None and parsed.prefix == "shadow-"
    assert [one.progress.num_completion_tokens for one in books.settled] == [2, 2]  # the answer, and its shadow
    assert books.settled[0].progress.num_prompt_tokens == books.settled[1].progress.num_prompt_tokens > 0


async def test_a_shadow_that_its_tenant_has_no_quota_for_is_not_made(rig: VersionRig, books: Books) -> None:
    books.has_room = False
    for _ in range(2 * MAX_OF_TENANT):
        assert (await rig.complete()).status_code == 200
        await eventually(lambda: not [one for one in asyncio.all_tasks() if one.get_name() == "shadow"])
    assert len(books.requested) == 2 * MAX_OF_TENANT and shadowed(rig) == []
    assert len(books.settled) == 2 * MAX_OF_TENANT  # of the answers alone
    books.has_room = True
    await rig.complete()
    await seen(rig, 1)


async def test_a_shadow_that_breaks_is_settled_and_says_nothing_of_its_version(rig: VersionRig, books: Books) -> None:
    def script(request: SequenceRequest) -> list[SequenceUpdate]:
        if request.adapter is not None and request.adapter.digest == rig.digests[2]:
            raise ValueError("a mistake in the router")
        return token_by_token(rig.dispatcher.answer, request.sampling)

    rig.dispatcher.script = script
    assert (await rig.complete()).status_code == 200
    await eventually(lambda: len(books.settled) == 2)
    rig.dispatcher.script = None
    await rig.complete()
    assert (await seen(rig, 1))["answers"] == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_few_tenants_keep_another_one_from_being_shadowed(seed: int) -> None:
    chooser, running = random.Random(seed), Counter[str]()
    num_greedy = chooser.randrange(1, MAX_AT_ONCE)
    for _ in range(2000):
        tenant = f"greedy {chooser.randrange(num_greedy)}"
        if chooser.random() < 0.2 and running[tenant]:
            running[tenant] -= 1
        elif may_begin(running[tenant], running.total()):
            running[tenant] += 1
        assert running.total() <= MAX_AT_ONCE and max(running.values()) <= MAX_OF_TENANT
        if num_greedy <= MAX_AT_ONCE // 2:
            assert may_begin(0, running.total())


async def test_a_shadow_of_an_embedding_reserves_no_new_tokens(rig: VersionRig, books: Books) -> None:
    assert (await rig.http.post("/v1/embeddings", json={"model": "x", "input": "hi"})).status_code == 200
    await seen(rig, 1)
    assert [one.num_new_tokens for one in books.requested] == [0]
