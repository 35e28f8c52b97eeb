"""Scaling by the load in a whole motet: 0, 1, 2 and again 0 gangs, and no request fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.patience import eventually
from motet.tests.rigs.running_motet import BASE, RunningMotet, running_motet

pytestmark = pytest.mark.cluster

OPTIONS = (
    *("--min-gangs", "0", "--max-gangs", "2", "--scaling-window", "1.5"),
    *("--max-num-sequences", "4", "--queued-tokens-per-gang", "600"),
)
# A gang goes only while the test wants it to, so that none can go between two of its steps on a slow machine.
PATIENT = "scale-to-zero-after = 3600.0\nscale-down-after = 3600.0\n"
IMPATIENT = "scale-to-zero-after = 4.0\nscale-down-after = 3.0\n"
NUM_CLIENTS = 8
PROMPT = "What is the capital of France? " * 20


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "motet.toml"


@pytest.fixture(scope="module")
def motet(settings: Path) -> Iterator[RunningMotet]:
    settings.write_text(PATIENT)
    with running_motet(settings.parent / "data", free_ports(1)[0], *OPTIONS, "--config", str(settings)) as motet:
        yield motet


def num_gangs(motet: RunningMotet) -> int:
    return len(motet.status()["gangs"])


def ask(motet: RunningMotet, num_tokens: int, n: int = 1) -> None:
    with motet.http() as http:
        fields = {"model": BASE, "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "n": n}
        answer = http.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == n * num_tokens


def goes_to_zero(motet: RunningMotet, settings: Path) -> None:
    """While /ready is polled, as a cluster does, and answers that it is."""

    def is_at_zero() -> bool:
        with motet.http() as http:
            assert http.get("/ready").status_code == 200
        return num_gangs(motet) == 0

    settings.write_text(IMPATIENT)
    assert motet.hang_up() == "updated"
    eventually(is_at_zero)
    eventually(lambda: not motet.gang_processes())
    assert motet.status()["load"] is None


def test_gangs_come_and_go_with_the_load(motet: RunningMotet, settings: Path) -> None:
    assert num_gangs(motet) == 1  # it starts with one, to prove that the model can be served
    goes_to_zero(motet, settings)

    settings.write_text(PATIENT)
    assert motet.hang_up() == "updated"
    assert num_gangs(motet) == 0  # new settings bring none back
    with ThreadPoolExecutor(3) as pool:  # all wait for the same start
        list(pool.map(lambda _: ask(motet, 4), range(3)))
    assert num_gangs(motet) == 1

    over = threading.Event()
    answered: list[int] = []

    def keep_asking(_: int) -> None:
        while not over.is_set():
            ask(motet, 150, n=2)  # four times a gang's places in all, so that slow clients keep them taken too
            answered.append(num_gangs(motet))

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(keep_asking, number) for number in range(NUM_CLIENTS)]
        try:
            eventually(lambda: num_gangs(motet) == 2 or any(client.done() for client in clients))
            num_before = len(answered)
            eventually(lambda: len(answered) >= num_before + NUM_CLIENTS or any(client.done() for client in clients))
        finally:
            over.set()
        for client in clients:
            client.result()
    assert max(answered) == 2  # never more than the maximum

    goes_to_zero(motet, settings)
    time.sleep(3.0)  # two windows, in which the last request is remembered: a slow machine sees less, and never fails
    assert num_gangs(motet) == 0
    assert not motet.gang_processes()
