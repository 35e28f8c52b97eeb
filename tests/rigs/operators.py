"""Clients that are tenants, except where motet asks for the operators' key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx

from motet.tests.rigs.patience import eventually

PATHS = ("/status", "/metrics", "/metrics/targets")


def with_operator_key(key: str) -> Callable[[httpx.Request], None]:
    """An event hook of a client: it gives this key for the operators' routes."""

    def give(request: httpx.Request) -> None:
        if request.url.path in PATHS:
            request.headers["Authorization"] = f"Bearer {key}"

    return give


def with_operator_key_in_loop(key: str) -> Callable[[httpx.Request], Awaitable[None]]:
    """The same for a client of an event loop."""
    give = with_operator_key(key)

    async def give_in_loop(request: httpx.Request) -> None:
        give(request)

    return give_in_loop


def answered(http: httpx.Client, path: str) -> httpx.Response:
    """A good answer to a GET, once a router is up: until then the front answers with a 503."""
    answers: list[httpx.Response] = []

    def has_answer() -> bool:
        answers.append(http.get(path))
        return answers[-1].status_code != 503

    eventually(has_answer)
    return answers[-1].raise_for_status()
