"""Every request has an id at the edge, its own or a new one, and every answer of the edge has it."""

from __future__ import annotations

import http.server
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from motet.tests.cluster.test_edge import GET, NARROW, Echo, held, status_soon
from motet.tests.rigs.edge_front import edge_front, raw_answer
from motet.tests.rigs.part_configs import edge_limits


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """A front with the usual limits and a narrow one."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server, ExitStack() as stack:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        usual, narrow = (
            stack.enter_context(edge_front(tmp_path_factory.mktemp("edge"), limits, server.server_address[1]))
            for limits in (edge_limits(), NARROW)
        )
        yield usual, narrow
        server.shutdown()


@pytest.fixture
def front(fronts: tuple[int, int]) -> int:
    return fronts[0]


@pytest.fixture
def narrow(fronts: tuple[int, int]) -> int:
    return fronts[1]


GOOD_IDS = ["mine-17", "a" * 128, "1-67891233-abcdef012345678912345678", "YWJj+/8=", "a.b:c@d~e_f"]
ODD_IDS = [b"\xff", b"\x01", b"a" * 129, b"", b"a b", b'a"b', b"a\\b", b"%0a", b"a\r\nx-request-id: b", b"\xe2\x80\xa8"]


@pytest.mark.parametrize("request_id", GOOD_IDS)
def test_a_request_id_goes_in_and_comes_back(front: int, request_id: str) -> None:
    status, headers, body = raw_answer(front, GET + f"x-request-id: {request_id}\r\n\r\n".encode())
    came = {name.lower(): value for name, value in json.loads(body).items()}
    assert (status, headers["x-request-id"], came["x-request-id"]) == (200, request_id, request_id)


@pytest.mark.parametrize("request_id", ODD_IDS)
def test_an_odd_request_id_is_replaced(front: int, request_id: bytes) -> None:
    status, headers, body = raw_answer(front, GET + b"x-request-id: " + request_id + b"\r\n\r\n")
    came = {name.lower(): value for name, value in json.loads(body).items()}
    assert status == 200 and uuid.UUID(headers["x-request-id"]) == uuid.UUID(came["x-request-id"])


def test_every_answer_of_the_edge_has_the_id(front: int, narrow: int, tmp_path: Path) -> None:
    mine = b"x-request-id: mine-17\r\n"
    answers = {
        400: raw_answer(front, GET + mine + b"traceparent: \xc3\r\n\r\n"),
        431: raw_answer(front, GET + mine + b"a: " + b"x" * 20_000 + b"\r\n\r\n"),
        502: raw_answer(front, GET.replace(b"/ ", b"/502 ", 1) + mine + b"\r\n"),
    }
    with ExitStack() as stack:
        held(stack, narrow, 4, source="127.0.0.2")
        answers[429] = status_soon(narrow, GET + mine + b"\r\n", 429, "127.0.0.2")
    with edge_front(tmp_path, edge_limits(), None) as port:
        answers[503] = raw_answer(port, GET + mine + b"\r\n")
    for status, (reported, headers, _) in answers.items():
        assert (reported, headers.get("x-request-id")) == (status, "mine-17")
    one, other = (raw_answer(front, GET + b"\r\n")[1]["x-request-id"] for _ in range(2))
    assert one != other
