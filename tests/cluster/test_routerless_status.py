"""`motet status` while no router is up: what waits comes from the registry, the state of Serve from its REST API."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from redis import Redis

from motet.adapters.registry.launches import StartReport
from motet.adapters.registry.registry_keys import STARTS
from motet.cluster.client import client as client_module
from motet.cluster.commands.cli import main
from motet.cluster.commands.routerless_status import routerless_status
from motet.cluster.edge.error_answers import error_body
from motet.cluster.launch.redis_server import RedisServer
from motet.cluster.launch_secrets import SECRETS_FILE, LaunchSecrets
from motet.tests.rigs.patience import PATIENCE_S

NO_ROUTER = error_body(503, "not_ready", "No router can be reached now; send it again in a moment.").encode()
APPLICATIONS = {
    "motet": {
        "status": "DEPLOYING",
        "message": "",
        "deployments": {"gang": {"status": "UPDATING", "message": "one\nno node has a GPU\n"}},
    }
}


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[str | None]]]:
    """The URL of a server, and the header Authorization of each request that it got."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        url = server.start()
        with Redis.from_url(url) as client:
            now = time.time()
            for number, cluster in enumerate(("one", "two")):
                report = StartReport(
                    kind="router",
                    replica="r",
                    reason=f"it waits for the model: {cluster}",
                    has_failed=False,
                    began_at=now + number,
                    reported_at=now,
                )
                client.hset(STARTS + cluster, "r", msgspec.json.encode(report))
        yield url
    finally:
        server.stop()


def test_a_local_motet_says_what_its_starts_wait_for(tmp_path: Path, redis_url: str) -> None:
    LaunchSecrets(redis_url=redis_url).write(tmp_path / SECRETS_FILE)
    with answering(503, NO_ROUTER) as (url, _seen):
        shown = CliRunner().invoke(main, ["status", "--url", url, "--data-dir", str(tmp_path)])
    assert shown.exit_code == 1 and "No router can be reached" in shown.stderr
    assert "a router cannot start yet: it waits for the model: one\n" in shown.stdout
    assert "a router cannot start yet: it waits for the model: two\n" in shown.stdout


def test_a_front_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    LaunchSecrets(redis_url=redis_url).write(tmp_path / SECRETS_FILE)
    monkeypatch.setattr(client_module, "STATUS_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        shown = CliRunner().invoke(main, ["status", "--url", url, "--data-dir", str(tmp_path)])
    assert shown.exit_code == 1 and "it waits for the model: one" in shown.stdout


def test_a_node_of_an_application_shows_the_state_of_serve(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.delenv("MOTET_SECRETS_DIR", raising=False)
    with answering(200, msgspec.json.encode({"applications": APPLICATIONS})) as (url, seen):
        shown = routerless_status(tmp_path, {"RAY_DASHBOARD_ADDRESS": url, "RAY_AUTH_TOKEN": "t"})
    assert shown["serve"] == {"motet": "DEPLOYING", "motet, gang": "UPDATING: no node has a GPU"}
    assert [one["reason"][-3:] for one in shown["starts"]] == ["one", "two"] and seen == ["Bearer t"]
    for status, body in ((200, b"{}"), (500, b""), (200, b"[]")):
        with answering(status, body) as (url, _seen):
            state = routerless_status(tmp_path, {"RAY_DASHBOARD_ADDRESS": url})["serve"]["state"]
        assert state.startswith(f"not known, {url}")


def test_elsewhere_it_says_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "MOTET_SECRETS_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert "kubectl exec" in routerless_status(tmp_path)["registry"]
