"""Every route, method and kind of credentials: a caller without the right gets 401 or 403 and nothing else.

The tables are made of the routes that the app has, so that a new one is in them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from starlette.routing import Route

from motet.adapters.names import FULL_SIGHT
from motet.router.http.route import RouteSpec
from motet.router.text.text import TextService
from motet.tests.rigs.all_route_requests import THINGS, least_body, names_things, path_of, users_things
from motet.tests.rigs.credentials import CREDENTIALS, Thing, headers_of, refusal
from motet.tests.rigs.real_front import (
    ASKER,
    ASKER_KEY,
    BADGER,
    BADGER_KEY,
    BADGERS_ADAPTER,
    BADGERS_OWN,
    KEYS,
    OPERATOR_KEY,
    OWNER,
    OWNER_KEY,
    OWNERS_ADAPTER,
    SCOPES,
    WOMBAT_KEY,
    RealFront,
    but_for_ended_users,
    key_without,
    real_front,
)
from motet.tests.rigs.router_rig import text_service

PUBLIC: Final = {"/health", "/ready", "/openapi.json"}
NAMELESS: Final = {  # routes of a tenant's whose requests name nothing that could be another's
    "GET /v1/models",
    "GET /version",
    "GET /server_info",
    "GET /get_world_size",
    "GET /is_paused",  # these: tests/router/test_training_api.py
    "POST /pause",
    "POST /resume",
    "POST /init_weight_transfer_engine",
    "POST /start_weight_update",
    "POST /update_weights",
    "POST /finish_weight_update",
    "POST /v1/adapters",
    "POST /v1/load_lora_adapter",  # both: tests/router/test_lora_adapters_api.py
    "POST /v1/unload_lora_adapter",
    "GET /v1/adapters",
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/batches",
    "GET /v1/limits",
    "GET /v1/usage",
    "GET /v1/keys",
    "GET /v1/users",
    "POST /v1/keys",
    "POST /v1/feedback",  # an answer by its id: tests/router/test_canaries.py
}
UNREPORTED: Final = ("date", "x-request-id")  # headers that differ anyway


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def front(redis_url: str, tmp_path: Path, text: TextService) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text) as front:
        await front.give_work()
        yield front


def routes_of(front: RealFront) -> tuple[RouteSpec, ...]:
    return tuple(front.app.state.routes)


async def requested(
    front: RealFront,
    route: RouteSpec,
    credentials: str | None,
    *,
    owners: bool,
    method: str = "",
    things: Mapping[str, Thing] = THINGS,
) -> httpx.Response:
    body = least_body(front.document, route, owners=owners, things=things)
    headers = {**body.pop("headers", {}), **headers_of(credentials)}
    path = path_of(route, owners=owners, things=things)
    async with front.client() as client:
        return await client.request(method or route.method, path, headers=headers, **body)


def is_deletion(route: RouteSpec) -> tuple[bool, int]:
    """For an order in which whole things are deleted after all else was done with them and their parts."""
    return route.method == "DELETE", -len(route.path)


async def test_every_route_is_in_the_tables(front: RealFront) -> None:
    """Nothing that the app serves is missing in what the tables are made of, and what a request names is a thing."""
    served = {
        (method, route.path)
        for route in front.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert all(isinstance(route, Route) for route in front.app.routes), "what else serves requests here?"
    assert served == {(route.method, route.path) for route in routes_of(front)}
    assert {route.path for route in routes_of(front) if route.scope == "public"} == PUBLIC
    of_a_tenant = [route for route in routes_of(front) if route.needs_tenant]
    nameless = {f"{route.method} {route.path}" for route in of_a_tenant if not names_things(route)}
    assert nameless == NAMELESS, "what may a body of it name? add that to THINGS"


async def test_no_other_method_shows_more(front: RealFront) -> None:
    """A method that a path does not have gets the same answer from all callers, whether or not it exists."""
    methods = {"GET", "POST", "PUT", "PATCH", "DELETE", "TRACE"}
    before = await front.stored()
    async with front.client() as client:
        for path in sorted({route.path for route in routes_of(front)}):
            routes = [route for route in routes_of(front) if route.path == path]
            for method in methods - {route.method for route in routes}:
                for reported in ("no key", "a tenant's key"):
                    headers = headers_of(CREDENTIALS[reported])
                    there = await client.request(method, path_of(routes[0], owners=True), headers=headers)
                    nowhere = await client.request(method, path_of(routes[0], owners=False), headers=headers)
                    assert there.status_code == 405, (method, path, reported)
                    assert shown(there) == shown(nowhere), (method, path, reported)
    assert await front.stored() == before


@pytest.mark.parametrize("reported", CREDENTIALS)
async def test_credentials_are_refused_as_the_table_says(front: RealFront, reported: str) -> None:
    wrong = []
    for route in routes_of(front):
        expected = refusal(route, reported)
        for method in (route.method, *(["HEAD"] if route.method == "GET" else [])):
            before = await front.stored()
            answer = await requested(front, route, CREDENTIALS[reported], owners=True, method=method)
            got = (answer.status_code, answer.json()["error"]["code"] if answer.is_error and answer.content else "")
            wanted = (expected[0], "") if expected is not None and method == "HEAD" else expected  # which has no body
            is_right = got == wanted if wanted is not None else answer.status_code not in (401, 403)
            is_explained = ("www-authenticate" in answer.headers) == (answer.status_code == 401)
            if not (is_right and is_explained):
                wrong.append(f"{method} {route.path}: {got}, not {wanted}")
            if expected is not None:
                assert await front.stored() == before
    assert wrong == []


async def test_a_refusal_says_nothing_of_what_is_there(front: RealFront) -> None:
    """Byte for byte the same whether the thing exists, and for every key without an owner."""
    for route in routes_of(front):
        for reported, credentials in CREDENTIALS.items():
            if refusal(route, reported) is not None:
                there = await requested(front, route, credentials, owners=True)
                nowhere = await requested(front, route, credentials, owners=False)
                assert shown(there) == shown(nowhere), (route.method, route.path, reported)


PAIRS: Final = {  # the owner, the caller, and the owner's things
    "another tenant's": (OWNER_KEY, ASKER_KEY, THINGS),
    "another user's": (BADGER_KEY, WOMBAT_KEY, users_things(BADGERS_ADAPTER)),
    "another user's, by its plain name": (BADGER_KEY, WOMBAT_KEY, users_things(BADGERS_OWN)),
    "a user's, of its tenant": (BADGER_KEY, key_without("admin"), users_things(BADGERS_ADAPTER)),
    "a user's, of its tenant, by its plain name": (BADGER_KEY, key_without("admin"), users_things(BADGERS_OWN)),
    "a user's, of another tenant": (BADGER_KEY, OWNER_KEY, users_things(BADGERS_ADAPTER)),
}


@pytest.mark.parametrize("pair", PAIRS)
async def test_anothers_things_are_as_if_they_did_not_exist(front: RealFront, pair: str) -> None:
    """With a good key of every scope: the same bytes as for what does not exist, and for its owner it is there."""
    owner, asker, things = PAIRS[pair]
    looked_at = set()
    for route in sorted(routes_of(front), key=is_deletion):
        if not names_things(route) or not route.needs_tenant or route.scope not in KEYS[owner].scopes:
            continue
        bearer = f"Bearer {asker}"
        before = await front.stored()
        there = await requested(front, route, bearer, owners=True, things=things)
        nowhere = await requested(front, route, bearer, owners=False, things=things)
        assert there.status_code == 404, (route.method, route.path, there.text)
        assert shown(there, things) == shown(nowhere, things), (route.method, route.path)
        assert but_for_ended_users(await front.stored(), KEYS[asker].tenant) == but_for_ended_users(
            before, KEYS[asker].tenant
        )
        owners = await requested(front, route, f"Bearer {owner}", owners=True, things=things)
        assert owners.status_code not in (401, 403), (route.method, route.path, owners.text)
        assert shown(owners, things) != shown(there, things), (route.method, route.path, "the owner must have one")
        looked_at.add(route.path)
    assert {"/v1/completions", "/v1/models/{model:path}", "/v1/adapters/{name}"} <= looked_at


async def test_answers_and_logs_show_nothing_of_others(front: RealFront, caplog: pytest.LogCaptureFixture) -> None:
    """Neither an answer nor a log line has a name, an id or a digest of another tenant's, and none has a key."""
    adapter = await front.view.resolve(OWNER, OWNERS_ADAPTER)
    assert adapter is not None
    of_the_owner = (OWNER, adapter.digest, KEYS[OWNER_KEY].key_id)
    caplog.set_level(logging.DEBUG)
    for route in routes_of(front):
        for reported, credentials in CREDENTIALS.items():
            if reported == "the operators' key" and route.scope == "operator":
                continue  # they may see everything
            for owners in (True, False):
                caplog.clear()
                answer = await requested(front, route, credentials, owners=owners)
                named = {thing.owners for field, thing in THINGS.items() if f"{{{field}" in route.path}
                lines = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in ours(caplog))
                for secret in of_the_owner:
                    assert secret not in lines or secret in named, (route.path, reported, secret)
                    assert secret not in answer.text or secret in named, (route.path, reported, secret)
                    assert secret not in str(answer.headers), (route.path, reported, secret)
                for key in (*KEYS, OPERATOR_KEY, "unknown-key"):
                    assert key not in lines + answer.text + str(answer.headers), (route.path, reported)


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Lines of motet's: those of the client and of Redis' are not in a motet's log."""
    return [record for record in caplog.records if record.name.startswith("motet")]


async def test_a_name_in_a_log_would_be_seen(front: RealFront, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    route = next(route for route in routes_of(front) if route.path == "/v1/models")
    await requested(front, route, f"Bearer {ASKER_KEY}", owners=True)
    assert KEYS[ASKER_KEY].tenant in [getattr(record, "fields", {}).get("tenant") for record in ours(caplog)]


async def test_a_route_without_a_body_looks_at_none(front: RealFront) -> None:
    """Else its spec does not say that it takes one."""
    for route in routes_of(front):
        if route.method in ("POST", "PUT", "PATCH") and route.body is None and route.form is None:
            key = OPERATOR_KEY if route.scope == "operator" else OWNER_KEY
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            async with front.client() as client:
                answer = await client.request(
                    route.method, path_of(route, owners=True), headers=headers, content=b"[no JSON"
                )
            assert "invalid_json" not in answer.text, (
                f"{route.method} {route.path} takes a body: its spec must say which"
            )


@pytest.mark.parametrize("asker", [WOMBAT_KEY, key_without("admin")])
async def test_answers_show_a_user_nothing_of_others(
    front: RealFront, caplog: pytest.LogCaptureFixture, asker: str
) -> None:
    """Whatever they ask for, neither name nor digest of another's private adapter is in an answer or a log."""
    adapter = await front.view.resolve(ASKER, BADGERS_ADAPTER, FULL_SIGHT)
    assert adapter is not None
    caplog.set_level(logging.DEBUG)
    for route in sorted(routes_of(front), key=is_deletion):
        caplog.clear()
        answer = await requested(front, route, f"Bearer {asker}", owners=False)
        lines = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in ours(caplog))
        for secret in (BADGER, BADGERS_OWN, adapter.digest):
            assert secret not in answer.text + str(answer.headers) + lines, (route.path, secret)


async def test_its_user_and_administrators_see_a_private_adapter_everywhere(front: RealFront) -> None:
    for key in (BADGER_KEY, ASKER_KEY):
        for path in ("/v1/models", "/v1/adapters"):
            async with front.client() as client:
                answer = await client.get(path, headers=headers_of(f"Bearer {key}"))
            assert BADGERS_ADAPTER in answer.text
    for route in sorted(routes_of(front), key=is_deletion):
        if names_things(route) and route.needs_tenant and route.scope != "admin":
            things = users_things(BADGERS_ADAPTER)
            nowhere = await requested(front, route, f"Bearer {ASKER_KEY}", owners=False, things=things)
            there = await requested(front, route, f"Bearer {ASKER_KEY}", owners=True, things=things)
            assert shown(there, things) != shown(nowhere, things), (route.method, route.path)


def shown(answer: httpx.Response, things: Mapping[str, Thing] = THINGS) -> Any:
    """All of an answer but for names that it repeats, and what differs anyway."""
    body = answer.content
    for thing in things.values():
        body = (
            body.replace(thing.owners.encode(), b"*").replace(thing.unowned.encode(), b"*")
            if len(thing.owners) > 1
            else body
        )
    return answer.status_code, [(name, value) for name, value in answer.headers.items() if name not in UNREPORTED], body


def test_the_table_has_every_scope() -> None:
    assert {reported for reported in CREDENTIALS if reported.startswith("a key without")} == {
        f"a key without {s}" for s in SCOPES
    }
