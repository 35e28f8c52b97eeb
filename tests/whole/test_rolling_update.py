"""New settings for a whole motet under load: no request fails, and no stream is disturbed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.patience import eventually
from motet.tests.rigs.running_motet import BASE, DEMO, RunningMotet, running_motet
from motet.tests.rigs.token_streams import Job, Meter, ReceivedStream, stream_all

pytestmark = pytest.mark.cluster

NUM_TOKENS = 150
JOBS = [
    Job(
        "acme",
        {
            "model": ("pirate", BASE)[number % 2],
            "prompt": f"{number} capital",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 1.1,
            "seed": number,
        },
    )
    for number in range(6)
]
SETTINGS = 'pool-bytes = "{pool}"\nmax-num-sequences = {places}\nmax-upload-bytes = "{upload}"\n'


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "motet.toml"


@pytest.fixture(scope="module")
def motet(settings: Path) -> Iterator[RunningMotet]:
    settings.write_text(SETTINGS.format(pool="32MiB", places=32, upload="1GiB"))
    options = ("--gangs", "2", "--dtype", "float32", "--config", str(settings))
    with running_motet(settings.parent / "data", free_ports(1)[0], *options, pool_bytes=None) as motet:
        assert motet.upload("pirate", DEMO / "adapters" / "pirate").status_code == 201
        yield motet


class Load:
    """Clients that send request after request until the load ends. Failures are raised at the end."""

    def __init__(self, motet: RunningMotet) -> None:
        self.num_answered: Counter[str] = Counter()
        self._motet = motet
        self._over = threading.Event()

    def run(self, undisturbed: list[ReceivedStream], change: Callable[[], None]) -> None:
        """Calls `change` when every client has had an answer, and stops when each has had another one after it."""
        clients: list[Callable[[str], None]] = [self._kept_alive(pause_s) for pause_s in (0.0, 0.1, 1.0)]
        clients += [self._new_each_time, self._upload, self._upload_kept_alive, self._stream(undisturbed)]
        with ThreadPoolExecutor(len(clients)) as pool:
            running = [pool.submit(client, f"client {number}") for number, client in enumerate(clients)]
            try:
                self._wait_for_all(running, Counter())
                change()
                self._wait_for_all(running, Counter(self.num_answered))
            finally:
                self._over.set()
            for client in running:
                client.result()

    def _wait_for_all(self, running: list[Any], before: Counter[str]) -> None:
        names = [f"client {number}" for number in range(len(running))]
        eventually(lambda: any(one.done() for one in running) or all(self.num_answered[n] > before[n] for n in names))

    def _repeat(self, name: str, ask: Callable[[], None]) -> None:
        while not self._over.is_set():
            ask()
            self.num_answered[name] += 1

    def _kept_alive(self, pause_s: float) -> Callable[[str], None]:
        def client(name: str) -> None:
            def ask() -> None:
                _complete(http)
                self._over.wait(pause_s)

            with self._motet.http() as http:
                self._repeat(name, ask)

        return client

    def _new_each_time(self, name: str) -> None:
        def ask() -> None:
            with self._motet.http() as http:
                _complete(http)

        self._repeat(name, ask)

    def _upload(self, name: str) -> None:
        def ask() -> None:
            answer = self._motet.upload("another", DEMO / "adapters" / "spanish")
            assert answer.status_code in (200, 201), answer.text

        self._repeat(name, ask)

    def _upload_kept_alive(self, name: str) -> None:
        files = [DEMO / "adapters" / "json" / file for file in ("adapter_config.json", "adapter_model.safetensors")]
        form = {file.name: (file.name, file.read_bytes()) for file in files}

        def ask() -> None:
            answer = http.post("/v1/adapters", data={"name": "third"}, files=form)
            assert answer.status_code in (200, 201), answer.text

        with self._motet.http() as http:
            self._repeat(name, ask)

    def _stream(self, undisturbed: list[ReceivedStream]) -> Callable[[str], None]:
        def client(name: str) -> None:
            self._repeat(name, lambda: _check_streams(self._motet, undisturbed))

        return client


def _check_streams(motet: RunningMotet, undisturbed: list[ReceivedStream]) -> None:
    assert stream_all(motet, JOBS, Meter()) == undisturbed


def _complete(http: httpx.Client) -> None:
    body = {"model": "pirate", "prompt": "capital", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_no_request_fails_while_routers_and_gangs_are_replaced(motet: RunningMotet, settings: Path) -> None:
    undisturbed = stream_all(motet, JOBS, Meter())
    assert all(len(one.token_ids) == NUM_TOKENS for one in undisturbed)
    before = motet.status()["gangs"]
    processes = {*motet.gang_processes(), *motet.router_processes()}

    def change() -> None:
        settings.write_text(SETTINGS.format(pool="16MiB", places=16, upload="2MiB"))
        assert motet.hang_up() == "updated"

    load = Load(motet)
    started = time.monotonic()
    load.run(undisturbed, change)
    print(
        f"{sum(load.num_answered.values())} requests of {dict(load.num_answered)} in {time.monotonic() - started:.0f} s"
    )
    eventually(lambda: not any(process.is_running() for process in processes))
    eventually(lambda: len(motet.status()["gangs"]) == 2)
    after = motet.status()["gangs"]
    assert len(before) == 2
    assert {2 * gang["num_pages"] for gang in after} == {gang["num_pages"] for gang in before}
    assert not {gang["gang_id"] for gang in before} & {gang["gang_id"] for gang in after}


def test_only_what_differs_is_replaced(motet: RunningMotet, settings: Path) -> None:
    gangs, routers = motet.gang_processes(), motet.router_processes()
    settings.write_text(settings.read_text().replace("max-num-sequences = 16", "max-num-sequences = 15"))
    assert motet.hang_up() == "updated"
    eventually(lambda: not any(process.is_running() for process in gangs))
    assert motet.router_processes() == routers
    gangs = motet.gang_processes()
    settings.write_text(settings.read_text().replace("2MiB", "3MiB"))
    assert motet.hang_up() == "updated"
    eventually(lambda: not any(process.is_running() for process in routers))
    assert set(motet.gang_processes()) == set(gangs)


def test_settings_that_cannot_change_are_refused_and_all_goes_on(motet: RunningMotet, settings: Path) -> None:
    gangs = {gang["gang_id"] for gang in motet.status()["gangs"]}
    good = settings.read_text()
    for line, reason in (
        ("tensor-parallel = 2", "--tensor-parallel = 2: only a restart changes this"),
        ("max-gangs = 3", "--max-gangs = 3: at most 2 is accepted until a restart"),
        ("gang = 3", "there is no setting gang. Did you mean gangs?"),
        ('latency-objective = ["acme=2", "absent=2"]', "'absent=2': there is no tenant absent"),
        ("max-gangs =", "cannot be read"),
        ("prefix-cache = [0]", "true or false is accepted"),
        ("threads = 10000000000", "auto or a whole number from 1 to 1024 is accepted"),
        ('kv-host-bytes = "1024TiB"', "the application could not be started: gang: "),  # known only when a gang starts
    ):
        settings.write_text(f"{good}{line}\n")
        said = motet.hang_up()
        assert said.startswith("not updated: ")
        assert reason in said
    settings.write_text(good)
    assert motet.hang_up() == "updated"  # nothing has changed, so nothing is replaced
    eventually(lambda: len(motet.status()["gangs"]) == 2)
    assert gangs & {gang["gang_id"] for gang in motet.status()["gangs"]}  # Serve stops one before it starts one
    with motet.http() as http:
        _complete(http)
