"""Floods of one address that need no tenant's key: without a key, of a route that needs none, and with made-up keys."""

from __future__ import annotations

import asyncio

from motet.benchmarks.rigs.paced_flood import flooding

from .beside_attack import beside_attack

RATE = 5000  # offered requests a second


async def keyless(seconds: float) -> dict[str, float]:
    """`keyless_p99_ratio`: of a neighbour's first tokens at a `motet serve`, while requests come without a key."""
    return await asyncio.to_thread(_measured, "keyless", "/v1/models", (), seconds)


async def health(seconds: float) -> dict[str, float]:
    return await asyncio.to_thread(_measured, "health", "/health", (), seconds)


async def unknown_keys(seconds: float) -> dict[str, float]:
    """Each request has another key."""
    headers = ("Authorization: Bearer guess-{number}",)
    return await asyncio.to_thread(_measured, "unknown_keys", "/v1/models", headers, seconds)


def _measured(name: str, path: str, headers: tuple[str, ...], seconds: float) -> dict[str, float]:
    return beside_attack(name, seconds, lambda motet: flooding(motet.url, path, headers, RATE))
