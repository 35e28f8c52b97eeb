"""Clients that are tenants, except where motet asks for the operators' key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx

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
