"""What can be told of the private Serve without starting it."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from motet.cluster.config import ConfigError
from motet.cluster.local_serve import (
    check_port_is_free,
    free_ports,
    restore_environment,
    serve_environment,
    set_environment,
    write_haproxy_wrapper,
)

HAPROXY_CONFIG = """\
defaults
    mode http
    timeout client 10s
    timeout connect 10s
    timeout server 10s
    option splice-request
    option splice-response
frontend prometheus
    bind :18001
frontend front
    bind 127.0.0.1:18000
listen stats
  bind *:18002
  stats enable
"""


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port = {port}: cannot listen at 127\.0\.0\.1:{port}"):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)


def test_a_host_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.77"):
        check_port_is_free("192.0.2.77", free_ports(1)[0])


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


@pytest.mark.parametrize(
    ("host", "front"), [("127.0.0.1", "127.0.0.1:18000"), ("0.0.0.0", "*:18000"), ("10.1.2.3", "10.1.2.3:18000")]
)
def test_haproxy_listens_for_strangers_only_at_its_front(tmp_path: Path, host: str, front: str) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(HAPROXY_CONFIG)
    wrapper = write_haproxy_wrapper(tmp_path / "haproxy", host, 18000, (18001, 18002))
    checked = subprocess.run([wrapper, "-c", "-f", config], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    lines = [line.strip() for line in config.read_text().splitlines()]
    binds = [line.removeprefix("bind ") for line in lines if line.startswith("bind ")]
    assert binds == ["127.0.0.1:18001", front, "127.0.0.1:18002"]
    assert not any("splice" in line for line in lines)
    assert len(lines) == len(HAPROXY_CONFIG.splitlines()) - 2


def test_the_environment_is_put_back(tmp_path: Path) -> None:
    variables = serve_environment("session", tmp_path, "127.0.0.1", 18000)
    kept = dict(os.environ)
    before = set_environment(variables)
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    restore_environment(before)
    assert dict(os.environ) == kept
