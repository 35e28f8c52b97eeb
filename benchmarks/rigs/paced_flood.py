"""Requests at a steady rate over kept connections, one under way on each, from a niced process of its own.

A server that does not keep up is offered no less: what finds no free connection is offered later, all at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

NUM_CONNECTIONS = 128
TICK_S = 0.005
_NICENESS = 19  # the server, not this, is to be what a neighbour waits for


@contextmanager
def flooding(url: str, path: str, headers: Sequence[str], rate: int) -> Iterator[dict[str, int]]:
    """Floods while the block runs. What is yielded is filled at its end: answers by status, and "offered".

    `headers`: lines, in which {number} is another number for each request.
    """
    statuses: dict[str, int] = {}
    command = [sys.executable, "-m", __name__, url, path, str(rate), *headers]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "flooding\n"
        yield statuses
    finally:
        said, _ = process.communicate("enough\n")
    statuses.update(json.loads(said))


class _Client(asyncio.Protocol):
    """One connection; it reconnects when the server closes it."""

    def __init__(self, flood: _Flood) -> None:
        self._flood = flood
        self._transport: asyncio.Transport | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._flood.free.append(self)

    def ask(self, request: bytes) -> None:
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if len(body) >= int(length or 0):
            self._flood.statuses[head[9:12].decode()] += 1
            self._data = b""
            self._flood.free.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._flood.free:
            self._flood.free.remove(self)
        self._flood.statuses["closed"] += 1
        self._flood.reconnect()


class _Flood:
    def __init__(self, host: str, port: int) -> None:
        self.statuses: Counter[str] = Counter()
        self.free: list[_Client] = []
        self._host, self._port = host, port
        self._tasks: set[asyncio.Task[None]] = set()

    def reconnect(self) -> None:
        task = asyncio.create_task(self._connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: _Client(self), self._host, self._port)
        except OSError:
            await asyncio.sleep(0.1)
            self.reconnect()

    async def run(self, requests: Iterator[bytes], rate: int, enough: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(NUM_CONNECTIONS):
            self.reconnect()
        began = loop.time()
        while not enough.is_set():
            due = int((loop.time() - began) * rate)
            while self.free and self.statuses["offered"] < due:
                self.statuses["offered"] += 1
                self.free.pop().ask(next(requests))
            await asyncio.sleep(TICK_S)


def _requests(path: str, headers: Sequence[str]) -> Iterator[bytes]:
    text = "".join(f"{line}\r\n" for line in (f"GET {path} HTTP/1.1", "Host: motet", *headers, ""))
    number = 0
    while True:
        number += 1
        yield text.replace("{number}", str(number)).encode()


async def _main(url: str, path: str, rate: str, *headers: str) -> None:
    os.nice(_NICENESS)
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    flood, enough = _Flood(parts.hostname, parts.port), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), enough.set)
    print("flooding", flush=True)
    await flood.run(_requests(path, headers), int(rate), enough)
    print(json.dumps(dict(flood.statuses)), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
