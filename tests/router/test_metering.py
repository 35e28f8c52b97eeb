"""What a router counts of answers, and that it arrives in the ledger once: held against what clients received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry.ledger.entry import Stage
from motet.adapters.registry.registry import connect
from motet.cluster.launch.redis_server import RedisServer
from motet.router.usage import usage as usage_module
from motet.router.usage.usage import UsageService
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.router_rig import HEADERS, RouterRig, chunks_of, counts_of, events_of, failing, text_service
from motet.tests.rigs.usage_reconciliation import Received, ledger_entries, reconcile, sums_of
from motet.workers.wire.messages import SequenceUpdate

TEXT = text_service()
Send = Callable[[str, dict[str, Any]], Any]


def usage_of(client: Redis, folder: Path, **given: Any) -> UsageService:
    reported = {"kept_days": 3, "spool_bytes": 1 << 30, "min_free_bytes": 0, "prices": None, **given}
    return UsageService(client, folder / "ledger", folder / "store" / "ledger", **reported)


@pytest.fixture
async def usage(redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UsageService]:
    """Lines are sent, and progress is written, when the test does so and not in the midst of what it looks at."""
    for interval in ("SHIP_INTERVAL_S", "PROGRESS_INTERVAL_S"):
        monkeypatch.setattr(usage_module, interval, 3600.0)
    usage = usage_of(redis_client, tmp_path)
    await usage.start()
    yield usage
    await usage.stop()


def rig_of(usage: UsageService, tmp_path: Path) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", TEXT, accountants=[usage.metering], more_routes=usage.routes)
    rig.dispatcher.answer = rig.ids("hello world")
    return rig


@pytest.fixture
def rig(usage: UsageService, tmp_path: Path) -> RouterRig:
    return rig_of(usage, tmp_path)


BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 50}


def body_of(rig: RouterRig, **more: Any) -> dict[str, Any]:
    return {**BODY, "model": rig.config.now.model_name, **more}


def received(answer: dict[str, Any], **more: Any) -> Received:
    used = answer["usage"]
    cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Received(answer["id"], "acme", True, used["prompt_tokens"], used["completion_tokens"], cached)


async def test_an_answer_is_on_disk_before_its_client_receives_the_end(rig: RouterRig, usage: UsageService) -> None:
    """The last bytes that the client gets find it written down."""
    found: list[tuple[bytes, int]] = []
    sent = [{"type": "http.request", "body": __import__("json").dumps(body_of(rig, stream=True)).encode()}]

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        found.append((message.get("body", b""), usage.behind()[0]))

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"authorization", HEADERS["Authorization"].encode())],
    }
    await rig.app(scope, receive, send)  # type: ignore[arg-type]
    (last, written) = found[-1]
    assert b"[DONE]" in last
    assert written > 100
    assert found[0][1] == 0


async def test_the_ledger_has_what_clients_received(rig: RouterRig, usage: UsageService, redis_client: Redis) -> None:
    rig.registry.add("acme", "poet")
    async with rig.client() as client:
        got = []
        for number in range(6):
            model = "poet" if number % 2 else rig.config.now.model_name
            answer = await client.post("/v1/completions", json=body_of(rig, model=model, n=1 + number % 3))
            got.append(received(answer.json()))
        stream = body_of(rig, stream=True, stream_options={"include_usage": True})
        got.append(received(chunks_of(await client.post("/v1/completions", json=stream))[-1]))
    await usage.keeper.ship()
    await usage.keeper.ship()
    await reconcile(redis_client, got)
    groups = {entry.group for entry in (await ledger_entries(redis_client, ["acme"])).values()}
    assert {(group.adapter, group.version, group.digest) for group in groups} == {
        (rig.config.now.model_name, 0, ""),
        ("poet", 1, "d" * 12),
    }
    assert {group.key_id for group in groups} == {"id of key-of-acme"}


async def test_who_was_refused_or_got_no_token_pays_nothing(
    rig: RouterRig, usage: UsageService, redis_client: Redis
) -> None:
    rig.dispatcher.script = failing("adapter_failed", "it is broken")
    async with rig.client() as client:
        assert (await client.post("/v1/completions", json=body_of(rig))).status_code == 500
        assert (await client.post("/v1/completions", json=body_of(rig, temperature=-1))).status_code == 400
    await usage.keeper.ship()
    await reconcile(redis_client, [])
    assert usage.metering.num_open == 0
    assert usage.keeper._spool._num_reserved == 0


async def test_an_answer_that_broke_counts_as_far_as_it_came(
    rig: RouterRig, usage: UsageService, redis_client: Redis
) -> None:
    rig.dispatcher.script = failing("gang_lost", "it went", after=rig.ids("hello"))
    async with rig.client() as client:
        answer = await client.post("/v1/completions", json=body_of(rig, stream=True))
    await usage.keeper.ship()
    (entry,) = (await ledger_entries(redis_client, ["acme"])).values()
    assert (entry.stage, entry.error, entry.cut_off) == (Stage.CUT_OFF, "gang_lost", 1)
    assert entry.output_tokens == len(rig.ids("hello")) == int(counts_of(events_of(answer.content)[-2].id))


async def test_what_is_under_way_is_written_and_who_leaves_is_cut_off(
    rig: RouterRig, usage: UsageService, redis_client: Redis, tmp_path: Path
) -> None:
    tokens = rig.ids("hello")
    rig.dispatcher.script = lambda request: [SequenceUpdate(1, [token]) for token in tokens]
    rig.dispatcher.hangs = True
    async with rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=body_of(rig, stream=True)))
        await eventually_in_loop(lambda: rig.dispatcher.streams and rig.dispatcher.streams[0].num_read == len(tokens))
        for _ in range(100):  # what was read is counted within few turns of the loop
            await asyncio.sleep(0)
        await usage.metering.write_progress()
        written = usage.keeper.num_waiting_bytes
        await usage.metering.write_progress()
        assert usage.keeper.num_waiting_bytes == written  # nothing moved
        asking.cancel()
        await asyncio.wait([asking])
    assert written > 0
    await eventually_in_loop(lambda: usage.metering.num_open == 0)
    await usage.keeper.ship()
    (entry,) = (await ledger_entries(redis_client, ["acme"])).values()
    assert (entry.stage, entry.output_tokens) == (Stage.CUT_OFF, len(tokens))


async def test_without_room_for_its_line_an_answer_is_refused(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = usage_of(redis_client, tmp_path)
    await usage.start()
    rig = rig_of(usage, tmp_path)
    monkeypatch.setattr(usage.keeper._spool, "reserve", lambda num_bytes: False)
    async with rig.client() as client:
        answer = await client.post("/v1/completions", json=body_of(rig))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ledger_full")
    assert rig.dispatcher.submitted == []
    await usage.stop()


async def test_redis_away_nothing_is_lost_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is killed in the middle, and once its answer is lost after it took all in."""
    monkeypatch.setattr(usage_module, "SHIP_INTERVAL_S", 0.01)
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start())
    usage = usage_of(client, tmp_path)
    await usage.start()
    rig = rig_of(usage, tmp_path)
    take, num_lost = usage.ledger.take, 0

    async def lossy(entries: Any) -> None:
        nonlocal num_lost
        await take(entries)
        if num_lost < 5:
            num_lost += 1
            raise RegistryUnavailable("the answer was lost")

    monkeypatch.setattr(usage.ledger, "take", lossy)
    got: list[Received] = []

    async def ask(clients: httpx.AsyncClient) -> None:
        for _ in range(40):
            answer = await clients.post("/v1/completions", json=body_of(rig))
            assert answer.status_code == 200  # whatever Redis does
            got.append(received(answer.json()))
            await asyncio.sleep(0.005)

    try:
        async with rig.client() as clients:
            asking = [asyncio.create_task(ask(clients)) for _ in range(3)]
            await eventually_in_loop(lambda: len(got) > 30)
            pid = server.pid
            assert pid is not None
            __import__("os").kill(pid, 9)
            await asyncio.gather(*asking)
        async with asyncio.timeout(PATIENCE_S):
            await eventually_in_loop(lambda: usage.keeper.num_waiting_bytes == 0)
        assert num_lost == 5
        await reconcile(client, got)
    finally:
        await usage.stop()
        await client.aclose()
        server.stop()
    assert len(got) == 120


async def test_a_router_that_cannot_reach_redis_leaves_its_lines_to_another(
    redis_client: Redis, tmp_path: Path
) -> None:
    away = connect(f"unix://{tmp_path}/absent.sock")
    first = usage_of(away, tmp_path)
    await first.start()
    rig = rig_of(first, tmp_path)
    async with rig.client() as client:
        got = [received((await client.post("/v1/completions", json=body_of(rig))).json()) for _ in range(5)]
    assert first.behind()[0] > 0
    await first.stop()
    second = usage_of(redis_client, tmp_path)
    await second.start()
    await eventually_in_loop(lambda: len([*(tmp_path / "ledger").glob("*.lock")]) == 1)
    await reconcile(redis_client, got)
    assert (await sums_of(redis_client, "acme", "days"))["requests"] == 5
    await second.stop()
    await away.aclose()
    assert [*(tmp_path / "ledger").iterdir()] == []
