"""A tenant that asks for hostile forms of answers without pause, several at a time, each a new one."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from motet.tests.rigs.hostile_grammars import hostile_grammars
from motet.tests.rigs.running_motet import BASE, RunningMotet

from .beside_attack import beside_attack

TENANT = "globex"
NUM_AT_ONCE = 4
_SALTS = itertools.count()  # of forms, so that none is known from before
_MESSAGES = [{"role": "user", "content": "hello"}]


async def grammars(seconds: float) -> dict[str, float]:
    """`grammars_p99_ratio`: of a neighbour's first tokens at a `motet serve`, router and gang."""
    return await asyncio.to_thread(beside_attack, "grammars", seconds, _attack)


@contextmanager
def _attack(motet: RunningMotet) -> Iterator[Counter[str]]:
    statuses, is_over = Counter[str](), threading.Event()
    threads = [threading.Thread(target=_ask, args=(motet, statuses, is_over)) for _ in range(NUM_AT_ONCE)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _ask(motet: RunningMotet, statuses: Counter[str], is_over: threading.Event) -> None:
    with motet.http(TENANT) as client:
        for salt in _SALTS:
            for wanted in hostile_grammars(salt):
                if is_over.is_set():
                    return
                body = {"model": BASE, "messages": _MESSAGES, "max_tokens": 8}
                body["structured_outputs"] = {wanted.form: wanted.value}
                try:
                    statuses[str(client.post("/v1/chat/completions", json=body).status_code)] += 1
                except httpx.HTTPError as error:
                    statuses[type(error).__name__] += 1
