"""Many token streams at once over plain HTTP, each compared with an undisturbed run of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from motet.tests.rigs.running_motet import RunningMotet

ReadStream = Callable[[httpx.Client, str, Mapping[str, Any]], Iterator[Mapping[str, Any]]]


@dataclass(frozen=True)
class Job:
    tenant: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class ReceivedStream:
    """A completion as its client received it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    usage: Mapping[str, int]


class Meter:
    """Counts the tokens of all streams, and calls `at_count` once when their number is reached."""

    def __init__(self, num_tokens: int | None = None, at_count: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self._num_tokens, self._at_count = num_tokens, at_count
        self._lock = threading.Lock()

    def add(self, num_tokens: int) -> None:
        with self._lock:
            self.count += num_tokens
            is_time = self._num_tokens is not None and self.count >= self._num_tokens
            if is_time:
                self._num_tokens = None
        if is_time:
            self._at_count()


def read_stream(http: httpx.Client, path: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The chunks of one answer, which must arrive over one connection."""
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended before its end")


def stream_all(
    motet: RunningMotet, jobs: Sequence[Job], meter: Meter, read: ReadStream = read_stream
) -> list[ReceivedStream]:
    """Runs all jobs at once, each on a connection of its own."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: _received(motet, job, meter, read), jobs))


def _received(motet: RunningMotet, job: Job, meter: Meter, read: ReadStream) -> ReceivedStream:
    text, token_ids = "", list[int]()
    finish_reason: str | None = None
    usage: dict[str, int] = {}
    body = {**job.body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    with motet.http(job.tenant) as http:
        for chunk in read(http, "/v1/completions", body):
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                assert finish_reason is None, "something came after the end"
                text += choice["text"]
                token_ids += choice.get("token_ids") or []
                finish_reason = choice["finish_reason"]
                meter.add(len(choice.get("token_ids") or []))
            usage = chunk.get("usage") or usage
    return ReceivedStream(text, tuple(token_ids), finish_reason, usage)
