"""Clients that close their side once they have sent their request, through a real HAProxy; and clients that leave."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from motet.cluster.edge.edge_config import ABORT, SUFFIX, second_backend, second_backends
from motet.tests.rigs.edge_front import edge_front
from motet.tests.rigs.part_configs import edge_limits
from motet.tests.rigs.patience import PATIENCE_S, eventually

KEY = "Authorization: Bearer mole\r\n"


class SlowServer:
    """Answers a request to /whole after a second, and one to /stream bit by bit; says what became of each.

    `num_parts`: of an answer; each takes a twentieth of a second.
    """

    def __init__(self) -> None:
        self.num_parts = 20
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.ends: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            is_stream = connection.recv(1 << 16).startswith(b"POST /stream")
            try:
                if is_stream:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                for _ in range(self.num_parts):
                    connection.settimeout(0.05)
                    with suppress(TimeoutError):
                        if not connection.recv(1):
                            self.ends.append("left")
                            return
                    if is_stream:
                        connection.sendall(b"token ")
                if not is_stream:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole")
                self.ends.append("answered")
            except OSError:
                self.ends.append("left")


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[SlowServer, int]]:
    server = SlowServer()
    with edge_front(tmp_path, edge_limits(), server.port) as port:
        yield server, port
    server.close()


@pytest.mark.parametrize(("path", "expected"), [("/whole", b"whole"), ("/stream", b"token " * 20)])
def test_a_half_closed_client_gets_its_answer(slow: tuple[SlowServer, int], path: str, expected: bytes) -> None:
    """As `nc -N` is, and libraries for HTTP/1.0."""
    server, port = slow
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(f"POST {path} HTTP/1.0\r\n{KEY}Content-Length: 2\r\n\r\n{{}}".encode())
        client.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.endswith(b"\r\n\r\n" + expected)
    eventually(lambda: server.ends == ["answered"])


@pytest.mark.parametrize(("path", "version"), [("/whole", "1.1"), ("/stream", "1.1"), ("/stream", "1.0")])
def test_a_client_that_has_left_costs_no_answer(slow: tuple[SlowServer, int], path: str, version: str) -> None:
    """Half-closed or not: in HTTP/1.0 that shows when the next part of a stream is written."""
    server, port = slow
    server.num_parts = 20 * int(PATIENCE_S)  # it learns in time that the client has left, however long that takes
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(f"POST {path} HTTP/{version}\r\nHost: motet\r\n{KEY}Content-Length: 2\r\n\r\n{{}}".encode())
        time.sleep(0.2)
    eventually(lambda: server.ends == ["left"])


def test_servers_are_checked_once_and_count_in_both_backends() -> None:
    """Of what Serve writes for a backend whose routers are checked, with one that is there if all others are gone."""
    body = [
        "    http-reuse always",
        "    option httpchk GET /-/healthz",
        "    http-check expect status 200",
        "    default-server fastinter 250ms check",
        "    server a 10.0.0.1:1 check observe layer4 error-limit 2 on-error mark-down",
        "    server fallback 10.0.0.2:2 check backup",
    ]
    assert second_backends(["http-motet", "default", f"default{SUFFIX}"]) == ["http-motet"]
    assert second_backend("http-motet", body) == [
        f"backend http-motet{SUFFIX}",
        f"    no {ABORT}",
        "    http-reuse always",
        "    server a 10.0.0.1:1 track http-motet/a",
        "    server fallback 10.0.0.2:2 track http-motet/fallback backup",
    ]
