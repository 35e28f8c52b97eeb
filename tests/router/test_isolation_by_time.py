"""The time of an answer does not reveal whether another tenant, or user, has something of that name."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.adapters.registry.registry_view import CAPACITY
from motet.router.http.route import RouteSpec
from motet.router.text.text import TextService
from motet.tests.rigs.all_route_requests import least_body, names_things, path_of
from motet.tests.rigs.patience import eventually_in_loop
from motet.tests.rigs.real_front import ASKER, ASKER_KEY, KEYS, OWNER, OWNERS_ADAPTER, WOMBAT_KEY, RealFront, real_front
from motet.tests.rigs.router_rig import text_service
from motet.tests.rigs.timing_differences import Ask, differences, z_of

NUM_PAIRS: Final = 1000  # two tries each
NUM_DRAWN_ROUTES: Final = 4  # unless thorough
NUM_USERS_ROUTES: Final = 1
MOST_Z: Final = 3.0
ATTEMPTS: Final = 3  # in all of which they must differ: some other work of the machine may favour one
CASES: Final = {  # the tenant of the adapters, their registered and requested names, and the caller's key
    "a tenant's": (OWNER, "{}", "{}", ASKER_KEY),
    "a user's": (ASKER, "~badger/{}", "~badger/{}", WOMBAT_KEY),
    "a user's, by its plain name": (ASKER, "~badger/{}", "{}", WOMBAT_KEY),
}
FEW: Final = 64  # adapters that a router keeps in memory; it looks the others up


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture(params=[CAPACITY, FEW], ids=["kept", "looked up"])
async def front(
    request: pytest.FixtureRequest, redis_url: str, tmp_path: Path, text: TextService
) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text, request.param) as front:
        yield front


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def pairs(front: RealFront, case: str) -> list[tuple[str, str]]:
    """Names of adapters of the owner's, each with a name that does not exist."""
    tenant, registered, requested, _ = CASES[case]
    drawn = random.sample(range(10**9), 2 * NUM_PAIRS)
    names = [(f"a-{one:09}", f"a-{other:09}") for one, other in zip(drawn[::2], drawn[1::2], strict=True)]
    for start in range(0, NUM_PAIRS, 50):
        await asyncio.gather(*(register(front, tenant, registered.format(one)) for one, _ in names[start : start + 50]))
    num_events = await front.registry.num_events()
    await eventually_in_loop(lambda: front.view._event_number >= num_events)
    return [(requested.format(theirs), requested.format(unowned)) for theirs, unowned in names]


async def register(front: RealFront, tenant: str, name: str) -> None:
    digest = hashlib.sha256(name.encode()).hexdigest()
    await front.registry.names.register(tenant, name, digest=digest, module_ranks={"q_proj": 4}, num_bytes=1)


class LeakyApp:
    """It takes a little longer for what the owner has: some hundredths of a millisecond."""

    def __init__(self, app: ASGIApp, theirs: Collection[str]) -> None:
        self._app, self._theirs = app, theirs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(word in self._theirs for word in scope["path"].split("/")):
            sum(range(3000))
        await self._app(scope, receive, send)


def content_of(front: RealFront, route: RouteSpec) -> bytes:
    """A body that names the owner's."""
    content = least_body(front.document, route, owners=True).get("content", b"")
    assert isinstance(content, bytes)
    return content


def asking(app: ASGIApp, route: RouteSpec, content: bytes, name: str, key: str) -> Ask:
    """A request with this key for a thing of this name."""
    body = content.replace(OWNERS_ADAPTER.encode(), name.encode())
    path = path_of(route, owners=True).replace(OWNERS_ADAPTER, name)
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": route.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"router"), (b"authorization", f"Bearer {key}".encode())],
        "client": ("127.0.0.1", 1),
        "server": ("router", 80),
    }
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # the client stays
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        assert message["type"] != "http.response.start" or message["status"] == 404, message

    async def ask() -> None:
        await app(dict(scope), receive, send)

    return ask


async def z_between(
    front: RealFront, app: ASGIApp, route: RouteSpec, pairs: Sequence[tuple[str, str]], key: str
) -> float:
    front.view._names._unknown.clear()  # so that names are looked up again
    content, asks = content_of(front, route), []
    for pair in pairs:
        made: dict[int, Ask] = {}
        for which in random.sample((0, 1), 2):  # what is made first lies elsewhere in memory
            made[which] = asking(app, route, content, pair[which], key)
        asks.append((made[0], made[1]))
    return z_of(await differences(asks))


async def distinguished(
    front: RealFront, app: ASGIApp, route: RouteSpec, pairs: Sequence[tuple[str, str]], key: str
) -> list[float]:
    """The z of each attempt, of which the last is small if they are not."""
    found: list[float] = []
    while len(found) < ATTEMPTS and not (found and abs(found[-1]) < MOST_Z):
        found.append(await z_between(front, app, route, pairs, key))
    return found


def tenants_routes(front: RealFront) -> list[RouteSpec]:
    """Those that name an adapter."""
    named = [route for route in front.app.state.routes if names_things(route) and route.needs_tenant]
    return [
        route
        for route in named
        if OWNERS_ADAPTER in path_of(route, owners=True) or OWNERS_ADAPTER.encode() in content_of(front, route)
    ]


async def test_time_does_not_show_whether_another_has_it(
    front: RealFront, case: str, pairs: list[tuple[str, str]], pytestconfig: pytest.Config
) -> None:
    *_, key = CASES[case]
    routes = [route for route in tenants_routes(front) if route.scope in KEYS[key].scopes]
    assert len(routes) >= 5
    if not pytestconfig.getoption("thorough"):  # each commit draws others
        num_drawn = NUM_DRAWN_ROUTES if key == ASKER_KEY else NUM_USERS_ROUTES
        routes = random.Random(pytestconfig.getoption("first_seed")).sample(routes, num_drawn)
    found = {
        f"{route.method} {route.path}": await distinguished(front, front.app, route, pairs, key) for route in routes
    }
    print(found)
    assert {route: zs for route, zs in found.items() if abs(zs[-1]) >= MOST_Z} == {}


@pytest.mark.parametrize("case", ["a tenant's"], indirect=True)
async def test_a_leak_would_be_seen(front: RealFront, pairs: list[tuple[str, str]]) -> None:
    route = next(route for route in tenants_routes(front) if route.path == "/v1/adapters/{name}")
    found = await distinguished(front, LeakyApp(front.app, {theirs for theirs, _ in pairs}), route, pairs, ASKER_KEY)
    print(found)
    assert len(found) == ATTEMPTS and min(found) >= MOST_Z
