"""Requests without a known key at a real HAProxy: what answers them, how much passes, and what is counted."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from motet.cluster.commands.cli import main
from motet.cluster.edge.edge_config import OPEN_ROUTES, RATE_S, front_lines
from motet.cluster.edge.edge_watch import EdgeWatch, parsed
from motet.cluster.edge.error_answers import REASONS, TABLE
from motet.router.text.text import TextService
from motet.tests.cluster.test_edge import GET, KEYLESS, NARROW, Echo, get, status_soon
from motet.tests.rigs.all_routes import rig_with_all_routes
from motet.tests.rigs.edge_front import edge_front, error_of, raw_answer
from motet.tests.rigs.part_configs import edge_limits
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import text_service

SLOW = edge_limits(max_keyless_per_second=1)
OTHER = "127.0.0.3"  # another address


def with_key(path: str, key: str) -> bytes:
    return get(path, f"Authorization: Bearer {key}\r\n".encode())


@pytest.fixture(scope="module")
def router_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def front(router_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with edge_front(tmp_path_factory.mktemp("edge"), edge_limits(), router_port, others=["/other"]) as port:
        yield port


@pytest.fixture
def slow(router_port: int, tmp_path: Path) -> Iterator[int]:
    """Lets one request a second pass."""
    with edge_front(tmp_path, SLOW, router_port) as port:
        yield port


@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer  ", "Basic bW9sZTo=", "mole", "Bearer a b", "Bearera"])
def test_what_has_no_key_is_answered_by_the_edge(front: int, value: str | None) -> None:
    header = b"" if value is None else f"Authorization: {value}\r\n".encode()
    for path in ("/", "/v1/models", "/metrics", "/anything", "/healthy"):  # the stand-in would answer 200
        answer = raw_answer(front, get(path, header))
        assert (answer[0], answer[1]["www-authenticate"]) == (401, "Bearer")
        assert error_of(answer)["code"] == "invalid_api_key"


def test_an_upload_without_a_key_says_which_one_it_wants(front: int, tmp_path: Path) -> None:
    """However much of it was on its way."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(64 << 20))
    arguments = ["adapters", "upload", "poet", str(tmp_path)]
    failed = CliRunner().invoke(main, arguments, env={"MOTET_URL": f"http://127.0.0.1:{front}", "MOTET_API_KEY": None})
    assert failed.exit_code == 1
    assert "set MOTET_API_KEY, or use --key or --key-file" in failed.stderr


@pytest.mark.parametrize("path", [*OPEN_ROUTES, "/health/", "/ready?a=b", "/other", "/other/v1", "/-/routes"])
def test_open_routes_and_other_applications_need_no_key(front: int, path: str) -> None:
    assert raw_answer(front, get(path))[0] == 200


def test_routes_that_need_no_key_are_open_at_the_edge(tmp_path: Path) -> None:
    text: TextService = text_service()
    routes = rig_with_all_routes(tmp_path, text).app.state.routes
    assert {route.path for route in routes if route.scope == "public"} == set(OPEN_ROUTES)


def test_a_browser_may_ask_without_a_key_what_it_may_send(slow: int) -> None:
    """A preflight is the routers' to answer, and as bounded as their open routes. Other OPTIONS are not."""
    asks = KEYLESS.replace(b"GET", b"OPTIONS") + b"Origin: https://a.example\r\n"
    preflight = asks + b"Access-Control-Request-Method: POST\r\n\r\n"
    assert raw_answer(slow, asks + b"\r\n")[0] == 401
    assert raw_answer(slow, KEYLESS + b"Origin: a\r\nAccess-Control-Request-Method: POST\r\n\r\n")[0] == 401
    assert raw_answer(slow, preflight)[0] == 200
    assert status_soon(slow, preflight, 429)[0] == 429


def test_half_sent_bodies_without_a_key_take_no_place_of_those_with_one(router_port: int, tmp_path: Path) -> None:
    head = KEYLESS.replace(b"GET", b"POST") + b"Content-Length: 100\r\n\r\n{"
    with edge_front(tmp_path, NARROW, router_port) as port, ExitStack() as stack:
        for _ in range(20):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            one.sendall(head)
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        assert raw_answer(port, GET + b"\r\n")[0] == 200


@pytest.mark.parametrize("path", ["/", "/health"])
def test_a_flood_of_one_address_costs_only_what_is_like_it(slow: int, path: str) -> None:
    few = 200 if path == "/health" else 401
    statuses = [raw_answer(slow, get(path))[0] for _ in range(2 * RATE_S)]
    assert statuses[:RATE_S] == [few] * RATE_S  # so many pass at once
    assert status_soon(slow, get(path), 429)[0] == 429
    assert raw_answer(slow, GET + b"\r\n")[0] == 200
    assert raw_answer(slow, get("/ready" if path == "/" else "/"))[0] == (200 if path == "/" else 401)
    assert raw_answer(slow, get(path), source=OTHER)[0] == few


@pytest.mark.parametrize("path", ["/401", "/404"])
def test_a_flood_of_unknown_keys_costs_no_known_one(slow: int, path: str) -> None:
    """Unknown are those that no router has accepted: the stand-in does not know them at this path."""
    assert raw_answer(slow, with_key("/", "mole"))[0] == 200
    for number in range(2):
        raw_answer(slow, with_key(path, f"guess-{number}"))
    answer = status_soon(slow, with_key(path, "guess"), 429)
    assert answer[0] == 429 and "known key" in error_of(answer)["message"]
    assert raw_answer(slow, with_key("/", "mole"))[0] == 200
    assert raw_answer(slow, with_key(path, "mole"))[0] == int(path[1:])
    assert raw_answer(slow, with_key(path, "guess"), source=OTHER)[0] == int(path[1:])


def test_a_key_that_was_deleted_is_an_unknown_one(slow: int) -> None:
    assert raw_answer(slow, with_key("/", "mole"))[0] == 200
    assert raw_answer(slow, with_key("/401", "mole"))[0] == 401
    assert status_soon(slow, with_key("/401", "mole"), 429)[0] == 429


def test_a_tenant_that_requests_what_is_not_there_uses_up_nothing(slow: int) -> None:
    assert raw_answer(slow, with_key("/", "mole"))[0] == 200
    for _ in range(2 * RATE_S):
        assert raw_answer(slow, with_key("/404", "mole"))[0] == 404
    assert raw_answer(slow, with_key("/", "a-new-one"))[0] == 200


def test_behind_a_trusted_proxy_each_client_has_a_rate_of_its_own(router_port: int, tmp_path: Path) -> None:
    limits = edge_limits(max_keyless_per_second=1, trusted_proxies="127.0.0.0/8")
    with edge_front(tmp_path, limits, router_port) as port:
        for _ in range(2 * RATE_S):
            raw_answer(port, get("/health", b"X-Forwarded-For: 9.9.9.9, 1.2.3.4\r\n"))
        assert status_soon(port, get("/health", b"X-Forwarded-For: 1.2.3.4\r\n"), 429)[0] == 429
        assert raw_answer(port, get("/health", b"X-Forwarded-For: 1.2.3.5\r\n"))[0] == 200
        for _ in range(2 * RATE_S):
            assert raw_answer(port, get("/health"))[0] == 200  # the proxy itself asks whether motet lives


def test_rates_can_be_unbounded() -> None:
    bounded, unbounded = (front_lines(edge_limits(max_keyless_per_second=most), 64, ()) for most in (50, 0))
    assert any("str(rate)" in line for line in bounded)
    assert not any("str(rate)" in line for line in unbounded)


@pytest.mark.parametrize("request_bytes", [b"GARBAGE\r\n\r\n", KEYLESS + b"Transfer-Encoding: gzip, chunked\r\n\r\n"])
def test_what_is_no_request_is_reported_in_json(front: int, request_bytes: bytes) -> None:
    answer = raw_answer(front, request_bytes)
    assert 400 <= answer[0] < 500
    error_of(answer)


def test_an_options_request_for_the_server_is_answered(front: int) -> None:
    status, headers, body = raw_answer(front, b"OPTIONS * HTTP/1.1\r\nHost: motet\r\n\r\n")
    assert (status, body) == (204, b"") and "POST" in headers["allow"]


async def test_refusals_are_counted_and_one_of_them_is_logged(
    router_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with edge_front(tmp_path, SLOW, router_port) as port, caplog.at_level(logging.INFO):
        first, watch, other = (EdgeWatch(str(tmp_path / "a.sock")) for _ in range(3))
        await first.read()
        before = first.refused["http"]  # the check whether it listens has sent nothing
        assert first.refused == dict.fromkeys(REASONS, 0) | {"http": before}
        await first.stop()
        caplog.clear()
        for _ in range(3):
            assert raw_answer(port, get("/", b"x-request-id: mine-17\r\n"))[0] == 401
        raw_answer(port, KEYLESS + b"traceparent: \xc3\r\n\r\n")
        raw_answer(port, b"GARBAGE\r\n\r\n")
        await watch.read()
        assert (watch.refused["keyless"], watch.refused["headers"]) == (3, 1)
        assert watch.refused["http"] > before
        (line,) = [record.getMessage() for record in caplog.records]
        assert "keyless 3" in line and "headers 1" in line and "127.0.0.1" in line
        for _ in range(2 * RATE_S):
            raw_answer(port, get("/"))
        await watch.read()
        assert watch.refused["rate"] > 0 and watch.refused["keyless"] > 3
        assert len(caplog.records) == 1  # no line for each

        await other.read()
        assert not other.refused  # one router of a node has them
        await watch.stop()
        await other.read()
        assert other.refused["keyless"] > 3 and not watch.refused
        await other.stop()


async def test_a_haproxy_that_cannot_be_queried_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = EdgeWatch(str(tmp_path / "a.sock"))
    for _ in range(2):
        await watch.read()
    assert not watch.refused and len(caplog.records) == 1
    await watch.stop()
    with pytest.raises(ValueError, match="Unknown command"):
        parsed("Unknown command: 'show table'")


async def test_an_answer_that_is_cut_off_ends_no_watch(tmp_path: Path) -> None:
    """A HAProxy that another one takes over from may end within its answer."""
    answer = f"# table: {TABLE}, type: string\n\n# pxname,svname,ereq,dcon\nhttp_frontend,FRONTEND,3,4\n\n"
    assert parsed(answer)[0]["http"] == 3
    for end in range(len(answer) - len("\n\n")):
        with suppress(ValueError):
            parsed(answer[:end])
