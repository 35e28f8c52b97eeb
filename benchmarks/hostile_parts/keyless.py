"""Floods of one address that need no tenant's key: without a key, of a route that needs none, and with made-up keys."""

from __future__ import annotations

import argparse
import time

from motet.benchmarks.rigs.paced_flood import flooding
from motet.tests.rigs.neighbour import Neighbour, Waits
from motet.tests.rigs.running_motet import BASE, KEYS, RunningMotet

TENANT = "acme"


def keyless(motet: RunningMotet, options: argparse.Namespace) -> dict[str, float]:
    return _measured("keyless", "/v1/models", (), motet, options)


def health(motet: RunningMotet, options: argparse.Namespace) -> dict[str, float]:
    return _measured("health", "/health", (), motet, options)


def unknown_keys(motet: RunningMotet, options: argparse.Namespace) -> dict[str, float]:
    """Each request has another key."""
    return _measured("unknown_keys", "/v1/models", ("Authorization: Bearer guess-{number}",), motet, options)


def _measured(
    name: str, path: str, headers: tuple[str, ...], motet: RunningMotet, options: argparse.Namespace
) -> dict[str, float]:
    neighbour = Neighbour(motet.url, KEYS[TENANT], BASE)
    quiet, attacked = Waits(), Waits()
    answered: dict[str, int] = {}
    for _ in range(options.rounds):
        _add(quiet, neighbour.measured_for(options.seconds))
        with flooding(motet.url, path, headers, options.rate) as statuses, neighbour.measuring() as waits:
            time.sleep(options.seconds)
        _add(attacked, waits)
        for status, count in statuses.items():
            answered[status] = answered.get(status, 0) + count
    ratio = attacked.quantile_s(0.99) / quiet.quantile_s(0.99)
    print(f"{name}: quiet {quiet}")
    print(
        f"{name}: {options.rate} requests/s offered {attacked}; p99 ratio {ratio:.2f}; answers {answered}", flush=True
    )
    return {f"{name}_p99_ratio": round(ratio, 2), f"{name}_p50_ratio": _p50_ratio(attacked, quiet)}


def _p50_ratio(attacked: Waits, quiet: Waits) -> float:
    return round(attacked.quantile_s(0.5) / quiet.quantile_s(0.5), 2)


def _add(to: Waits, more: Waits) -> None:
    to.first_token_s += more.first_token_s
    to.errors += more.errors
