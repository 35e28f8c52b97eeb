"""What one client, or one tenant, can do to trials: to its own, to others', and to the routers' work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry.administration.administration import AuditLog
from motet.adapters.registry.administration.tenant_registry import TenantRegistry
from motet.adapters.registry.canary_counts import CanaryCounts, Outcome
from motet.adapters.registry.registry_keys import CANARIES
from motet.adapters.registry.tenants.records import Actor, KeyRecord, TenantRecord
from motet.adapters.registry.versions.canary_policy import MIN_ANSWERS
from motet.router.http.auth import Identity
from motet.router.tenancy.account import Ending, Progress
from motet.router.text.text import TextService
from motet.router.versions.canary_book import MAX_AT_ONCE, MAX_FAILED_OF_TENANT, CanaryBook, CanaryJudge, counted_of
from motet.tests.rigs.given_keys import give_key
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.quota_rig import requested
from motet.tests.rigs.router_rig import failing, text_service, token_by_token
from motet.tests.rigs.version_rig import VersionRig, version_rigs
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def rig(redis_client: Redis, tmp_path: Path, text: TextService) -> AsyncIterator[VersionRig]:
    """Version 1 of x is current, 2 on trial. Its own judge does not judge unasked."""
    async with version_rigs(redis_client, tmp_path, text) as (rig,):
        await rig.judge.stop()
        await rig.upload(1)
        await rig.upload(2, activate="false")
        put = await rig.http.put("/v1/adapters/x/canary", json={"version": 2, "share": 0.5})
        assert put.status_code == 200
        yield rig


async def judged(rig: VersionRig) -> Any:
    """The canary of x after a look at all reports."""
    await rig.canaries.flush()
    await rig.judge.judge()
    return (await rig.http.get("/v1/adapters/x/canary")).json()


async def test_one_user_who_tries_again_and_again_does_not_take_a_canary_back(rig: VersionRig) -> None:
    users = [f"u{number}" for number in range(100)]
    tried = [user for user in users if await rig.version_for(user=user) == "x@2"]
    assert len(tried) >= MIN_ANSWERS
    rig.dispatcher.script = failing("internal", "it is broken")
    for number in range(200):
        await rig.complete(user=tried[0])
        if number % 50 == 0:
            assert (await judged(rig))["state"] == "running"
    found = await judged(rig)
    assert found["state"] == "running", found["reason"]
    assert found["canary"]["errors"] <= 2
    assert found["canary"]["answers"] + found["canary"]["uncounted"] == len(tried) + 200
    for user in tried[1:]:  # but all of them together do
        await rig.complete(user=user)
    assert (await judged(rig))["state"] == "rolled_back"


async def test_one_user_s_thumbs_do_not_take_a_canary_back(rig: VersionRig) -> None:
    users = [f"u{number}" for number in range(100)]
    answers = {user: await rig.complete(user=user) for user in users}
    tried = [user for user, one in answers.items() if one.headers["x-motet-version"] == "x@2"]
    disliked = [(await rig.complete(user=tried[0])).json()["id"] for _ in range(60)]
    await rig.canaries.flush()
    # At once: what is not counted is looked for once more, and answered only then.
    thumbs = [(response_id, "down") for response_id in disliked]
    await asyncio.gather(*(rig.http.post("/v1/feedback", json={"id": of, "thumb": thumb}) for of, thumb in thumbs))
    thumbs = [(one.json()["id"], "up") for one in answers.values()]
    await asyncio.gather(*(rig.http.post("/v1/feedback", json={"id": of, "thumb": thumb}) for of, thumb in thumbs))
    found = await judged(rig)
    assert (found["state"], found["canary"]["thumbs_down"]) == ("running", 2)


def ending(error: str = "", *, is_cancelled: bool = False) -> Ending:
    progress = Progress(num_prompt_tokens=1, num_cached_tokens=0, num_completion_tokens=3)
    return Ending(progress=progress, error=error, is_cancelled=is_cancelled, first_token_s=0.1, duration_s=1.0)


@pytest.mark.parametrize(
    "error",
    ["timeout", "overloaded", "invalid_request", "invalid_value", "taken_over", "rate_limit_exceeded", "gang_lost"],
)
def test_errors_that_no_version_is_to_blame_for_do_not_count(error: str) -> None:
    assert counted_of(ending(error)) == ()


@pytest.mark.parametrize("error", ["", "internal_error", "adapter_failed", "adapter_overflow"])
def test_answers_that_their_clients_left_do_not_count_however_they_ended(error: str) -> None:
    assert counted_of(ending(error))[0] == "answers"
    assert counted_of(ending(error, is_cancelled=True)) == ()


class Seen(CanaryCounts):
    """Notes which trials are looked at."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client)
        self.read_ids: list[str] = []

    async def read_many(self, canary_ids: Sequence[str]) -> Any:
        self.read_ids += canary_ids
        return await super().read_many(canary_ids)


def outcomes(trial: str, of: str, arm: Any, *counted: str, num: int = 40) -> Iterator[Outcome]:
    for number in range(num):
        yield Outcome("acme", of, f"{trial} {arm} {number}", trial, arm, ("answers", *counted), f"{number}")


async def test_only_trials_with_news_are_looked_at_and_a_bounded_number_at_once(
    rig: VersionRig, redis_client: Redis
) -> None:
    await redis_client.zadd(CANARIES, {f"acme/quiet-{number}": 0 for number in range(3000)})
    counts = Seen(redis_client)
    judge = CanaryJudge(rig.uploads, counts)
    await judge.judge()
    assert counts.read_ids == []
    names = [f"busy-{number}" for number in range(2 * MAX_AT_ONCE + 5)]
    for name in names:
        await counts.add([*outcomes(name, f"acme/{name}", "canary", num=2)])
    seen = []
    for wanted in (MAX_AT_ONCE, MAX_AT_ONCE, 5, 0):
        await judge.judge()
        assert len(counts.read_ids) == wanted
        seen += counts.read_ids
        counts.read_ids = []
    assert sorted(seen) == sorted(names)


async def test_a_canary_that_cannot_be_taken_back_keeps_no_other_from_it(
    rig: VersionRig, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = rig.view._names.find(("acme", "x"))[1]
    assert trial is not None
    canary_id = (await rig.uploads.state("acme", "x")).rollout.canary.id  # type: ignore[union-attr]
    counts = rig.canaries.counts
    for one in (canary_id, "broken", "gone", "away"):
        of = "acme/x" if one == canary_id else f"acme/{one}"
        await counts.add([*outcomes(one, of, "stable"), *outcomes(one, of, "canary", "errors")])
    change = rig.uploads.change

    async def change_some(tenant: str, name: str, *rest: Any, **more: Any) -> Any:
        if name == "broken":
            raise ValueError("a record that cannot be read")
        if name == "away":
            raise RegistryUnavailable("for a moment")
        return await change(tenant, name, *rest, **more)

    monkeypatch.setattr(rig.uploads, "change", change_some)
    await rig.judge.judge()
    assert (await rig.http.get("/v1/adapters/x/canary")).json()["state"] == "rolled_back"
    assert [one.canary_id for one in await counts.updated_trials(10)] == ["away"]  # it is read again


async def test_one_turn_of_reporting_is_bounded_and_what_could_not_be_reported_is_kept(
    rig: VersionRig, redis_client: Redis
) -> None:
    class Slow(CanaryCounts):
        book: CanaryBook
        is_away, num_calls = False, 0
        reported: list[Mapping[tuple[str, str, int], str | None]]

        async def note_failures(self, failures: Mapping[tuple[str, str, int], str | None]) -> None:
            self.num_calls += 1
            assert self.num_calls <= 5, "a turn does not end"
            if self.is_away:
                raise RegistryUnavailable("away")
            self.reported.append(dict(failures))
            self.book._unreported.put(("acme", "x", self.num_calls), "more of it comes meanwhile")

        async def add(self, outcomes: Sequence[Outcome]) -> None:
            self.num_calls += 1
            assert self.num_calls <= 5, "a turn does not end"
            self.book._pending.extend(outcomes)

    slow = Slow(redis_client)
    slow.reported = []
    slow.book = book = CanaryBook(slow)
    book._unreported.put(("acme", "x", 9), "first")
    book._unreported.put(("acme", "x", 9), "second")
    book.count(Outcome("acme", "acme/x", "cmpl-1", "c", "stable", ("answers",)))
    await book.flush()
    assert slow.reported == [{("acme", "x", 9): "second"}]
    slow.is_away = True
    with pytest.raises(RegistryUnavailable):
        await book.flush()
    slow.is_away, slow.num_calls = False, 2
    await book.flush()
    assert slow.reported[1:] == [{("acme", "x", 2): "more of it comes meanwhile"}]


async def test_the_audit_log_says_what_has_changed(rig: VersionRig, redis_client: Redis) -> None:
    await rig.http.put("/v1/adapters/x/aliases/prod", json={"version": 1})
    await rig.http.put("/v1/adapters/x/shadow", json={"version": 2, "share": 1.0})
    await rig.http.patch("/v1/adapters/x/versions/1", json={"note": "a secret"})
    await rig.http.post("/v1/adapters/x/promote")
    await rig.http.post("/v1/adapters/x/rollback")
    found = {one.entry.action: one.entry.changed for one in await AuditLog(redis_client).read("", 20)}
    assert found["alias.set"] == {"aliases": {"prod": {"from": None, "to": 1}}}
    assert found["canary.start"] == {"canary": {"from": None, "to": {"version": 2, "share": 0.5}}}
    assert found["shadow.set"] == {"shadow": {"from": None, "to": {"version": 2, "share": 1.0}}}
    assert found["version.note"] == {"notes": [1]}
    assert found["adapter.promote"]["current"] == {"from": 1, "to": 2}
    assert found["adapter.roll_back"] == {"current": {"from": 2, "to": 1}}
    await rig.http.put("/v1/adapters/x/canary", json={"version": 2, "share": 0.5})
    rig.dispatcher.script = _broken(rig)
    for number in range(200):
        await rig.complete(user=f"u{number}")
    ended = await judged(rig)
    assert ended["state"] == "rolled_back"
    last = (await AuditLog(redis_client).read("", 1))[0].entry
    assert (last.action, last.actor.kind) == ("canary.rolled_back", "judge")
    assert last.changed["canary"] == {"from": {"version": 2, "share": 0.5}, "to": None}
    assert last.changed["canary_ended"] == {"version": 2, "state": "rolled_back", "reason": ended["reason"]}


def _broken(rig: VersionRig) -> Any:
    fail = failing("internal", "it is broken")

    def script(request: SequenceRequest) -> Sequence[SequenceUpdate]:
        if request.adapter is not None and request.adapter.digest == rig.digests[2]:
            return fail(request)
        return token_by_token(rig.dispatcher.answer, request.sampling)

    return script


async def test_answers_of_a_deleted_tenant_meet_none_of_the_next_one_with_its_name(
    rig: VersionRig, redis_client: Redis
) -> None:
    reported = (await rig.complete(user="u1")).json()["id"]
    await rig.canaries.flush()
    operators = Actor(kind="operator")
    tenants = TenantRegistry(redis_client)
    await tenants.delete("acme", operators)
    assert await redis_client.zrange(CANARIES, 0, -1) == []
    made = await tenants.create(TenantRecord(name="acme"), operators)
    await eventually(lambda: rig.view.tenant("acme") == made)
    await give_key(rig.registry, "acme", "key-of-acme")
    await eventually(lambda: rig.view.keys.num_keys_of("acme") > 0)
    await rig.upload(1)
    again = await rig.http.post("/v1/feedback", json={"id": reported, "thumb": "down"})
    assert (again.status_code, again.json()["counted"]) == (200, False), again.text
    mine = (await rig.complete(user="u1")).headers["x-motet-version"]
    assert mine == "x@3"  # numbers go on, so that what was said of version 1 is not said of its own first
    assert (await rig.http.get("/v1/adapters/x/canary")).status_code == 404


async def test_a_tenant_of_many_broken_versions_takes_no_other_s_failures_from_memory(rig: VersionRig) -> None:
    broken = await rig.view.resolve("acme", "x")
    assert broken is not None
    other = replace(broken, tenant="globex")
    book = rig.canaries
    await book.stop()  # reported only on request
    book.note_load(other, "the store had a hiccup")
    for number in range(1000):
        book.note_load(replace(broken, version=number), "its file is cut short")
        if number == 500:
            book.note_load(replace(other, version=2), "the store had a hiccup")
    await book.flush()
    assert (await book.counts.failures("globex", "x", [other.version, 2])).keys() == {other.version, 2}
    newest = range(1000 - MAX_FAILED_OF_TENANT, 1000)
    assert (await book.counts.failures("acme", "x", range(1000))).keys() == set(newest)
    identity = Identity(TenantRecord(name="globex"), KeyRecord(key_id="k", tenant="globex"))
    book.note(replace(requested(identity), version=other), ending())
    await book.flush()
    assert (await book.counts.failures("globex", "x", [other.version, 2])).keys() == {2}
