"""How long answers held pages of device memory: from the engine's integrals to /v1/usage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.router.generation import generation
from motet.router.text.text import TextService
from motet.router.usage.usage import UsageService
from motet.router.usage.usage_rows import Price, Prices
from motet.tests.rigs import fake_stream
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.tests.rigs.router_rig import BASE, RouterRig, text_service
from motet.workers.wire.messages import SequenceError, SequenceRequest, SequenceUpdate, SequenceUsage, TokenLogprobs

PROMPT = list(range(10, 31))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("page-seconds")
    model = write_model("llama", folder / "model")
    return Stock.make(model, write_adapters(model, folder / "adapters"), folder / "store")


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def usage(redis_client: Redis, tmp_path: Path) -> AsyncIterator[UsageService]:
    prices = Prices("EUR", [Price("*", {"adapter_device_page_seconds": Decimal(3)})])
    folder = tmp_path / "ledger"
    usage = UsageService(
        redis_client, folder, tmp_path / "days", kept_days=3, spool_bytes=1 << 30, min_free_bytes=0, prices=prices
    )
    await usage.start()
    yield usage
    await usage.stop()


def reported_by(rig: EngineRig) -> dict[int, SequenceUsage]:
    """What the engine reported last of each sequence, as it goes on."""
    reported: dict[int, SequenceUsage] = {}
    step = rig.engine.step

    def tapped() -> list[SequenceUpdate]:
        updates = step()
        reported.update({one.sequence_id: one.usage for one in updates if one.usage is not None})
        return updates

    rig.engine.step = tapped  # type: ignore[method-assign]
    return reported


async def row_of(usage: UsageService, client: Any, by: str = "") -> list[dict[str, Any]]:
    await usage.keeper.ship()
    found: list[dict[str, Any]] = (await client.get("/v1/usage", params={"by": by})).json()["data"]
    return found


async def test_usage_is_what_the_engine_has_summed(stock: Stock, usage: UsageService) -> None:
    first, second, *_ = stock.refs
    requested: list[tuple[str, dict[str, Any]]] = [
        (BASE, {}),
        (first, {"n": 2}),
        (first, {}),
        (second, {"n": 3}),
        (second, {"prompt": [PROMPT, PROMPT[5:]]}),
    ]
    with stock.engine(num_pages=200) as rig:
        reported, dispatcher = reported_by(rig), EngineDispatcher(rig)
        expected: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        async with client_of(dispatcher, stock, first, second, usage=usage) as client:
            for name, more in requested:
                num_before = len(dispatcher.requests)
                body = {"model": name, "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, **more}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                taken = [reported[number] for number in range(num_before + 1, len(dispatcher.requests) + 1)]
                expected[name][0] += round(1000 * sum(one.kv_page_s for one in taken))
                expected[name][1] += round(1000 * sum(one.adapter_page_s for one in taken))
            rows = await row_of(usage, client, "adapter")
            table = (await client.get("/v1/usage", params={"by": "adapter", "format": "csv"})).text
    assert {
        row["adapter"]: [round(1000 * float(row[f"{kind}_device_page_seconds"])) for kind in ("kv", "adapter")]
        for row in rows
    } == dict(expected)
    assert all(kv > 0 for kv, _ in expected.values())
    assert {name: adapter > 0 for name, (_, adapter) in expected.items()} == {BASE: False, first: True, second: True}
    for row in rows:
        assert float(row["amount"]) == pytest.approx(3e-6 * float(row["adapter_device_page_seconds"]))
    assert "kv_device_page_seconds,adapter_device_page_seconds,amount" in table.splitlines()[0]


async def test_a_search_for_beams_counts_all_its_rounds(stock: Stock, usage: UsageService) -> None:
    with stock.engine(num_pages=200) as rig:
        reported, dispatcher = reported_by(rig), EngineDispatcher(rig)
        async with client_of(dispatcher, stock, usage=usage) as client:
            body = {"model": BASE, "prompt": PROMPT, "max_tokens": 4, "use_beam_search": True, "n": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            (row,) = await row_of(usage, client)
    assert len(reported) == 1
    assert float(row["kv_device_page_seconds"]) == round(sum(one.kv_page_s for one in reported.values()), 3)


async def test_what_a_cut_off_answer_held_since_it_was_reported_counts_up_to_its_last_token(
    usage: UsageService, tmp_path: Path, text: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = RouterRig(tmp_path / "spool", text, accountants=[usage.metering], more_routes=usage.routes)
    now = 50.0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now

    monkeypatch.setattr(generation, "time", Clock)
    monkeypatch.setattr(fake_stream, "time", Clock)

    def script(request: SequenceRequest) -> Iterator[SequenceUpdate]:
        nonlocal now
        yield SequenceUpdate(1, [40], usage=SequenceUsage(1.5, 0.25, 10, 0.5))
        now += 2.0
        yield SequenceUpdate(1, [40])
        now += 100.0
        yield SequenceUpdate(1, error=SequenceError("gang_lost", "it went"))

    rig.dispatcher.script = script  # type: ignore[assignment]
    async with rig.client() as client:
        assert (await client.post("/v1/completions", json={"model": BASE, "prompt": "hello"})).status_code == 503
        (row,) = await row_of(usage, client)
    assert (row["kv_device_page_seconds"], row["adapter_device_page_seconds"]) == ("21.5", "1.25")


def taking(*reported: SequenceUsage | None) -> list[SequenceUpdate]:
    return [SequenceUpdate(1, [40], usage=one) for one in reported]


async def test_what_was_reported_last_counts_even_of_an_answer_that_is_cut_off(
    usage: UsageService, tmp_path: Path, text: TextService
) -> None:
    rig = RouterRig(tmp_path / "spool", text, accountants=[usage.metering], more_routes=usage.routes)
    updates = taking(SequenceUsage(1.5, 0.25), None, SequenceUsage(2.5, 0.75), None)

    def script(request: SequenceRequest) -> list[SequenceUpdate]:
        return [*updates, SequenceUpdate(1, [41], finish_reason="length", usage=SequenceUsage(9.0, 8.0))]

    rig.dispatcher.script = script
    async with rig.client() as client:
        answer = await client.post("/v1/completions", json={"model": BASE, "prompt": "hello"})
        assert answer.status_code == 200
        (row,) = await row_of(usage, client)
        assert (row["kv_device_page_seconds"], row["adapter_device_page_seconds"]) == ("9", "8")
        rig.dispatcher.script = lambda request: updates  # and then it is lost
        assert (await client.post("/v1/completions", json={"model": BASE, "prompt": "hello"})).status_code == 500
        (row,) = await row_of(usage, client)
    assert (row["kv_device_page_seconds"], row["adapter_device_page_seconds"]) == ("11.5", "8.75")


async def test_of_many_tokens_at_once_it_is_not_lost(usage: UsageService, tmp_path: Path, text: TextService) -> None:
    """As a slow reader gets them: they are processed in portions."""
    rig = RouterRig(tmp_path / "spool", text, accountants=[usage.metering], more_routes=usage.routes)
    rows = [TokenLogprobs(-1.0, [], [])] * 100
    rig.dispatcher.script = lambda request: [
        SequenceUpdate(1, [40] * 100, rows, "length", usage=SequenceUsage(9.0, 8.0))
    ]
    async with rig.client() as client:
        body = {"model": BASE, "prompt": "hello", "max_tokens": 100, "logprobs": 0}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        (row,) = await row_of(usage, client)
    assert (row["kv_device_page_seconds"], row["adapter_device_page_seconds"]) == ("9", "8")
