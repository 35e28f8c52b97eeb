"""Floods of one address that need no tenant's key: without a key, of a route that needs none, and with made-up keys."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from motet.benchmarks.rigs.paced_flood import flooding
from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.neighbour import Neighbour, Waits
from motet.tests.rigs.running_motet import BASE, KEYS, running_motet

TENANT = "acme"
RATE = 5000  # offered requests a second
ROUNDS = 4  # of quiet and of the flood, in turn, whose waits count together


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
    quiet, attacked = Waits(), Waits()
    answered: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(prefix="motet-bench-") as folder,
        # One thread computes: two that wait for each other on busy cores would be what the neighbour measures.
        running_motet(Path(folder) / "data", free_ports(1)[0], "--threads", "1") as motet,
    ):
        neighbour = Neighbour(motet.url, KEYS[TENANT], BASE)
        for _ in range(ROUNDS):
            _add(quiet, neighbour.measured_for(seconds / ROUNDS))
            with flooding(motet.url, path, headers, RATE) as statuses, neighbour.measuring() as waits:
                time.sleep(seconds / ROUNDS)
            _add(attacked, waits)
            for status, count in statuses.items():
                answered[status] = answered.get(status, 0) + count
    print(f"  quiet {quiet}")
    print(f"  {RATE} requests/s offered: {attacked}; answers {answered}", flush=True)
    return {f"{name}_p99_ratio": _ratio(attacked, quiet, 0.99), f"{name}_p50_ratio": _ratio(attacked, quiet, 0.5)}


def _ratio(attacked: Waits, quiet: Waits, share: float) -> float:
    return round(attacked.quantile_s(share) / quiet.quantile_s(share), 2)


def _add(to: Waits, more: Waits) -> None:
    to.first_token_s += more.first_token_s
    to.errors += more.errors
