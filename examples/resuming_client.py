"""A client whose streams continue when its router dies, its connection breaks or a proxy restarts.

Every event of a stream has an id. When the connection is lost, the client sends the same request again, with the last
id in the header `Last-Event-ID`, and any router continues with the event that follows (docs/api.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
TRY_AGAIN = (502, 503, 504)  # the status if a proxy has no router at the moment, or a router no gang


class StreamFailedError(Exception):
    """The stream failed: it had an error event, or the status is one that another try would not change."""


def resume_stream(
    http: httpx.Client, path: str, body: dict[str, Any], *, give_up_s: float = 60
) -> Iterator[dict[str, Any]]:
    """The chunks of a stream, each once, without the closing [DONE]. `body` is the request's; this sets its `stream`.

    Tries again until nothing has come for `give_up_s`, then raises the last error: an httpx.TransportError or a
    StreamFailedError. A stream may pause while its gang is replaced, so `http` needs a read timeout longer than that.
    """
    last_id, pause_s = "", FIRST_PAUSE_S
    deadline = time.monotonic() + give_up_s
    while True:
        problem: Exception = httpx.RemoteProtocolError("the stream ended before it was complete")
        try:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
                _check(response)
                for event_id, data in _events(response):
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise StreamFailedError(chunk["error"]["message"])
                    last_id, pause_s = event_id or last_id, FIRST_PAUSE_S
                    yield chunk
                    deadline = time.monotonic() + give_up_s  # after the yield: the caller's own time does not count
        except httpx.TransportError as error:
            problem = error
        except _UnavailableError as error:
            problem = StreamFailedError(str(error))
        if time.monotonic() + pause_s > deadline:
            raise problem
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _UnavailableError(Exception):
    """No router or no gang could answer at the moment."""


def _check(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    message = f"status {response.status_code}: {response.read().decode(errors='replace')}"
    raise (_UnavailableError if response.status_code in TRY_AGAIN else StreamFailedError)(message)


def _events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """(id, data) of each complete event; the id may be empty. An event that was cut off is dropped."""
    buffer = b""
    for piece in response.iter_bytes():
        *blocks, buffer = (buffer + piece).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(": ", 1) for line in block.decode().split("\n"))
            if "data" in fields:  # else it is a comment, which says that the stream still waits
                yield fields.get("id", ""), fields["data"]
