"""Rows A1 and A7 against a whole motet: connections that never become requests, and bytes that Serve stumbles over."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from motet.tests.rigs.edge_front import error_of, raw_answer
from motet.tests.rigs.running_motet import BASE, KEYS, RunningMotet

GET = b"GET /v1/models HTTP/1.1\r\nHost: motet\r\n"
NUM_CONNECTIONS = 4300  # a tenth of them would not have filled what there was


def port_of(motet: RunningMotet) -> int:
    port = urlsplit(motet.url).port
    assert port is not None
    return port


@contextmanager
def unfinished(port: int, count: int, source: str) -> Iterator[None]:
    """So many connections that have sent half a header, as far as they are let in."""
    with ExitStack() as stack:
        for _ in range(count):
            with suppress(OSError):
                one = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0))
                stack.callback(one.close)
                one.sendall(GET)
        yield


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"])  # the neighbour asks from the second
def test_unfinished_headers_cost_a_neighbour_nothing(
    motet: RunningMotet, holds: Callable[..., None], source: str
) -> None:
    holds(lambda: unfinished(port_of(motet), NUM_CONNECTIONS, source), at_most=1.5)


def test_unfinished_bodies_cost_a_neighbour_nothing(
    motet: RunningMotet, holds: Callable[..., None], scaled: Callable[[int], int]
) -> None:
    @contextmanager
    def stalled() -> Iterator[None]:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS['globex']}\r\n"
        with ExitStack() as stack:
            for _ in range(scaled(1000)):
                with suppress(OSError):
                    one = socket.create_connection(("127.0.0.1", port_of(motet)), 5, ("127.0.0.2", 0))
                    stack.callback(one.close)
                    one.sendall(head.encode() + b'Content-Length: 100\r\n\r\n{"model"')
            yield

    holds(stalled, at_most=1.5)


CONTROL = (
    b"serve_multiplexed_model_id: ",
    b"serve-multiplexed-model-id: ",
    b"x-session-id: ",
    b"x-request-timeout-seconds: ",
    b"x-request-disconnect-disabled: ",
    b"x-serve-router-x: ",
)


@pytest.mark.parametrize("key", ["", f"Authorization: Bearer {KEYS['globex']}\r\n"])
@pytest.mark.parametrize("value", [b"\xff", b"\xc3\x28", b"0.0001", b"?1", b"nan", b"-1", b""])
def test_control_headers_change_no_answer(motet: RunningMotet, key: str, value: bytes) -> None:
    expected = raw_answer(port_of(motet), GET + key.encode() + b"\r\n")
    assert expected[0] == (200 if key else 401)
    for header in CONTROL:
        answer = raw_answer(port_of(motet), GET + key.encode() + header + value + b"\r\n\r\n")
        assert (answer[0], answer[2]) == (expected[0], expected[2])


def test_a_timeout_of_serve_does_not_end_a_generation(motet: RunningMotet) -> None:
    body = json.dumps({"model": BASE, "prompt": "capital", "max_tokens": 50, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS['globex']}\r\n"
    head += f"x-request-timeout-seconds: 0.001\r\nContent-Length: {len(body)}\r\n\r\n"
    status, _, answer = raw_answer(port_of(motet), head.encode() + body)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 50


@pytest.mark.parametrize("header", [b"traceparent: \xff", b"authorization: \xff", b"a: " + b"x" * 20_000])
def test_no_header_gives_a_500_or_html(motet: RunningMotet, header: bytes) -> None:
    answer = raw_answer(port_of(motet), GET + header + b"\r\n\r\n")
    assert 400 <= answer[0] < 500
    error_of(answer)


def test_a_request_id_comes_back(motet: RunningMotet) -> None:
    status, headers, _ = raw_answer(port_of(motet), GET + b"x-request-id: mine-17\r\n\r\n")
    assert status == 401 and headers["x-request-id"] == "mine-17"
