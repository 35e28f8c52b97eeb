"""Questions for usage of a great many adapters: the event loop goes on, memory is bounded, tenants do not wait long."""

from __future__ import annotations

import asyncio
import csv
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from motet.adapters.registry.registry import connect
from motet.router.http.loop_turns import LoopShare
from motet.router.usage import usage, usage_rows
from motet.router.usage.usage import UsageService
from motet.router.usage.usage_rows import read_prices
from motet.tests.rigs.loop_holds import measured_holds
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.router_rig import OPERATORS, RouterRig, text_service

TEXT = text_service()
NUM_ADAPTERS, DAYS = 2_000, range(1, 11)
SPAN = "from=2026-11-01&to=2026-11-30"
PRICES = 'currency = "EUR"\n[[price]]\nadapter = "*7"\nrequests = 3\n[[price]]\nadapter = "*"\noutput_tokens = 2\n'


@pytest.fixture
async def client(redis_url: str, redis_client: Redis, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    redis = connect(redis_url, PATIENCE_S)
    usage = UsageService(
        redis, tmp_path, tmp_path, kept_days=3, spool_bytes=1 << 30, min_free_bytes=0, prices=read_prices(path)
    )
    usage.ledger._timeout_s = PATIENCE_S
    for day in DAYS:
        groups = [f"{day:02}\tk\tadapter-{number:05}\t1\tabc" for number in range(NUM_ADAPTERS)]
        await redis.hset("motet:{tenant:acme}:ledger:days:202611", mapping=dict.fromkeys(groups, "1 0 10 5 20 1500"))
    await redis.sadd("motet:{ledger}:tenants", "acme")
    async with RouterRig(tmp_path / "spool", TEXT, more_routes=usage.routes).client() as client:
        yield client
    await redis.aclose()


@asynccontextmanager
async def holds_little_of_its_work() -> AsyncIterator[None]:
    """However fast the machine: the longest step is a small part of the whole."""
    began = time.thread_time()
    with measured_holds() as holds:
        yield
        await asyncio.sleep(0)  # the last step counts too
    took_s = time.thread_time() - began
    assert holds.longest_s < took_s / 10, f"{holds.longest_s:.3f} s of {took_s:.3f}: {holds.what}"


@pytest.mark.parametrize("by", ["day,adapter", "adapter", "adapter,day", ""])
async def test_a_tenant_with_many_adapters_does_not_hold_the_loop(client: httpx.AsyncClient, by: str) -> None:
    async with holds_little_of_its_work():
        answer = await client.get(f"/v1/usage?by={by}&{SPAN}")
    found = answer.json()
    assert found["total"]["requests"] == NUM_ADAPTERS * len(DAYS)
    assert found["total"]["kv_device_page_seconds"] == str(NUM_ADAPTERS * len(DAYS) * 3 // 2)
    fields = {"day": "start", "adapter": "adapter"}
    order = [tuple(row[fields[name]] for name in by.split(",") if name) for row in found["data"]]
    assert order == sorted(set(order)) and found["has_more"] == (len(order) == 10_000)


async def test_the_operators_do_not_hold_the_loop_either(client: httpx.AsyncClient) -> None:
    async with holds_little_of_its_work():
        answer = await client.get(f"/v1/admin/usage?by=tenant,adapter&{SPAN}", headers=OPERATORS)
    assert len(answer.json()["data"]) == NUM_ADAPTERS


async def test_csv_has_every_row_and_comes_in_parts(client: httpx.AsyncClient) -> None:
    async with holds_little_of_its_work():
        answer = await client.get(f"/v1/usage?by=day,adapter&format=csv&{SPAN}")
    rows = [*csv.DictReader(answer.text.splitlines())]
    assert len(rows) == len({(row["start"], row["adapter"]) for row in rows}) == NUM_ADAPTERS * len(DAYS)
    assert {row["amount"] for row in rows if row["adapter"].endswith("7")} == {"0.000003"}
    assert {row["amount"] for row in rows if not row["adapter"].endswith("7")} == {"0.00004"}
    some = await client.get(f"/v1/usage?by=day,adapter&format=csv&limit=3&after=1&{SPAN}")
    assert [*csv.DictReader(some.text.splitlines())] == rows[1:4]


async def test_a_row_may_have_several_prices(client: httpx.AsyncClient) -> None:
    row = (await client.get(f"/v1/usage?by=day&limit=1&{SPAN}")).json()["data"][0]
    num_dear = NUM_ADAPTERS // 10
    assert row["requests"] == NUM_ADAPTERS
    millionths = num_dear * 3 + (NUM_ADAPTERS - num_dear) * 2 * 20
    assert float(row["amount"]) == pytest.approx(millionths / 1e6)


async def test_an_answer_that_would_take_too_much_memory_is_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_rows, "MAX_SUMS", NUM_ADAPTERS)
    refused = await client.get(f"/v1/usage?by=day,adapter&{SPAN}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    assert "less time" in refused.json()["error"]["message"]
    assert (await client.get(f"/v1/usage?by=adapter&{SPAN}")).status_code == 200


async def test_a_tenants_questions_are_answered_one_after_the_other(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MAX_OF_CALLER", 3)
    num_reading = most_reading = 0
    rows = usage_rows.UsageSums.rows

    async def counted(self: Any, share: LoopShare) -> AsyncIterator[Any]:
        nonlocal num_reading, most_reading
        num_reading += 1
        most_reading = max(most_reading, num_reading)
        async for row in rows(self, share):
            yield row
        num_reading -= 1

    monkeypatch.setattr(usage_rows.UsageSums, "rows", counted)
    asked = [client.get(f"/v1/usage?by=day&{SPAN}") for _ in range(5)]
    other = client.get(f"/v1/usage?by=day&{SPAN}", headers={"Authorization": "Bearer key-of-zenith"})
    *answers, others = await asyncio.gather(*asked, other)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "too_many_requests" and int(refused.headers["Retry-After"]) >= 1
    assert others.status_code == 200
    assert most_reading <= 2  # of the tenant one, and the other's
    assert (await client.get(f"/v1/usage?by=day&{SPAN}")).status_code == 200  # the turns were given back


async def slow_reader(client: httpx.AsyncClient) -> tuple[asyncio.Task[None], list[Any]]:
    """A tenant's question for CSV, whose client has stopped reading; what was sent to it."""
    sent: list[Any] = []
    never = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            await never.wait()

    async def receive() -> Any:
        await never.wait()

    transport: Any = client._transport
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/v1/usage",
        "raw_path": b"/v1/usage",
        "root_path": "",
        "scheme": "http",
        "query_string": f"by=day,adapter&format=csv&{SPAN}".encode(),
        "headers": [(b"authorization", b"Bearer key-of-acme")],
        "server": ("router", 80),
    }
    stuck = asyncio.create_task(transport.app(scope, receive, send))
    await eventually_in_loop(lambda: len(sent) > 3)
    return stuck, sent


async def test_a_client_that_does_not_read_is_cut_off(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it delays no other client."""
    made: dict[float, asyncio.Timeout] = {}

    def timeout(longest_s: float) -> asyncio.Timeout:
        return made.setdefault(longest_s, asyncio.timeout(longest_s))

    with monkeypatch.context() as patch:
        patch.setattr(usage, "asyncio", SimpleNamespace(timeout=timeout))
        stuck, sent = await slow_reader(client)
    other = await client.get(f"/v1/usage?{SPAN}", headers={"Authorization": "Bearer key-of-zenith"})
    assert other.status_code == 200
    made[usage.LONGEST_S].reschedule(asyncio.get_running_loop().time())  # its time is over
    await asyncio.wait_for(stuck, PATIENCE_S)
    assert sent[-1]["more_body"]  # so no client takes it for whole
    assert (await client.get(f"/v1/usage?{SPAN}")).status_code == 200


async def test_slow_readers_hold_no_more_than_there_is_room_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sums = NUM_ADAPTERS * len(DAYS)
    monkeypatch.setattr(usage, "MAX_HELD_FOR_CSV", num_sums + 1000)
    monkeypatch.setattr(usage, "MAX_HELD", 2 * num_sums)
    asked = f"/v1/admin/usage?by=day,adapter&{SPAN}"
    stuck, _ = await slow_reader(client)
    for _ in range(2):  # what is refused holds nothing
        refused = await client.get(f"{asked}&format=csv", headers=OPERATORS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await client.get(asked, headers=OPERATORS)).status_code == 200  # that needs no reader
    monkeypatch.setattr(usage, "MAX_HELD", 2 * num_sums - 1)
    assert (await client.get(asked, headers=OPERATORS)).status_code == 429
    stuck.cancel()  # the client leaves
    await asyncio.gather(stuck, return_exceptions=True)
    for _ in range(2):  # what was sent holds nothing
        assert (await client.get(f"{asked}&format=csv", headers=OPERATORS)).status_code == 200
