"""The edge with a real HAProxy and Serve's own template, in front of a stand-in for a router."""

from __future__ import annotations

import http.client
import http.server
import json
import re
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from ray.serve._private import constants

from motet.cluster.edge.edge_config import CONTROL_HEADERS, HEADERS_TIMEOUT_S, OPEN_ROUTES
from motet.router.http.access_log import REQUEST_ID_HEADER
from motet.tests.rigs.edge_front import edge_front, error_of, raw_answer
from motet.tests.rigs.part_configs import edge_limits
from motet.tests.rigs.patience import PATIENCE_S

KEYLESS = b"GET / HTTP/1.1\r\nHost: motet\r\n"
GET = KEYLESS + b"Authorization: Bearer mole\r\n"


def get(path: str, headers: bytes = b"") -> bytes:
    """A request without a key."""
    return KEYLESS.replace(b"/ ", path.encode() + b" ", 1) + headers + b"\r\n"


NARROW = edge_limits(max_connections=64, max_connections_per_source=4, max_requests_per_key=2)


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the headers that have come; /held begins and does not end, /N answers N in plain text."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/held":
            self.send_response(200)
            self.end_headers()
            with suppress(ConnectionError):
                self.connection.recv(1)
            self.close_connection = True
            return
        is_error = self.path[1:].isdigit()
        body = b"no JSON" if is_error else json.dumps(dict(self.headers)).encode()
        self.send_response(int(self.path[1:]) if is_error else 200)
        self.send_header("Content-Type", "text/plain" if is_error else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # HAProxy hangs up on what it does not pass on
            self.wfile.write(body)

    do_OPTIONS = do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def router_port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def front(router_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with edge_front(tmp_path_factory.mktemp("edge"), edge_limits(), router_port) as port:
        yield port


@pytest.fixture(scope="module")
def narrow(router_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with edge_front(tmp_path_factory.mktemp("edge"), NARROW, router_port) as port:
        yield port


def held(stack: ExitStack, port: int, count: int, *, headers: bytes = b"", source: str = "127.0.0.1") -> None:
    """That many requests are under way until the stack ends, and have passed the edge, where others could overtake.

    Each has a key of its own, unless `headers` have one.
    """
    for number in range(count):
        has_key = re.search(rb"authorization|x-api-key", headers.lower()) is not None
        key = b"" if has_key else b"Authorization: Bearer lion-%d\r\n" % number
        one = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S, source_address=(source, 0))
        stack.callback(one.close)
        one.sendall(b"GET /held HTTP/1.1\r\nHost: motet\r\n" + headers + key + b"\r\n")
        # Else a later request may overtake it, be counted in its place, and it is the one that is refused.
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def status_soon(port: int, request: bytes, wanted: int, source: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
    """The answer once it has this status, which may take a moment after others have begun or ended."""
    deadline = time.monotonic() + PATIENCE_S / 10
    while (answer := raw_answer(port, request, source=source))[0] != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return answer


def test_headers_and_small_bodies_come_in_time_or_not_at_all(front: int) -> None:
    unfinished = (GET, GET.replace(b"GET", b"POST") + b"Content-Length: 100\r\n\r\n{")
    began = time.monotonic()
    with ExitStack() as stack:
        connections = []
        for request in (*unfinished, GET):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", front), timeout=PATIENCE_S))
            one.sendall(request)
            connections.append(one)
        dripping = connections[-1]
        dripping.settimeout(0.5)  # a drop now and then prolongs nothing
        refusal = b""
        with suppress(ConnectionError):
            while not refusal and time.monotonic() - began < PATIENCE_S:
                dripping.sendall(b"a: b\r\n")
                with suppress(TimeoutError):
                    refusal = dripping.recv(1 << 16)
        for answer in (refusal, *(one.recv(1 << 16) for one in connections[:-1])):
            assert b" 408 " in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "timeout_error"
    assert time.monotonic() - began > HEADERS_TIMEOUT_S / 2


def test_control_headers_do_not_come_in(front: int) -> None:
    sent = {
        "serve_multiplexed_model_id": "a",
        "Serve-Multiplexed_Model-Id": "a",
        "X-Session-Id": "a",
        "x_session_id": "a",
        "X-Serve-Router-Target": "a",
        "X-Request-Timeout-Seconds": "0.001",
        "X-Request-Disconnect-Disabled": "?1",
        "X-Forwarded-For": "1.2.3.4",
        "X-Forwarded-Proto": "javascript",
        "Forwarded": "for=1.2.3.4",
    }
    kept = {"X-Request-Id": "mine-17", "Authorization": "Bearer key", "Last-Event-Id": "cmpl-1:17"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**sent, **kept}.items())
    status, _, body = raw_answer(front, KEYLESS + lines.encode() + b"\r\n")
    assert status == 200
    came = {name.lower(): value for name, value in json.loads(body).items()}
    assert came == {name.lower(): value for name, value in kept.items()} | {"host": "motet", "connection": "close"}


def test_every_header_that_serve_reads_is_known() -> None:
    """A version of Ray that listens to another one fails here."""
    names = {
        value.lower()
        for name, value in vars(constants).items()
        if isinstance(value, str) and re.search(r"HEADER|MULTIPLEXED_MODEL_ID$|SESSION_ID$", name)
    } - {"request_headers", ""}
    assert len(names) >= 6
    control = re.compile("|".join(CONTROL_HEADERS))
    unknown = {one for one in names if not control.fullmatch(f"{one}x" if one.endswith("-") else one)}
    assert unknown == {REQUEST_ID_HEADER}  # which the edge makes harmless


@pytest.mark.parametrize(
    "header",
    [
        b"authorization: Bearer \xa0key",
        b"authorization: Bearer a\r\nauthorization: Bearer b",
        b"x-api-key: \xa0key",
        b"x-api-key: a\r\nx-api-key: b",
        b"traceparent: \xc3",
        b"tracestate: \xff",
    ],
)
def test_odd_bytes_are_a_400(front: int, header: bytes) -> None:
    answer = raw_answer(front, KEYLESS + header + b"\r\n\r\n")
    assert answer[0] == 400
    assert error_of(answer)["code"] == "invalid_header"


@pytest.mark.parametrize("num_bytes", [17_000, 20_000, 30_000])
def test_long_headers_are_reported_in_json(front: int, num_bytes: int) -> None:
    answer = raw_answer(front, GET + b"a: " + b"x" * num_bytes + b"\r\n\r\n")
    assert answer[0] == 431
    assert error_of(answer)["code"] == "headers_too_large"
    assert raw_answer(front, GET + b"a: " + b"x" * 14_000 + b"\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        GET + b"b\xe4d: 1\r\n\r\n",
        GET + b"a b: 1\r\n\r\n",
        GET + b"a: \x00\r\n\r\n",
        GET + b"Content-Length: x\r\n\r\n",
        GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        GET + b"a: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ],
)
def test_what_is_no_http_is_reported_in_json(front: int, request_bytes: bytes) -> None:
    answer = raw_answer(front, request_bytes)
    assert answer[0] == 400
    error_of(answer)


@pytest.mark.parametrize("status", [400, 404, 413, 500, 502, 503, 504])
def test_errors_of_serve_keep_their_status_and_get_a_shape(front: int, status: int) -> None:
    answer = raw_answer(front, GET.replace(b"/ ", b"/%d " % status, 1) + b"\r\n")
    assert answer[0] == status
    error_of(answer)


def test_without_a_router_it_is_a_503(tmp_path: Path) -> None:
    with edge_front(tmp_path, edge_limits(), None) as port:
        answer = raw_answer(port, GET + b"\r\n")
        assert answer[0] == 503 and answer[1]["retry-after"] == "1"
        assert error_of(answer)["code"] == "no_router"


def test_a_router_that_is_gone_is_a_503(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        router_port = taken.getsockname()[1]
    with edge_front(tmp_path, edge_limits(), router_port) as port:
        answer = raw_answer(port, GET + b"\r\n")
        assert answer[0] == 503
        error_of(answer)


@pytest.mark.parametrize("has_router", [False, True])
def test_it_is_ready_once_a_router_itself_is_reached(tmp_path: Path, router_port: int, has_router: bool) -> None:
    """Before, Serve's own proxy answers: a moment later clients' keys would be in its memory (test_secrets.py)."""
    with edge_front(tmp_path, edge_limits(), router_port if has_router else None, fallback_port=router_port) as port:
        assert raw_answer(port, GET + b"\r\n")[0] == 200
        answer = raw_answer(port, get("/ready"))
        for path in ("/ready/", "/health", "/status", "/metrics", "/metrics/targets", "/v1/models", "/v1/models/a"):
            with_key = GET.replace(b"/ ", path.encode() + b" ", 1) + b"\r\n"
            assert raw_answer(port, with_key)[0] == answer[0], path
        post = GET.replace(b"GET", b"POST")
        # Serve's proxy would hold all of it before a router has seen its key.
        long = raw_answer(port, post + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000)
        chunked = raw_answer(port, post + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert long[0] == chunked[0] == answer[0]
        assert raw_answer(port, post + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000)[0] == 200
    assert answer[0] == (200 if has_router else 503)
    assert has_router or error_of(answer)["code"] == "not_ready"


def test_other_applications_are_left_as_they_are(tmp_path: Path, router_port: int) -> None:
    with edge_front(tmp_path, edge_limits(), None, fallback_port=router_port, others=["/other"]) as port:
        assert raw_answer(port, get("/ready"))[0] == 503
        post = GET.replace(b"GET /", b"POST /other/x")
        assert raw_answer(port, post + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000)[0] == 200


def test_requests_of_a_source_are_bounded(narrow: int) -> None:
    with ExitStack() as stack:
        held(stack, narrow, 4, source="127.0.0.2")
        answer = status_soon(narrow, GET + b"\r\n", 429, "127.0.0.2")
        assert answer[0] == 429 and answer[1]["retry-after"] == "1"
        assert error_of(answer)["code"] == "too_many_requests"
        for path in OPEN_ROUTES:
            assert raw_answer(narrow, get(path), source="127.0.0.2")[0] == 200
        assert raw_answer(narrow, GET + b"\r\n", source="127.0.0.3")[0] == 200
    assert status_soon(narrow, GET + b"\r\n", 200, "127.0.0.2")[0] == 200


def test_requests_of_a_key_are_bounded_however_it_is_written(narrow: int) -> None:
    with ExitStack() as stack:
        held(stack, narrow, 1, headers=b"Authorization: Bearer acme\r\n", source="127.0.0.4")
        held(stack, narrow, 1, headers=b"authorization:   bearer   acme  \r\n", source="127.0.0.5")
        answer = status_soon(narrow, KEYLESS + b"AUTHORIZATION: BEARER  acme\r\n\r\n", 429, "127.0.0.6")
        assert answer[0] == 429
        assert "key" in error_of(answer)["message"]
        assert raw_answer(narrow, KEYLESS + b"Authorization: Bearer globex\r\n\r\n", source="127.0.0.6")[0] == 200


def test_a_key_in_the_header_of_anthropics_clients(narrow: int) -> None:
    """It is the same key to all that counts, and to the router; in both headers, the one of Authorization."""
    with ExitStack() as stack:
        held(stack, narrow, 1, headers=b"Authorization: Bearer ant\r\n", source="127.0.0.7")
        held(stack, narrow, 1, headers=b"x-api-key: ant\r\n", source="127.0.0.8")
        answer = status_soon(narrow, KEYLESS + b"X-API-Key:  ant \r\n\r\n", 429, "127.0.0.9")
        assert "key" in error_of(answer)["message"]
        basic_ant, basic_bee = (
            b"Authorization: Basic " + b64encode(b"trl:" + key) + b"\r\n" for key in (b"ant", b"bee")
        )
        assert raw_answer(narrow, KEYLESS + basic_ant + b"\r\n", source="127.0.0.9")[0] == 429  # whatever the user
        for headers, key in (
            (b"x-api-key: bee\r\n", "bee"),
            (basic_bee, "bee"),
            (b"x-api-key: ant\r\nauthorization: Bearer bee\r\n", "bee"),
        ):
            status, _, body = raw_answer(narrow, KEYLESS + headers + b"\r\n", source="127.0.0.9")
            came = {name.lower(): value for name, value in json.loads(body).items()}
            assert status == 200 and came["authorization"] == f"Bearer {key}" and "x-api-key" not in came
    for no_key in (b"x-api-key:\r\n", b"x-api-key: a b\r\n", b"x-api-key: a\r\nauthorization: Basic b\r\n"):
        assert raw_answer(narrow, KEYLESS + no_key + b"\r\n", source="127.0.0.10")[0] == 401
    for browsers in (b"Origin: null\r\n", b"Sec-Fetch-Site: cross-site\r\n"):
        answer = raw_answer(narrow, KEYLESS + basic_bee + browsers + b"\r\n", source="127.0.0.10")
        assert (answer[0], answer[1]["www-authenticate"]) == (401, "Bearer") and "browser" in error_of(answer)[
            "message"
        ]


def test_the_program_of_an_image_has_the_limits_of_its_environment(router_port: int, tmp_path: Path) -> None:
    variables = {"MOTET_MAX_REQUESTS_PER_KEY": "1", "MOTET_TRUSTED_PROXIES": ""}
    with edge_front(tmp_path, None, router_port, variables) as port, ExitStack() as stack:
        held(stack, port, 1, headers=b"Authorization: Bearer acme\r\n")
        answer = status_soon(port, KEYLESS + b"Authorization: Bearer acme\r\n\r\n", 429)
        assert answer[0] == 429 and "More than 1 requests" in error_of(answer)["message"]
        assert raw_answer(port, KEYLESS + b"Authorization: Bearer globex\r\n\r\n")[0] == 200


def test_unfinished_connections_of_one_source_leave_half_of_the_front(narrow: int) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            with suppress(ConnectionError):
                one = socket.create_connection(("127.0.0.1", narrow), PATIENCE_S, ("127.0.0.7", 0))
                stack.callback(one.close)
                one.sendall(GET)
        for number in range(8, 12):
            assert raw_answer(narrow, GET + b"\r\n", source=f"127.0.0.{number}")[0] == 200


FORWARDED_WITH_PORTS = {  # 1.2.3.4 is at its bound, and so is fd00:1::/64
    b"1.2.3.4:5678": 429,
    b"9.9.9.9:1, 1.2.3.4:5678": 429,
    b"9.9.9.9:1,1.2.3.4:5678 ": 429,
    b"1.2.3.4, 9.9.9.9:1": 200,
    b"1.2.3.5:5678": 200,
    b"fd00:1::4": 429,
    b"[fd00:1::4]": 429,
    b"[fd00:1::4]:5678": 429,
    b"1.2.3.4, [fd00:2::4]:5678": 200,
    b"[fd00:2::1234]:5678": 200,
}


def test_behind_a_trusted_proxy_the_address_is_the_forwarded_one(router_port: int, tmp_path: Path) -> None:
    limits = edge_limits(max_connections_per_source=2, trusted_proxies="127.0.0.0/8,10.0.0.0/8")
    with edge_front(tmp_path, limits, router_port) as port, ExitStack() as stack:
        held(stack, port, 2, headers=b"X-Forwarded-For: 9.9.9.9, 1.2.3.4\r\n")
        held(stack, port, 2, headers=b"X-Forwarded-For: [fd00:1::3]:99\r\n")
        assert status_soon(port, GET + b"X-Forwarded-For: 1.2.3.4\r\n\r\n", 429)[0] == 429
        assert raw_answer(port, GET + b"X-Forwarded-For: 1.2.3.5\r\n\r\n")[0] == 200
        for forwarded, status in FORWARDED_WITH_PORTS.items():
            assert raw_answer(port, GET + b"X-Forwarded-For: %b\r\n\r\n" % forwarded)[0] == status, forwarded
        assert raw_answer(port, GET + b"\r\n")[0] == 200  # the proxy itself asks whether motet lives


def test_bounds_can_be_taken_away(router_port: int, tmp_path: Path) -> None:
    limits = edge_limits(max_connections_per_source=0, max_requests_per_key=0)
    with edge_front(tmp_path, limits, router_port) as port, ExitStack() as stack:
        held(stack, port, 20, headers=b"Authorization: Bearer acme\r\n")
        assert raw_answer(port, KEYLESS + b"Authorization: Bearer acme\r\n\r\n")[0] == 200


class OneAnswerServer:
    """Answers the first request on each connection, and closes it when another one comes: as a router does that closes
    its idle connections just when HAProxy uses one."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
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
        with connection, suppress(ConnectionError):  # HAProxy may end it in any way
            if connection.recv(1 << 16):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                connection.recv(1 << 16)


def test_a_client_does_not_notice_that_a_router_closes_its_idle_connections(tmp_path: Path) -> None:
    server = OneAnswerServer()
    with edge_front(tmp_path, edge_limits(), server.port) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        client.connect()
        kept = client.sock
        for _ in range(4):
            client.request("POST", "/", b"x" * 100, {"Authorization": "Bearer mole"})
            assert client.getresponse().read() == b"ok"
        assert client.sock is kept  # the client's own connection is kept alive
        client.close()
    server.close()
