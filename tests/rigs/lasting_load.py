"""Clients that ask again and again while something is done to the servers; answers must be as undisturbed ones.

They are threads that the test hands over, because connections must begin where the test's network is.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from motet.tests.rigs.patience import PATIENCE_S, eventually

Ask = Callable[[httpx.Client], None]
REST_S = 1.0  # of a client between two requests: what is done to the servers needs the processor, too


@dataclass(frozen=True)
class Received:
    """A stream as its client received it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_tokens: int


class LastingLoad:
    """One client for each ask: it repeats the request, over a new connection each time, until the load ends."""

    def __init__(self, clients: ThreadPoolExecutor, url: Callable[[], str], key: str, asks: Sequence[Ask]) -> None:
        """`url`: called before each connection. `clients` must have a thread for each ask."""
        self._clients, self._url, self._key, self._asks = clients, url, key, asks
        self._num_answered: Counter[int] = Counter()
        self._over = threading.Event()
        self._running: list[Future[None]] = []

    def __enter__(self) -> LastingLoad:
        self._running = [self._clients.submit(self._repeat, number) for number in range(len(self._asks))]
        self.wait_for_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._running:  # its own failure says more than later ones
            client.result()

    def wait_for_all(self) -> None:
        """Returns when each client has had a whole answer to a request that it sent from now on."""
        before = Counter(self._num_answered)
        numbers = range(len(self._asks))

        def have_all() -> bool:
            return all(self._num_answered[number] >= before[number] + 2 for number in numbers)

        eventually(lambda: have_all() or any(client.done() for client in self._running))
        for client in self._running:
            if client.done():
                client.result()

    def _repeat(self, number: int) -> None:
        while not self._over.is_set():
            with client_of(self._url(), self._key) as http:
                self._asks[number](http)
            self._num_answered[number] += 1
            self._over.wait(REST_S)


def client_of(url: str, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False)


def stream(http: httpx.Client, body: Mapping[str, Any], on_event: Callable[[], None] = lambda: None) -> Received:
    """The whole answer to a streamed completion, which must come over one connection. `on_event`: called for each."""
    fields = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    text, token_ids, finish_reason, num_tokens, has_ended = "", list[int](), None, 0, False
    with http.stream("POST", "/v1/completions", json=fields) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                has_ended = True
            elif line.startswith("data: "):
                on_event()
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    text += choice["text"]
                    token_ids += choice.get("token_ids") or []
                    finish_reason = choice["finish_reason"] or finish_reason
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    assert has_ended, "the stream ended before its end"
    return Received(text, tuple(token_ids), finish_reason, num_tokens)


def same_stream(body: Mapping[str, Any], undisturbed: Received) -> Ask:
    """A client that streams and must receive what it receives without a disturbance."""

    def ask(http: httpx.Client) -> None:
        assert stream(http, body) == undisturbed

    return ask
