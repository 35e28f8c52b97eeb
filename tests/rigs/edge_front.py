"""HAProxy with Serve's own configuration and motet's edge in it, in front of a router that a test stands in for."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from motet.cluster.edge.edge_config import EdgeLimits
from motet.cluster.edge.haproxy import write_edge_program, write_haproxy
from motet.cluster.launch.local_serve import LOOPBACK, free_ports
from motet.tests.rigs.patience import PATIENCE_S, eventually


def write_serves_config(
    folder: Path,
    *,
    port: int,
    router_port: int | None,
    host: str = LOOPBACK,
    stats_port: int = 0,
    metrics_port: int = 0,
    others: Sequence[str] = (),
    fallback_port: int | None = None,
) -> Path:
    """HAProxy's configuration as this version of Serve writes it. `router_port`: None: there is none yet.

    `others`: prefixes of paths of other applications, which are answered by the same stand-in. `fallback_port`: that of
    Serve's own proxy; None: there is no application before its router.
    """
    ports = free_ports(2)
    config = HAProxyConfig(
        socket_path=str(folder / "a.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        nbthread=1,
        stats_port=stats_port or ports[0],
        metrics_port=metrics_port or ports[1],
        has_received_routes=True,
        has_received_servers=True,
        metrics_enabled=False,
        is_head=True,
        http_options=HTTPOptions(host=host, port=port),
    )
    backends = {}
    if router_port is not None or fallback_port is not None:
        routers = [] if router_port is None else [ServerConfig(name="router", host=LOOPBACK, port=router_port)]
        fallback = None if fallback_port is None else ServerConfig(name="proxy", host=LOOPBACK, port=fallback_port)
        for prefix in ("/", *others):
            app = prefix.strip("/") or "motet"
            backends[f"http-{app}"] = BackendConfig(
                name=f"http-{app}",
                path_prefix=prefix,
                app_name=app,
                servers=routers,
                fallback_server=fallback,
                http_health_check_path=None,
            )
    path = folder / "haproxy.cfg"
    HAProxyApi(config, backends, str(path))._generate_config_file_internal()
    # No checks: a stand-in may answer one request only, and it is there.
    path.write_text(path.read_text().replace("option httpchk GET /-/healthz", "").replace(" check", ""))
    path.write_text(path.read_text().replace("    http-check expect status 200\n", ""))
    return path


@contextmanager
def edge_front(
    folder: Path,
    limits: EdgeLimits | None,
    router_port: int | None,
    variables: Mapping[str, str] | None = None,
    others: Sequence[str] = (),
    fallback_port: int | None = None,
) -> Iterator[int]:
    """The port of a front with these limits. None: the program of an image, with these variables."""
    port, stats_port, metrics_port = free_ports(3)
    config = write_serves_config(
        folder,
        port=port,
        router_port=router_port,
        stats_port=stats_port,
        metrics_port=metrics_port,
        others=others,
        fallback_port=fallback_port,
    )
    program = folder / "haproxy"
    haproxy = write_edge_program(program) if limits is None else write_haproxy(program, limits, LOOPBACK)
    log = folder / "haproxy.log"
    environment = os.environ | (variables or {})
    with (
        log.open("w") as stderr,
        subprocess.Popen([haproxy, "-db", "-f", config], stderr=stderr, env=environment) as process,
    ):
        try:

            def is_up() -> bool:
                assert process.poll() is None, log.read_text()
                return listens(port)

            eventually(is_up)
            yield port
        finally:
            process.kill()


def listens(port: int) -> bool:
    """Whether a server takes connections there."""
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S):
        return True
    return False


def raw_answer(port: int, request: bytes, *, source: str = LOOPBACK) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to these bytes; status 0 if the connection is closed without one."""
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S, source_address=(source, 0)) as connection:
        with suppress(ConnectionError):  # what is refused early may be refused before it is read
            connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        except (http.client.HTTPException, ConnectionError):
            return 0, {}, b""


def error_of(answer: tuple[int, dict[str, str], bytes]) -> dict[str, Any]:
    """The error in an answer; fails unless it has OpenAI's shape."""
    status, headers, body = answer
    assert headers.get("content-type", "").startswith("application/json"), (status, headers, body)
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"] and error["code"] and error["type"].endswith("_error"), error
    return error
