"""The example client against a server that breaks off, refuses and sends wrong data in every way it must handle."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from motet.examples import resuming_client
from motet.examples.resuming_client import StreamFailedError, resume_stream

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "hello"}
TEXT = "a line\u2028separator, \x85 and é: no ends of lines"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming_client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(resuming_client, "LONGEST_PAUSE_S", 0.002)


class CutOff(httpx.SyncByteStream):
    """A body whose connection breaks after this number of bytes; None: it arrives complete. Pieces are of any size."""

    def __init__(self, body: bytes, num_bytes: int | None, piece: int, *, is_clean: bool = False) -> None:
        self._body, self._num_bytes, self._piece, self._is_clean = body, num_bytes, piece, is_clean

    def __iter__(self) -> Iterator[bytes]:
        body = self._body[: self._num_bytes]
        for start in range(0, len(body), self._piece):
            yield body[start : start + self._piece]
        if self._num_bytes is not None and not self._is_clean:
            raise httpx.RemoteProtocolError("peer closed the connection")


class Server:
    """Answers with the events after the client's Last-Event-ID. `ends` says how each answer breaks off."""

    def __init__(self, num_events: int, ends: Callable[[httpx.Request, bytes], httpx.Response]) -> None:
        self.requests: list[httpx.Request] = []
        self._num_events, self._ends = num_events, ends

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reported = request.headers.get("last-event-id")
        start = 0 if reported is None else int(reported.rpartition(":")[2]) + 1
        events = [
            f"id: cmpl-x:{n}\ndata: {json.dumps({'n': n, 'text': TEXT}, ensure_ascii=False)}\n\n"
            for n in range(start, self._num_events)
        ]
        return self._ends(request, ": waiting\n\n".join([*events, "data: [DONE]\n\n"]).encode())

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self), base_url="http://router")


def numbers(chunks: Iterator[dict[str, Any]]) -> list[int]:
    found = []
    for chunk in chunks:
        assert chunk["text"] == TEXT
        found.append(chunk["n"])
    return found


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("is_clean", [False, True])
def test_cut_at_every_byte(piece: int, is_clean: bool) -> None:
    """Each event comes once, whether the connection breaks or is closed in order but without a [DONE]."""
    for num_bytes in range(0, 400, 3):
        cuts = itertools.chain([num_bytes], itertools.repeat(None))
        server = Server(
            4,
            lambda _, body, cuts=cuts: httpx.Response(200, stream=CutOff(body, next(cuts), piece, is_clean=is_clean)),  # type: ignore[misc]
        )
        assert numbers(resume_stream(server.client, PATH, BODY)) == [0, 1, 2, 3]
        assert len(server.requests) <= 2
        assert all(json.loads(request.content) == {**BODY, "stream": True} for request in server.requests)


def test_no_server_for_a_while() -> None:
    """Before the first event, and in the middle: the client sends an id only once it has one."""
    turns = iter([502, None, 10, 503, 504, 1 << 20])

    def ends(request: httpx.Request, body: bytes) -> httpx.Response:
        turn = next(turns)
        if turn is None:
            raise httpx.ConnectError("refused")
        if turn in resuming_client.TRY_AGAIN:
            return httpx.Response(turn, text="absent")
        return httpx.Response(200, stream=CutOff(body, None if turn > len(body) else 200, 50))

    server = Server(9, ends)
    assert numbers(resume_stream(server.client, PATH, BODY)) == list(range(9))
    reported = [request.headers.get("last-event-id") for request in server.requests]
    assert reported[:3] == [None] * 3
    assert len({*reported[3:]}) == 1
    assert reported[3] is not None


def test_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(resuming_client, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))

    def refuse(request: httpx.Request, body: bytes) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(httpx.ConnectError):
        next(resume_stream(Server(1, refuse).client, PATH, BODY, give_up_s=0.05))
    server = Server(1, lambda request, body: httpx.Response(503, text="no gang"))
    with pytest.raises(StreamFailedError, match="no gang"):
        next(resume_stream(server.client, PATH, BODY, give_up_s=0.05))
    assert len(server.requests) > 1 and 0.09 < now_s[0] <= 0.1


@pytest.mark.parametrize("status", [400, 401, 404, 409, 429, 500])
def test_what_another_try_would_not_change(status: int) -> None:
    server = Server(1, lambda request, body: httpx.Response(status, text="because of that"))
    with pytest.raises(StreamFailedError, match=f"status {status}: because of that"):
        next(resume_stream(server.client, PATH, BODY))
    assert len(server.requests) == 1


def test_an_error_event_ends_the_stream() -> None:
    event = b'data: {"error": {"message": "the adapter is corrupt"}}\n\n'
    server = Server(3, lambda request, body: httpx.Response(200, content=body[: body.rindex(b"data: [")] + event))
    received: list[dict[str, Any]] = []
    with pytest.raises(StreamFailedError, match="the adapter is corrupt"):
        received.extend(resume_stream(server.client, PATH, BODY))
    assert len(server.requests) == 1
