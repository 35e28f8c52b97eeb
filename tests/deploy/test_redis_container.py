"""The Redis of `deploy/`, started as its container starts it, with the server that comes along."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from motet.cluster.launch.local_serve import free_ports
from motet.cluster.launch.redis_server import find_redis_binary
from motet.tests.rigs.kube_tools import OVERLAYS, kustomized, only
from motet.tests.rigs.patience import PATIENCE_S, eventually

PASSWORD = "a-password-of-this-test"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """The port of the server that the container's command starts, in folders of this test."""
    manifests = kustomized(OVERLAYS / "cpu-trial")
    (container,) = only(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    maps = [one for one in manifests if one["kind"] == "ConfigMap"]
    config = next(one for one in maps if one["metadata"]["name"] == "motet-redis")["data"]["redis.conf"]
    (port,) = free_ports(1)
    (tmp_path / "data").mkdir()
    (tmp_path / "redis.conf").write_text(config.replace("port 6379", f"port {port}"))
    (tmp_path / "password").write_text(PASSWORD)
    (tmp_path / "valkey-server").symlink_to(find_redis_binary())
    (script,) = container["args"]
    paths = {
        "/etc/redis/redis.conf": tmp_path / "redis.conf",
        "/etc/redis-secrets/password": tmp_path / "password",
    }
    for path, of_test in paths.items():
        assert path in script
        script = script.replace(path, str(of_test))
    (tmp_path / "redis.conf").write_text((tmp_path / "redis.conf").read_text().replace("/data", str(tmp_path / "data")))
    process = subprocess.Popen(
        [*container["command"], script],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0  # it is the server that gets the signal, and it ends in order
        process.kill()


def answers(port: int) -> bool:
    try:
        return bool(redis.Redis(port=port, password=PASSWORD).ping())
    except redis.ConnectionError:
        return False


def test_the_tests_run_on_the_server_that_it_ships(server: int) -> None:
    (container,) = only(kustomized(OVERLAYS / "cpu-trial"), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    eventually(lambda: answers(server))
    version = redis.Redis(port=server, password=PASSWORD, decode_responses=True).info("server")["valkey_version"]
    assert container["image"] == f"docker.io/valkey/valkey:{version.rpartition('.')[0]}"


def test_it_keeps_what_it_acknowledges_and_needs_the_password(server: int) -> None:
    eventually(lambda: answers(server))
    wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    found = redis.Redis(port=server, password=PASSWORD, decode_responses=True).config_get(*wanted)
    assert found == wanted
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=server).ping()


def test_no_list_of_processes_shows_the_password(server: int) -> None:
    eventually(lambda: answers(server))
    shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(b"valkey-server" in one for one in shown)
    assert not any(PASSWORD.encode() in one for one in shown)
