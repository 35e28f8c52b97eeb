"""Nodes of a Ray cluster that tests start with `ray start`, and a `motet serve --address` that joins it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO

import psutil

from motet.cluster.edge.serve_variables import PATIENT_STARTS
from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.patience import PATIENCE_S, eventually

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
BIN = Path(sys.executable).parent
KEY = "key-of-acme"
OPERATOR_KEY = "key-of-operators"
NUM_START_ATTEMPTS = 3  # of a node: Ray gives up after times of its own that a busy machine may need

Wrap = Callable[[int, Sequence[str]], list[str]]  # (number of a node, command) -> what runs the command there


class RayNodes:
    """Nodes by number; the head is 0. All their processes are ended when the context ends."""

    def __init__(
        self,
        addresses: Sequence[str],
        wrap: Wrap = lambda _, command: list(command),
        head_variables: Mapping[str, str] = MappingProxyType({}),
        /,
        **variables: str,
    ) -> None:
        """`variables` are in the environment of every process of the nodes, `head_variables` in those of the head."""
        self._addresses, self._wrap, self._variables = addresses, wrap, variables
        self._head_variables = head_variables
        self._folder = tempfile.TemporaryDirectory(prefix="mt", dir="/tmp", ignore_cleanup_errors=True)  # short
        self.path = Path(self._folder.name)
        self._mark = secrets.token_hex(8)
        self._token = secrets.token_hex(32)
        self._port = free_ports(1)[0]
        self._started: list[subprocess.Popen[bytes]] = []
        self._num_heads = 0

    @property
    def address(self) -> str:
        return f"{self._addresses[0]}:{self._port}"

    def environment(self, number: int) -> dict[str, str]:
        """The environment of all processes of one node, which has a folder of its own for HAProxy."""
        haproxy_path = self.path / f"haproxy{number}"
        haproxy_path.mkdir(exist_ok=True)
        ports = free_ports(4)
        return {
            **os.environ,
            "MOTET_KEYS": f"acme={KEY}",
            "MOTET_OPERATOR_KEY": OPERATOR_KEY,
            **PATIENT_STARTS,
            **self._variables,
            **(self._head_variables if number == 0 else {}),
            "MOTET_TEST": self._mark,
            "MOTET_TEST_NODE": str(number),
            "SPT_NOENV": "1",  # or process titles are written over the mark
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy_path / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy_path / "a.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy_path / "m.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy_path),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy_path / "server-state"),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[0]),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[3]),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    @property
    def token(self) -> str:
        """What Ray's own servers ask for."""
        return self._token

    def start(self, number: int, *, num_cpus: float = 2, dashboard_port: int | None = None, **resources: float) -> None:
        """Returns when the node is up. `dashboard_port`: of the head's dashboard; None: it has none.

        A head that was killed may be started anew. It has a new folder then, as a pod has.
        """
        ports = free_ports(2)
        command = [str(BIN / "ray"), "start", "--block", f"--node-ip-address={self._addresses[number]}"]
        command += [
            f"--num-cpus={num_cpus:g}",
            f"--resources={json.dumps(resources)}",
            f"--object-store-memory={100 << 20}",
        ]
        command += [f"--dashboard-agent-listen-port={ports[0]}"]
        if number == 0:
            self._num_heads += 1
            command += ["--head", f"--port={self._port}", f"--temp-dir={self.path}/r{self._num_heads}"]
            command += [f"--include-dashboard={dashboard_port is not None}".lower()]
            if dashboard_port is not None:
                command += [f"--dashboard-host={self._addresses[0]}", f"--dashboard-port={dashboard_port}"]
            command += [f"--ray-client-server-port={ports[1]}"]
            if "REDIS_PASSWORD" in self._head_variables:  # as KubeRay hands it over
                command += [f"--redis-password={self._head_variables['REDIS_PASSWORD']}"]
        else:
            command += [f"--address={self.address}"]
        log_path = self.path / f"node{number}.log"
        for _ in range(NUM_START_ATTEMPTS):
            with log_path.open("wb") as log:
                process = self.popen(number, command, log)
            self._started.append(process)
            eventually(partial(_has_started_or_ended, process, log_path), log_path.read_text)
            if _is_up(log_path):
                return
            self.kill(number)
        raise AssertionError(log_path.read_text())

    def popen(self, number: int, command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts a command on a node."""
        return subprocess.Popen(
            self._wrap(number, command),
            env=self.environment(number),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    @contextmanager
    def motet(self, *options: str, data_dir: str = "data") -> Iterator[str]:
        """The URL of a `motet serve --address` on the head node, of the demo model; ended by Ctrl-C."""
        log_path = self.path / "motet.log"
        with log_path.open("wb") as log:
            process = self.popen(0, self.serve_command(*options, data_dir=data_dir), log)
        try:
            eventually(lambda: _ready_lines(log_path) or process.poll() is not None, log_path.read_text)
            ready = _ready_lines(log_path)
            assert ready, log_path.read_text()
            yield ready[0].split()[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) in (0, 130), log_path.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def serve_command(self, *options: str, data_dir: str = "data") -> list[str]:
        command = [str(BIN / "motet"), "serve", str(DEMO / "base"), "--address", self.address]
        return [*command, "--data-dir", str(self.path / data_dir), "--pool-bytes", "32MiB", *options]

    def output(self, number: int, command: Sequence[str]) -> tuple[int, str]:
        """Exit status and output of a command that ends by itself."""
        log_path = self.path / "command.log"
        with log_path.open("wb") as log:
            process = self.popen(number, command, log)
            try:
                return process.wait(PATIENCE_S), log_path.read_text()
            finally:
                process.kill()
                process.wait()

    def processes(self) -> list[psutil.Process]:
        """All processes of the nodes."""
        return self._processes_with(MOTET_TEST=self._mark)

    def processes_of(self, number: int) -> list[psutil.Process]:
        """All processes of one node."""
        return self._processes_with(MOTET_TEST=self._mark, MOTET_TEST_NODE=str(number))

    def kill(self, number: int) -> None:
        """All processes of one node at once, as when its machine fails."""
        _kill(lambda: self.processes_of(number))

    def _processes_with(self, **variables: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if variables.items() <= process.environ().items():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        _kill(self.processes)
        for started in self._started:
            started.wait()
        self._folder.cleanup()


def _kill(find: Callable[[], list[psutil.Process]]) -> None:
    for _attempt in range(5):  # what is killed may have started something meanwhile
        left = find()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(left, timeout=5)
        if not left:
            break


def _has_started_or_ended(process: subprocess.Popen[bytes], log_path: Path) -> bool:
    return _is_up(log_path) or process.poll() is not None


def _is_up(log_path: Path) -> bool:
    return b"Ray runtime started" in log_path.read_bytes()


def _ready_lines(log_path: Path) -> list[str]:
    return [line for line in log_path.read_text().splitlines() if line.startswith("ready ")]
