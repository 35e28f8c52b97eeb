"""A whole motet in processes of its own: what happens when clients disconnect, a gang dies, and motet ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import pytest

from motet.cluster.launch.janitor import SESSION_VARIABLE
from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.running_motet import ONE_THREAD

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-acme-of-the-test"
OPERATOR_KEY = "key-of-operators"
OPERATORS = {"Authorization": f"Bearer {OPERATOR_KEY}"}
VARIABLES = {"MOTET_KEYS": f"acme={KEY}", "MOTET_OPERATOR_KEY": OPERATOR_KEY}
LONG = 480  # tokens of a request that outlasts what is done to it; the demo model's context is 512
MANY = 32  # such answers at once, which take the longer


@dataclass
class Motet:
    """A running one."""

    process: subprocess.Popen[str]
    url: str
    stderr: IO[str]

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S, trust_env=False
        )

    def load(self) -> dict[str, int]:
        answer = httpx.get(f"{self.url}/status", headers=OPERATORS, timeout=PATIENCE_S, trust_env=False)
        load: dict[str, int] = answer.json()["load"]
        return load

    def session(self) -> list[psutil.Process]:
        """The processes of this motet except the embedded Redis."""
        mark = next(
            process.cmdline()[-3]
            for process in psutil.Process(self.process.pid).children()
            if "motet.cluster.launch.janitor" in process.cmdline()
        )
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(SESSION_VARIABLE) == mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def replica(self, kind: str) -> psutil.Process:
        title = f"ServeReplica:motet:{kind}"
        return next(process for process in self.session() if title in " ".join(process.cmdline()))


def request(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "base", "prompt": "What", "max_tokens": num_tokens, "ignore_eos": True, **fields}


def has_torch(process: psutil.Process) -> bool:
    """Whether it has mapped torch's library."""
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


@pytest.fixture(scope="module")
def motet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Motet]:
    folder = tmp_path_factory.mktemp("launch")
    port = free_ports(1)[0]
    command = [sys.executable, "-c", "from motet.cluster.commands.cli import main; main()", "serve"]
    command += [str(ROOT / "examples" / "demo" / "base"), "--port", str(port), "--data-dir", str(folder / "data")]
    command += ["--pool-bytes", "64MiB", "--host-bytes", "64MiB", *ONE_THREAD]
    with (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | VARIABLES
        )
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("ready ")), None)
        watchdog.cancel()
        assert line is not None, (folder / "stderr").read_text()
        try:
            yield Motet(process, line.split()[1], stderr)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
            process.stdout.close()


def test_each_step_of_the_start_was_reported(motet: Motet) -> None:
    motet.stderr.seek(0)
    lines = motet.stderr.read().splitlines()
    steps = ["starting the registry", "starting Ray", "starting Ray Serve", "starting routers and gangs"]
    steps += ["loading torch", "loading weights: 100%", "waiting for the first token"]
    reported = dict.fromkeys(line for line in lines if line in steps)  # Ray may be started again on a busy machine
    assert list(reported) == steps
    assert "starting a router" in lines


def test_only_a_gang_has_torch(motet: Motet) -> None:
    """Also after an upload and a chat."""
    folder = ROOT / "examples" / "demo" / "adapters" / "shout"
    files = {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    with motet.client as client:
        assert client.post("/v1/adapters", data={"name": "shout"}, files=files).status_code == 201
        chat = {"model": "shout", "messages": [{"role": "user", "content": "What"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert has_torch(motet.replica("gang"))
    assert not has_torch(motet.replica("router"))
    assert not has_torch(psutil.Process(motet.process.pid))


def test_a_client_that_leaves_a_stream_frees_its_pages(motet: Motet) -> None:
    with motet.client as client:
        with client.stream("POST", "/v1/completions", json=request(LONG, n=MANY, stream=True)) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
        eventually(lambda: motet.load()["num_running"] == 0)
        assert motet.load()["num_generated_tokens"] < MANY * LONG


@pytest.mark.parametrize("num_packets", [1, 2])
def test_a_client_that_leaves_before_the_answer_frees_its_pages(motet: Motet, num_packets: int) -> None:
    before = motet.load()["num_generated_tokens"]
    body = json.dumps(request(LONG, n=MANY)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: motet\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", int(motet.url.rsplit(":", 1)[1]))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if num_packets == 1:
            connection.sendall(head + body)
        else:
            connection.sendall(head)
            time.sleep(0.1)
            connection.sendall(body)
        eventually(lambda: motet.load()["num_generated_tokens"] > before)
    eventually(lambda: motet.load()["num_running"] == 0)
    assert motet.load()["num_generated_tokens"] - before < MANY * LONG


def test_a_killed_gang_is_replaced_and_its_streams_go_on(motet: Motet) -> None:
    requested = request(LONG, stream=True, stream_options={"include_usage": True})
    with motet.client as client:
        with client.stream("POST", "/v1/completions", json=requested) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            os.kill(motet.replica("gang").pid, signal.SIGKILL)
            # At once: it waits for the new gang instead of failing.
            other = client.post("/v1/completions", json=request(3))
            events = [line.removeprefix("data: ") for line in lines if line]
        assert other.status_code == 200, other.text
        assert other.json()["usage"]["completion_tokens"] == 3
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == LONG


def test_only_the_front_listens_to_strangers(motet: Motet) -> None:
    """Serve's own servers between replicas listen on all interfaces, but they need Ray's token."""
    pids = {process.pid for process in motet.session()}
    listening: list[Any] = [
        connection.laddr
        for connection in psutil.net_connections("tcp")
        if connection.pid in pids and connection.status == psutil.CONN_LISTEN
    ]
    assert any(f":{address.port}" in motet.url for address in listening)
    open_ports = [address.port for address in listening if address.ip in ("0.0.0.0", "::")]
    for port in open_ports:
        with pytest.raises(httpx.TransportError):  # they do not speak HTTP/1, as the front and the routers do
            httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)


def test_every_process_carries_the_mark(motet: Motet) -> None:
    started = psutil.Process(motet.process.pid).children(recursive=True)
    unmarked = [" ".join(process.cmdline()) for process in set(started) - set(motet.session())]
    assert len(started) > 10
    # The janitor has its mark as an argument, and Redis ends with its parent by itself.
    assert all("motet.cluster.launch.janitor" in command or "redis" in command for command in unmarked), unmarked


def test_sigterm_leaves_nothing_behind(motet: Motet) -> None:
    started = [*motet.session(), *psutil.Process(motet.process.pid).children(recursive=True)]
    assert len(started) > 5
    motet.process.send_signal(signal.SIGTERM)
    motet.process.wait(PATIENCE_S)
    psutil.wait_procs(started, timeout=PATIENCE_S)
    assert [process for process in started if process.is_running()] == []
