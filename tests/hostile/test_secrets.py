"""Row A9: keys and the password of Redis are nowhere where others look, though this motet got them as arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from motet.cluster.launch_secrets import LaunchSecrets
from motet.tests.rigs.running_motet import KEYS, RunningMotet

PROXY = "ray::ProxyActor"
HOLDERS_OF_METADATA = ("gcs_server", "raylet", "ServeController", PROXY, "ray::HAProxyManager")
CHUNK_BYTES = 16 << 20


@pytest.fixture
def secrets(motet: RunningMotet) -> list[bytes]:
    launch = LaunchSecrets.read(motet.data_dir / "launch_secrets")
    password = urlsplit(launch.redis_url).password
    assert password
    return [one.encode() for one in (*KEYS.values(), password, launch.token, launch.operator_key) if one]


def found_in(content: bytes, secrets: list[bytes]) -> bool:
    return any(secret in content for secret in secrets)


def memory_of(process: psutil.Process) -> Iterator[bytes]:
    """What a process has written to, in pieces that overlap by the length of a secret."""
    with (
        Path(f"/proc/{process.pid}/maps").open() as maps,
        open(f"/proc/{process.pid}/mem", "rb", buffering=0) as memory,
    ):
        for line in maps:
            addresses, permissions, *_ = line.split()
            begin, end = (int(part, 16) for part in addresses.split("-"))
            if not permissions.startswith("rw"):
                continue
            for at in range(begin, end, CHUNK_BYTES):
                try:
                    memory.seek(at)
                    yield memory.read(min(CHUNK_BYTES + 256, end - at))
                except (OSError, ValueError):
                    break


def test_no_process_shows_a_secret_in_its_arguments(motet: RunningMotet, secrets: list[bytes]) -> None:
    assert found_in(b"serve --key acme=" + KEYS["acme"].encode(), secrets)
    for process in (motet.process, *motet.processes()):
        assert not found_in(Path(f"/proc/{process.pid}/cmdline").read_bytes(), secrets), process


def test_no_process_that_motet_starts_inherits_a_secret(motet: RunningMotet, secrets: list[bytes]) -> None:
    for process in motet.processes():
        assert not found_in(Path(f"/proc/{process.pid}/environ").read_bytes(), secrets), process


def test_ray_and_serve_never_held_a_secret(motet: RunningMotet, secrets: list[bytes]) -> None:
    """Init arguments, actors' metadata and the state of Serve are all in the memory of these processes.

    Requests go through Serve's own proxy while no router answers HAProxy's checks in time, as on a busy machine: with
    the keys that clients and operators send.
    """
    sent = {key.encode() for key in (*KEYS.values(), motet.operator_key())}
    looked_at = set()
    for process in motet.processes():
        title = " ".join(process.cmdline())
        holder = next((one for one in HOLDERS_OF_METADATA if one in title), None)
        if holder is None:
            continue
        try:
            pieces = memory_of(process)
            hidden = [one for one in secrets if holder != PROXY or one not in sent]
            assert not any(found_in(piece, hidden) for piece in pieces), title
        except PermissionError:
            pytest.skip("the kernel forbids to read other processes' memory")
        looked_at.add(holder)
    assert {"gcs_server", "raylet", "ServeController"} <= looked_at


def test_files_of_the_session_hold_no_secret(motet: RunningMotet, secrets: list[bytes]) -> None:
    environ = next(p.environ() for p in motet.processes() if "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC" in p.environ())
    session_path = Path(environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent.parent
    files = [path for path in session_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 10
    assert [path for path in files if found_in(path.read_bytes(), secrets)] == []


def test_files_with_secrets_are_their_owners_alone(motet: RunningMotet) -> None:
    for name in ("launch_secrets", "operator_key"):
        status = (motet.data_dir / name).stat()
        assert (status.st_mode & 0o777, status.st_uid) == (0o600, os.getuid())


def test_operators_routes_ask_for_their_key(motet: RunningMotet) -> None:
    """Row A8: /status and /metrics show all tenants; /health and /ready show none."""
    for path in ("/status", "/metrics", "/metrics/targets"):
        for headers in ({}, {"Authorization": f"Bearer {KEYS['acme']}"}, {"Authorization": "Bearer none"}):
            refused = httpx.get(motet.url + path, headers=headers, trust_env=False)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        shown = httpx.get(
            motet.url + path, headers={"Authorization": f"Bearer {motet.operator_key()}"}, trust_env=False
        )
        assert shown.status_code == 200
    for path in ("/health", "/ready"):
        assert httpx.get(motet.url + path, trust_env=False, timeout=60).status_code == 200
