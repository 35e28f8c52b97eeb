"""What a tenant whose answers cost a router much takes from another one there, and at the router beside it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from motet.benchmarks.rigs.bare_fleet import BASE, bare_fleet
from motet.tests.rigs.neighbour import Neighbour, Waits

ATTACKS: Final[Mapping[str, tuple[int, dict[str, Any]]]] = {  # requests at a time, and their fields
    "logprobs": (4, {"prompt": "What is", "max_tokens": 200, "ignore_eos": True, "n": 64, "logprobs": 20}),
    "prompt_logprobs": (4, {"prompt": [*range(5, 405)], "max_tokens": 1, "prompt_logprobs": 20}),
    "plain": (4, {"prompt": "What is", "max_tokens": 200, "ignore_eos": True, "n": 64}),
}


async def logprobs(seconds: float) -> dict[str, float]:
    """`logprobs_p99_ratio`: p99 at the attacked router over p99 at the one beside it. `logprobs_p50_ratio`: p50 at the
    attacked router over p50 there in quiet; `plain_p50_ratio`: the same beside as many answers without them.
    """
    return await asyncio.to_thread(_measured, seconds)


def _measured(seconds: float) -> dict[str, float]:
    figures = dict[str, float]()
    with bare_fleet(2) as urls:
        here, beside = [Neighbour(url, "key-of-globex", BASE) for url in urls]
        here.measured_for(2.0)
        for name, (num_at_once, fields) in ATTACKS.items():
            quiet = here.measured_for(seconds / 4)
            with attack(urls[0], num_at_once, fields), here.measuring() as waits, beside.measuring() as others:
                time.sleep(seconds)
            print(f"  {name}: quiet {quiet}\n    attacked {waits}\n    beside it {others}", flush=True)
            figures[f"{name}_p99_ratio"] = _ratio(waits, others, 0.99)
            figures[f"{name}_p50_ratio"] = _ratio(waits, quiet, 0.5)
    return figures


def _ratio(one: Waits, other: Waits, share: float) -> float:
    return round(one.quantile_s(share) / other.quantile_s(share), 2)


@contextmanager
def attack(url: str, num_at_once: int, fields: dict[str, Any]) -> Iterator[None]:
    """Requests of another tenant, so many at a time."""
    is_over = threading.Event()
    body = json.dumps({"model": BASE, **fields}).encode()
    headers = {"Authorization": "Bearer key-of-acme", "Content-Type": "application/json"}

    def ask() -> None:
        while not is_over.is_set():
            request = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                while answer.read(1 << 20) and not is_over.is_set():
                    pass

    askers = [threading.Thread(target=ask, daemon=True) for _ in range(num_at_once)]
    for asker in askers:
        asker.start()
    time.sleep(1.5)
    try:
        yield
    finally:
        is_over.set()
        for asker in askers:
            asker.join(60)
