"""A motet started as a user would start it, for tests that drive it from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from openai import OpenAI

from motet.tests.rigs.operators import answered, with_operator_key
from motet.tests.rigs.patience import PATIENCE_S, eventually

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
BASE = "motet-demo"
ONE_THREAD = ("--threads", "1")  # of a gang alone: on so small a model a second one only spins, on a core of its own
KEYS = {"acme": "key-of-acme", "globex": "key-of-globex"}


@dataclass(frozen=True)
class RunningMotet:
    url: str
    data_dir: Path
    process: psutil.Process
    stdout: IO[str]  # after "ready"

    def openai(self, tenant: str = "acme") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEYS[tenant], max_retries=0, timeout=PATIENCE_S)

    def http(self, tenant: str = "acme") -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        hooks = {"request": [with_operator_key(self.operator_key())]}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, trust_env=False, event_hooks=hooks)

    def operator_key(self) -> str:
        return (self.data_dir / "operator_key").read_text().strip()

    def upload(self, name: str, folder: Path, tenant: str = "acme") -> httpx.Response:
        config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        with self.http(tenant) as http, config.open("rb") as config_file, tensors.open("rb") as tensors_file:
            files = {config.name: (config.name, config_file), tensors.name: (tensors.name, tensors_file)}
            return http.post("/v1/adapters", data={"name": name}, files=files)

    def status(self) -> dict[str, Any]:
        with self.http() as http:
            found: dict[str, Any] = answered(http, "/status").json()
        return found

    def hang_up(self) -> str:
        """Has it read its file of settings again; what it says when that is done, or "" if it says nothing in time."""
        self.process.send_signal(signal.SIGHUP)
        watchdog = threading.Timer(PATIENCE_S, self.process.kill)  # which ends the line
        watchdog.start()
        try:
            return self.stdout.readline().rstrip("\n")
        finally:
            watchdog.cancel()

    def gang_processes(self) -> list[psutil.Process]:
        """Processes of leaders; a gang of one worker has no others."""
        return self._titled("ServeReplica:motet:gang")

    def worker_processes(self) -> list[psutil.Process]:
        """Processes of workers, of gangs of several."""
        return self._titled("WorkerActor")

    def router_processes(self) -> list[psutil.Process]:
        return self._titled("ServeReplica:motet:router")

    def controller_processes(self) -> list[psutil.Process]:
        return self._titled("ServeController")

    def redis_process(self) -> psutil.Process:
        (found,) = [p for p in self.processes() if "redis" in _executable(p) or "valkey" in _executable(p)]
        return found

    def processes(self) -> list[psutil.Process]:
        return self.process.children(recursive=True)

    def _titled(self, part: str) -> list[psutil.Process]:
        return [process for process in self.processes() if part in _title(process)]


@contextmanager
def running_motet(
    data_dir: Path, port: int, *options: str, pool_bytes: str | None = "32MiB", base: Path = DEMO / "base"
) -> Iterator[RunningMotet]:
    """`motet serve` of `base`, ready; ended by Ctrl-C, after which none of its processes may be left."""
    command = [str(Path(sys.executable).parent / "motet"), "serve", str(base), "--name", BASE]
    command += ["--port", str(port), "--data-dir", str(data_dir), *options]
    command += [] if pool_bytes is None else ["--pool-bytes", pool_bytes]
    environ = os.environ | {"MOTET_KEYS": " ".join(f"{tenant}={key}" for tenant, key in KEYS.items())}
    log_path = data_dir.parent / f"{data_dir.name}.log"
    with log_path.open("w") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=environ
        )
    watchdog = threading.Timer(PATIENCE_S, server.kill)
    watchdog.start()
    try:
        assert server.stdout is not None
        ready = next((line for line in server.stdout if line.startswith("ready ")), None)
        watchdog.cancel()
        assert ready == f"ready http://127.0.0.1:{port}\n", log_path.read_text()
        motet = RunningMotet(ready.split()[1], data_dir, psutil.Process(server.pid), server.stdout)
        yield motet
        processes = motet.processes()
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(timeout=PATIENCE_S) in (0, 130)
        _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert not left, "Ctrl-C left processes behind"
    finally:
        watchdog.cancel()
        if server.poll() is None:
            server.kill()
            server.wait()
        if server.stdout is not None:
            server.stdout.close()


@contextmanager
def slowed(gangs: Sequence[psutil.Process], is_over: Callable[[], bool]) -> Iterator[None]:
    """Gangs compute a tenth of the time until it is over: clients see tokens before the last ones, on any machine."""
    is_left = threading.Event()

    def alternate() -> None:
        while not is_over() and not is_left.wait(0.02):
            for each in (psutil.Process.suspend, psutil.Process.resume):
                for gang in gangs:
                    with suppress(psutil.NoSuchProcess):  # it was killed
                        each(gang)
                if each is psutil.Process.suspend:
                    is_left.wait(0.18)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        is_left.set()
        thread.join()


def holds_nothing(load: dict[str, Any]) -> bool:
    """Whether a gang's status says that only pages of kept adapters and kept prefixes are taken.

    Pages that are on their way to host memory are held until they are there, and routers learn of that a beat later: so
    after sequences have ended this comes true soon, not at once.
    """
    num_kept = load["num_adapter_pages"] + load["num_idle_prefix_pages"]
    return bool(load["num_free_pages"] + num_kept == load["num_pages"])


def wait_until_nothing_is_held(motet: RunningMotet) -> None:
    """Fails, with the load, if pages are still held when all copies must long be made: they have leaked."""
    load: dict[str, Any] = {}

    def is_free() -> bool:
        load.update(motet.status()["load"])
        return holds_nothing(load)

    eventually(is_free, lambda: f"pages are held: {load}")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _executable(process: psutil.Process) -> str:
    try:
        return Path(process.exe()).name
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
