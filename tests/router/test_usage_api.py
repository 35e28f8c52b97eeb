"""/v1/usage: what each caller sees, how it is grouped, and its price."""

from __future__ import annotations

import csv
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from motet.adapters.registry.ledger.entry import Entry, Stage
from motet.router.usage.usage import UsageService
from motet.router.usage.usage_rows import Price, Prices, PricesInvalidError, read_prices
from motet.tests.rigs.router_rig import OPERATORS, RouterRig, text_service

TEXT = text_service()
HOUR = datetime(2026, 11, 20, 9, tzinfo=UTC)
PRICES = """
currency = "EUR"
[[price]]
adapter = "*/poet"  # fits a private adapter's name, and none that has a price
requests = 1000
[[price]]
adapter = "po*"
prompt_tokens = 0.3
cached_tokens = 0.1
[[price]]
adapter = "*"
output_tokens = 2
kv_device_page_seconds = 0.007
"""


def entry(number: int, *, hours: int = 0, tenant: str = "acme", **reported: Any) -> Entry:
    began_at = int((HOUR + timedelta(hours=hours)).timestamp()) + 61
    numbers = {"requests": 1, "prompt_tokens": 10, "cached_tokens": 3, "output_tokens": 5, "kv_device_page_ms": 1500}
    fixed = {"id": f"cmpl-{number}", "began_at": began_at, "stage": Stage.COMPLETE, "key_id": "k1", "adapter": "tiny"}
    return Entry(**{"tenant": tenant, **fixed, **numbers, **reported})


@pytest.fixture
async def usage(redis_client: Redis, tmp_path: Path) -> UsageService:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    folder = tmp_path / "ledger"
    usage = UsageService(
        redis_client, folder, folder, kept_days=3, spool_bytes=1 << 30, min_free_bytes=0, prices=read_prices(path)
    )
    await usage.ledger.take(
        [
            entry(1),
            entry(2, hours=1, adapter="poet", version=2, digest="d" * 64),
            entry(3, hours=1, key_id="k2"),
            entry(4, hours=30),
            entry(5, hours=24 * 12),  # in another month
            entry(6, tenant="zenith", output_tokens=1000, recomputed_tokens=48),
        ]
    )
    return usage


@pytest.fixture
async def client(usage: UsageService, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with RouterRig(tmp_path / "spool", TEXT, more_routes=usage.routes).client() as client:
        yield client


SPAN = "from=2026-11-01&to=2026-12-31"


async def rows(client: httpx.AsyncClient, query: str, path: str = "/v1/usage", **more: Any) -> list[dict[str, Any]]:
    answer = await client.get(f"{path}?{query}", **more)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


async def test_a_tenant_sees_its_own_by_every_request(client: httpx.AsyncClient) -> None:
    days = [(row["start"], row["requests"]) for row in await rows(client, f"by=day&{SPAN}")]
    assert days == [("2026-11-20", 3), ("2026-11-21", 1), ("2026-12-02", 1)]
    hours = await rows(client, "by=hour&from=2026-11-20&to=2026-11-21")
    assert [(row["start"], row["requests"]) for row in hours] == [
        ("2026-11-20T09:00:00Z", 1),
        ("2026-11-20T10:00:00Z", 2),
    ]
    part = await rows(client, "by=&from=2026-11-20T10:00&to=2026-11-22")
    assert [row["requests"] for row in part] == [3]
    adapters = await rows(client, f"by=adapter,key&{SPAN}")
    reported = [(row["adapter"], row["version"], row["key_id"], row["output_tokens"]) for row in adapters]
    assert reported == [("poet", 2, "k1", 5), ("tiny", 0, "k1", 15), ("tiny", 0, "k2", 5)]
    assert "zenith" not in (await client.get(f"/v1/usage?by=adapter&{SPAN}")).text
    assert (await rows(client, f"by=day&{SPAN}", headers={"Authorization": "Bearer key-of-zenith"}))[0][
        "output_tokens"
    ] == 1000


async def test_amounts_are_exact(client: httpx.AsyncClient) -> None:
    answer = (await client.get(f"/v1/usage?by=adapter&{SPAN}")).json()
    poet, tiny = answer["data"]
    assert (answer["currency"], poet["amount"]) == ("EUR", "0.0000024")  # 7 * 0.3 and 3 * 0.1, of a million
    assert tiny["kv_device_page_seconds"] == "6"
    assert tiny["amount"] == "0.000040042"  # 20 tokens at 2, and 6 page-seconds at 0.007
    assert answer["total"]["amount"] == "0.000042442"


async def test_amounts_stay_when_users_are_added_up(client: httpx.AsyncClient, usage: UsageService) -> None:
    """Of private adapters that patterns of the list would distinguish, as of their tenant's own."""
    names = ("poet", "tiny", "~ann/poet", "~ann/tale", "~bob/po", "~bob/x")
    entries = [entry(10 + n, adapter=name, user="ann" if n % 2 else "bob", version=1) for n, name in enumerate(names)]
    await usage.ledger.take(entries)
    span = "from=2026-11-01&to=2026-12-01"

    async def amounts() -> tuple[list[Any], Any]:
        answer = (await client.get(f"/v1/usage?by=day&{span}")).json()
        return [row["amount"] for row in answer["data"]], answer["total"]["amount"]

    users, before = {row["user"] for row in await rows(client, f"by=user&{span}")}, await amounts()
    await usage.ledger.fold_users("acme", datetime(2027, 1, 1, tzinfo=UTC).date())
    assert {row["user"] for row in await rows(client, f"by=user&{span}")} == {"", "(other)"} != users
    assert await amounts() == before


async def test_csv_has_the_same_and_no_cell_is_a_formula(client: httpx.AsyncClient, usage: UsageService) -> None:
    await usage.ledger.take([entry(9, key_id="=1+1")])
    answer = await client.get(f"/v1/usage?by=key&format=csv&{SPAN}")
    assert answer.headers["content-type"].startswith("text/csv")
    found = [*csv.DictReader(answer.text.splitlines())]
    assert [row["key_id"] for row in found] == ["'=1+1", "k1", "k2"]
    assert found[1]["requests"] == "4"
    assert found[1]["currency"] == "EUR"


async def test_pages(client: httpx.AsyncClient) -> None:
    first = (await client.get(f"/v1/usage?by=day&limit=2&{SPAN}")).json()
    rest = (await client.get(f"/v1/usage?by=day&limit=2&after=2&{SPAN}")).json()
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert [len(first["data"]), len(rest["data"])] == [2, 1]
    assert first["total"] == rest["total"]


async def test_operators_see_all(client: httpx.AsyncClient) -> None:
    by_tenant = await rows(client, f"by=tenant&{SPAN}", "/v1/admin/usage", headers=OPERATORS)
    assert [(row["tenant"], row["requests"]) for row in by_tenant] == [("acme", 5), ("zenith", 1)]
    one = await rows(client, f"by=tenant&tenant=zenith&{SPAN}", "/v1/admin/usage", headers=OPERATORS)
    assert [row["tenant"] for row in one] == ["zenith"]
    refused = await client.get("/v1/admin/usage", headers={"Authorization": "Bearer key-of-acme"})
    assert refused.status_code == 401


@pytest.mark.parametrize(
    "query",
    [
        "by=week",
        "by=day,day",
        "by=tenant",
        "from=yesterday",
        "from=2026-11-20T10:30",
        "from=2026-11-20&to=2026-11-20",
        "from=2020-01-01&to=2026-11-20",
        "by=hour&from=2026-01-01&to=2026-11-20",
        "from=0001-01-01&to=2026-11-20",
        "format=xml",
        "limit=0",
        "limit=1e3",
        "after=-1",
        "to=9999-12-31T23:00-14:00",
    ],
)
async def test_what_cannot_be_answered_is_a_400(client: httpx.AsyncClient, query: str) -> None:
    answer = await client.get(f"/v1/usage?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("currency = 5", "letters"),
        ("[[price]]", "currency"),
        ('currency = "EUR"\n[[price]]\nprompt_tokens = 1', "adapter"),
        ('currency = "EUR"\n[[price]]\nadapter = "*"\ntokens = 1', "tokens of"),
        ('currency = "EUR"\n[[price]]\nadapter = "*"\nrequests = -1', "from 0 on"),
        ('currency = "EUR"\n[[price]]\nadapter = "*"\nrequests = nan', "from 0 on"),
        ('currency = "EUR"\n[[price]]\nadapter = "*"\nrequests = "1"', "from 0 on"),
        ('currency = "EUR"\nprices = 1', "prices"),
        ('currency = "EUR"\n[[price]]\nadapter = "~ann/*"', "private adapters of all users"),
        ("currency = ", "TOML"),
    ],
)
def test_a_price_list_that_is_wrong_says_what(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(PricesInvalidError, match=message):
        read_prices(tmp_path / "prices.toml")


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=20), st.decimals("0", "1000", places=6))
def test_an_amount_is_the_sum_of_its_parts(numbers: list[int], rate: Decimal) -> None:
    price = Prices("EUR", [Price("*", {"output_tokens": rate})]).price_of("a")
    assert price is not None
    parts = [price.amount({"output_tokens": number}) for number in numbers]
    assert sum(parts) == price.amount({"output_tokens": sum(numbers)})
