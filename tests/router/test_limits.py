"""Quotas as clients see them: headers on all answers, refusals, /v1/limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from motet.adapters.errors import AdapterInvalid, QuotaExceeded
from motet.adapters.registry.tenants.records import Quota
from motet.cluster.client_commands.usage_commands import limit_lines
from motet.router.tenancy.quotas import Quotas
from motet.tests.rigs.quota_rig import A_WHILE_S
from motet.tests.rigs.router_rig import BASE, RouterRig, chunks_of, failing, text_service

RATE_HEADERS = [
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]


@pytest.fixture
async def rig(redis_client: Redis, tmp_path: Path) -> AsyncIterator[RouterRig]:
    quotas = Quotas(redis_client, lambda: 1, wait_s=A_WHILE_S)
    quotas.start()
    rig = RouterRig(tmp_path, text_service(), quotas)
    rig.dispatcher.answer = rig.ids("hello world")
    yield rig
    await quotas.stop()


def body(**fields: object) -> dict[str, object]:
    return {"model": BASE, "prompt": "hello", "max_tokens": 20, **fields}


def rates(response: httpx.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in RATE_HEADERS if name in response.headers}


async def test_all_answers_of_a_tenant_with_quotas_say_what_is_left(rig: RouterRig) -> None:
    rig.registry.quotas["acme"] = Quota(requests_per_minute=4, tokens_per_minute=10_000)
    async with rig.client() as client:
        first = await client.post("/v1/completions", json=body())
        assert first.status_code == 200
        assert list(rates(first)) == RATE_HEADERS
        assert (rates(first)["x-ratelimit-limit-requests"], rates(first)["x-ratelimit-remaining-requests"]) == (
            "4",
            "3",
        )
        assert int(rates(first)["x-ratelimit-remaining-tokens"]) < 9_980
        stream = await client.post("/v1/completions", json=body(stream=True))
        assert chunks_of(stream) and list(rates(stream)) == RATE_HEADERS
        wrong = await client.post("/v1/completions", json=body(temperature=-1))
        assert wrong.status_code == 400
        assert list(rates(wrong)) == RATE_HEADERS
        assert rates(wrong)["x-ratelimit-remaining-requests"] == "2"  # it never came to be a request
        unknown = await client.post("/v1/chat/completions", json={"model": "none", "messages": []})
        assert list(rates(unknown)) == RATE_HEADERS
        rig.dispatcher.script = failing("overloaded", "too much")
        failed = await client.post("/v1/completions", json=body())
        assert (failed.status_code, failed.json()["error"]["code"]) == (429, "overloaded")
        assert list(rates(failed)) == RATE_HEADERS
        rig.dispatcher.script = None
        await client.post("/v1/completions", json=body())
        refused = await client.post("/v1/completions", json=body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert list(rates(refused)) == RATE_HEADERS
        assert rates(refused)["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(refused.headers["retry-after"]) <= 15
        for name in RATE_HEADERS:
            assert refused.headers.get_list(name) == [refused.headers[name]], "once"


async def test_without_quotas_no_answer_has_such_headers(rig: RouterRig) -> None:
    async with rig.client() as client:
        for response in (
            await client.post("/v1/completions", json=body()),
            await client.post("/v1/completions", json=body(temperature=-1)),
        ):
            assert rates(response) == {}


async def test_who_has_no_requests_left_is_refused_before_the_body_is_read(rig: RouterRig) -> None:
    rig.registry.quotas["acme"] = Quota(requests_per_minute=1)
    async with rig.client() as client:
        assert (await client.post("/v1/completions", json=body())).status_code == 200
        refused = await client.post("/v1/completions", content=b"this is no JSON")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_tokens_that_were_not_used_are_back_after_the_answer(rig: RouterRig) -> None:
    rig.registry.quotas["acme"] = Quota(tokens_per_minute=300)
    async with rig.client() as client:
        for _ in range(5):  # each reserves two thirds of the quota, and uses a few
            response = await client.post("/v1/completions", json=body(max_tokens=200))
            assert response.status_code == 200, response.text


async def test_a_stream_holds_its_place_until_its_end(rig: RouterRig) -> None:
    rig.registry.quotas["acme"] = Quota(concurrent_streams=1)
    async with rig.client() as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json=body(stream=True))).status_code == 200
        rig.registry.quotas["acme"] = Quota(concurrent_streams=0)
        refused = await client.post("/v1/completions", json=body())
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert refused.headers["x-should-retry"] == "false"


async def test_limits(rig: RouterRig) -> None:
    rig.registry.quotas["acme"] = Quota(
        requests_per_minute=3, tokens_per_minute=1000, concurrent_streams=2, adapters=5, stored_bytes=1 << 20
    )
    rig.registry.add("acme", "pirate")
    async with rig.client() as client:
        await client.post("/v1/completions", json=body())
        found = (await client.get("/v1/limits")).json()
        mine = found["tenant"]
        assert mine["requests_per_minute"].items() >= {"limit": 3, "remaining": 2}.items()
        assert 0 < mine["requests_per_minute"]["reset_s"] <= 20
        assert 900 < mine["tokens_per_minute"]["remaining"] <= 1000
        assert mine["concurrent_streams"] == {"limit": 2, "remaining": 2, "reset_s": None}
        assert mine["adapters"] == {"limit": 5, "remaining": 4, "reset_s": None}
        assert mine["stored_bytes"]["remaining"] == (1 << 20) - 1234
        assert found["key"]["adapters"] == {"limit": None, "remaining": None, "reset_s": None}
        assert found["is_fleet_wide"]
        assert (await client.get("/v1/limits")).json()["tenant"]["requests_per_minute"]["remaining"] == 2
        lines = limit_lines(found)
        assert "tenant  requests a minute  2 of 3 left" in lines
        assert any(line.startswith("tenant  stored ") and line.endswith(" left") for line in lines)
        refused = await client.get("/v1/limits", headers={"Authorization": "Bearer unknown"})
        assert refused.status_code == 401
        others = (await client.get("/v1/limits", headers={"Authorization": "Bearer key-of-zenith"})).json()
        assert limit_lines(others) == ["no quotas"]


async def test_an_upload_over_the_quota(rig: RouterRig) -> None:
    rig.registry.error = QuotaExceeded("5 adapters are stored, and this tenant's quota is 5")
    async with rig.client() as client:
        files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
        refused = await client.post("/v1/adapters", data={"name": "x"}, files=files)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert refused.headers["x-should-retry"] == "false"


async def test_uploads_have_a_quota_of_their_own(rig: RouterRig) -> None:
    """Those that are refused count too: each is checked all the same."""
    rig.registry.quotas["acme"] = Quota(requests_per_minute=1, uploads_per_minute=3)
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    async with rig.client() as client:

        async def upload(name: str = "x", **headers: str) -> httpx.Response:
            return await client.post("/v1/adapters", data={"name": name}, files=files, headers=headers)

        assert (await upload()).status_code == 201
        rig.registry.error = AdapterInvalid("it is none")
        assert (await upload()).status_code == 400
        rig.registry.error = None
        assert (await client.post("/v1/adapters", content=b"no form")).status_code == 400
        refused = await upload()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "uploads a minute: limit 3, left 0" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert len(rig.registry.uploaded) == 1
        found = (await client.get("/v1/limits")).json()["tenant"]
        assert found["uploads_per_minute"].items() >= {"limit": 3, "remaining": 0}.items()
        assert found["requests_per_minute"]["remaining"] == 1
        assert (await client.post("/v1/completions", json=body())).status_code == 200
        assert (await upload(Authorization="Bearer key-of-zenith")).status_code == 201
        rig.registry.quotas["acme"] = Quota(uploads_per_minute=0)
        assert (await client.post("/v1/completions", json=body())).status_code == 200
        assert (await upload()).json()["error"]["code"] == "insufficient_quota"
