"""Many streaming completions at once, from one process that only counts events.

Prints one line of JSON: tokens, from the usage of the answers; events; seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from urllib.parse import urlsplit

USAGE = re.compile(rb'"completion_tokens":(\d+)')
END = b"data: [DONE]"
TAIL_BYTES = 512


class SseClient(asyncio.Protocol):
    """Sends one request and counts its events."""

    def __init__(self, request: bytes) -> None:
        self.num_events = 0
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # completion tokens
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += (self._tail[-6:] + data).count(b"data: {")
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        usage = USAGE.findall(self._tail)
        if usage and END in self._tail:
            self.finished.set_result(int(usage[-1]))
        else:
            self.finished.set_exception(ConnectionError(f"a stream broke off: {error!r}, {self._tail!r}"))


async def run(url: str, num_streams: int, num_tokens: int, steps_per_s: int) -> dict[str, float]:
    parts = urlsplit(url)
    body = json.dumps(
        {
            "model": "ready",
            "prompt": [1, 2, 3],
            "max_tokens": num_tokens,
            "seed": steps_per_s,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    request = (
        f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()
    loop = asyncio.get_running_loop()
    host, port = parts.hostname or "", parts.port or 80
    started_at = time.monotonic()
    made = [loop.create_connection(lambda: SseClient(request), host, port) for _ in range(num_streams)]
    clients = [client for _, client in await asyncio.gather(*made)]
    tokens = await asyncio.gather(*(client.finished for client in clients))
    seconds = time.monotonic() - started_at
    num_events = sum(client.num_events for client in clients) - num_streams  # the last one of each is the usage
    return {"tokens": sum(tokens), "events": num_events, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--steps-per-s", type=int, default=50)
    arguments = parser.parse_args()
    counts = asyncio.run(run(arguments.url, arguments.streams, arguments.tokens, arguments.steps_per_s))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
