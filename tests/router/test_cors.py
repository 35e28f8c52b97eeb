"""Pages of other origins: which may ask, and which may read answers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import BASE, HEADERS, RouterRig, text_service

PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


def rig_with(folder: Path, text: TextService, origins: str) -> RouterRig:
    rig = RouterRig(folder / "spool", text, cors_origins=origins)
    rig.dispatcher.answer = rig.ids("hello")
    return rig


async def preflight(rig: RouterRig, origin: str, path: str = "/v1/completions") -> httpx.Response:
    async with rig.client() as client:
        client.headers.pop("Authorization", None)
        return await client.options(path, headers={"Origin": origin, **ASKS})


async def answers(rig: RouterRig, **headers: str) -> list[httpx.Response]:
    """A whole answer, a stream, an error of a route, one for a missing key, and one of no route."""
    body = {"model": BASE, "prompt": "a"}
    async with rig.client() as client:
        return [
            await client.post("/v1/completions", json=body, headers=headers),
            await client.post("/v1/completions", json={**body, "stream": True}, headers=headers),
            await client.post("/v1/completions", json={**body, "n": 0}, headers=headers),
            await client.get("/v1/models", headers={**headers, "Authorization": ""}),
            await client.get("/v1/nothing", headers=headers),
        ]


async def test_without_the_setting_no_page_may_read_anything(tmp_path: Path, text: TextService) -> None:
    rig = rig_with(tmp_path, text, "")
    assert (await preflight(rig, PAGE)).status_code == 405
    for response in [await preflight(rig, PAGE), *await answers(rig, Origin=PAGE)]:
        assert not [name for name in response.headers if name.startswith("access-control") or name == "vary"]


async def test_pages_of_named_origins_may_ask_and_read(tmp_path: Path, text: TextService) -> None:
    rig = rig_with(tmp_path, text, f"https://a.example.com,{PAGE}")
    for path in ("/v1/completions", "/v1/adapters/x/versions/1", "/nothing"):
        allowed = await preflight(rig, PAGE, path)
        assert (allowed.status_code, allowed.content) == (204, b"")
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "DELETE" in allowed.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in allowed.headers
    statuses = []
    for response in await answers(rig, Origin=PAGE):
        statuses.append(response.status_code)
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["vary"] == "Origin"
    assert statuses == [200, 200, 400, 401, 404]


async def test_pages_of_other_origins_may_not(tmp_path: Path, text: TextService) -> None:
    rig = rig_with(tmp_path, text, PAGE)
    assert (await preflight(rig, OTHER)).status_code == 405
    for headers in ({"Origin": OTHER}, {"Origin": f"{PAGE}.evil.example"}, {"Origin": "null"}, {}):
        for response in await answers(rig, **headers):
            assert "access-control-allow-origin" not in response.headers
            assert response.headers["vary"] == "Origin"  # a cache gives it to no page that may read it


async def test_a_star_is_every_page(tmp_path: Path, text: TextService) -> None:
    rig = rig_with(tmp_path, text, "*")
    for response in [await preflight(rig, OTHER), *await answers(rig, Origin=OTHER)]:
        assert response.headers["access-control-allow-origin"] == "*"


async def test_the_setting_may_change_while_it_runs(tmp_path: Path, text: TextService) -> None:
    rig = rig_with(tmp_path, text, "")
    rig.config.now = rig_with(tmp_path, text, PAGE).config.now
    assert (await preflight(rig, PAGE)).status_code == 204


async def test_options_that_are_no_preflight_are_no_route(tmp_path: Path, text: TextService) -> None:
    async with rig_with(tmp_path, text, PAGE).client() as client:
        assert (await client.options("/v1/models", headers={**HEADERS, "Origin": PAGE})).status_code == 405
