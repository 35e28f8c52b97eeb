"""kill -9 of any process of Ray Serve in the middle of 32 streams: every token comes once, and no page is leaked.

Before the first kill: where the processes of such a motet listen.

`--kill-rounds N` kills each kind of process N times; each time another one, at another moment, from `--first-seed`.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import psutil
import pytest

from motet.cluster.launch.local_serve import free_ports
from motet.examples.demo.styles import ADAPTER_STYLES
from motet.examples.resuming_client import resume_stream
from motet.tests.rigs.listening_sockets import differences
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.running_motet import BASE, DEMO, RunningMotet, holds_nothing, running_motet, slowed
from motet.tests.rigs.token_streams import Job, Meter, ReceivedStream, read_stream, stream_all

pytestmark = pytest.mark.cluster

# In float32, where rounding decides no token.
OPTIONS = ("--gangs", "2", "--tensor-parallel", "2", "--dtype", "float32")
OWNER = {BASE: "acme", "shout": "acme", "pirate": "acme", "json": "globex", "spanish": "globex"}
NUM_STREAMS = 32
NUM_TOKENS = 200
MAX_ROUNDS = 6  # until a kill met a stream


def job(number: int) -> Job:
    """The request with this number: greedy and seeded ones in turn, over the base and all adapters."""
    model = list(OWNER)[number % len(OWNER)]
    body = {"model": model, "prompt": f"{number} capital", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    drawn = {"temperature": 1.2, "seed": number, "frequency_penalty": 0.1 * (number % 3)}
    return Job(OWNER[model], body | (drawn if number % 2 else {"temperature": 0}))


# Leaves a placement group by the name of a gang's replica, and waits until it is gone.
LEFT_BEHIND = """
import sys, time, ray
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
left = ray.util.placement_group([{"CPU": 0.001}], "STRICT_PACK", sys.argv[2] + "left", lifetime="detached")
while placement_group_table(left)["state"] != "REMOVED":
    time.sleep(0.2)
print("it is gone")
"""


JOBS = [job(number) for number in range(NUM_STREAMS)]


def come_back(http: httpx.Client, path: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return resume_stream(http, path, dict(body), give_up_s=PATIENCE_S)


Find = Callable[[RunningMotet], list[psutil.Process]]
VICTIMS: dict[str, Find] = {
    "worker": RunningMotet.worker_processes,
    "leader": RunningMotet.gang_processes,
    "controller": RunningMotet.controller_processes,
    "router": RunningMotet.router_processes,
}


@pytest.fixture(scope="module")
def motet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMotet]:
    with running_motet(tmp_path_factory.mktemp("kills") / "data", free_ports(1)[0], *OPTIONS) as motet:
        for style in ADAPTER_STYLES:
            assert motet.upload(style, DEMO / "adapters" / style, OWNER[style]).status_code == 201
        yield motet


@pytest.fixture(scope="module")
def undisturbed(motet: RunningMotet) -> list[ReceivedStream]:
    received = stream_all(motet, JOBS, Meter())
    assert all(len(one.token_ids) == NUM_TOKENS == one.usage["completion_tokens"] for one in received)
    assert len({one.token_ids for one in received}) > NUM_STREAMS // 2
    return received


def test_nothing_listens_but_what_the_page_lists(motet: RunningMotet) -> None:
    found: list[str] = []

    def is_as_listed() -> bool:
        found[:] = differences([motet.process, *motet.processes()])
        return not found

    eventually(is_as_listed, lambda: "\n".join(found))  # an HAProxy that has been replaced may still be ending


@pytest.mark.parametrize("kind", VICTIMS)
def test_streams_outlive_it(
    motet: RunningMotet, undisturbed: list[ReceivedStream], kind: str, pytestconfig: pytest.Config
) -> None:
    drawn = random.Random(f"{kind} {pytestconfig.getoption('first_seed')}")
    num_resumed = _num_resumed(motet)
    num_rounds = pytestconfig.getoption("kill_rounds")
    for _ in range(num_rounds):
        _kill_in_the_midst(motet, undisturbed, kind, drawn)
    if kind in ("worker", "leader"):
        # Clients read behind the gangs, more so on a busy machine: what they see the midst of may be over there.
        for _ in range(num_rounds, MAX_ROUNDS):
            if _num_resumed(motet) > num_resumed:
                break
            _kill_in_the_midst(motet, undisturbed, kind, drawn, is_slowed=True)
        assert _num_resumed(motet) > num_resumed, "no kill met a stream"


def _kill_in_the_midst(
    motet: RunningMotet, undisturbed: list[ReceivedStream], kind: str, drawn: random.Random, *, is_slowed: bool = False
) -> None:
    _wait_until_whole(motet, gone=set())
    gangs = _gang_ids(motet)
    victim = drawn.choice(VICTIMS[kind](motet))
    gang = drawn.choice(motet.gang_processes())
    is_killed = threading.Event()

    def kill() -> None:
        is_killed.set()
        victim.kill()
        if kind == "controller":
            # A new one replaces the gang. Of one that dies just as the new one recovers, Ray Serve keeps the placement
            # group: replacing it then takes as long as `PlacementKeeper` needs.
            gang.kill()

    meter = Meter(int(drawn.uniform(0.02, 0.8) * NUM_STREAMS * NUM_TOKENS), kill)
    # HTTP connections end with their router, and clients come back; else each stream must be one connection.
    with slowed(motet.gang_processes() if is_slowed else [], is_killed.is_set):
        received = stream_all(motet, JOBS, meter, come_back if kind == "router" else read_stream)
    eventually(lambda: not victim.is_running())
    for number, (got, expected) in enumerate(zip(received, undisturbed, strict=True)):
        assert got == expected, f"stream {number}, {JOBS[number].body}"
    _wait_until_whole(motet, gone=set() if kind == "router" else gangs)


def test_room_that_serve_has_lost_sight_of_is_freed_and_no_gang_loses_its_own(motet: RunningMotet) -> None:
    """As of a gang that dies just as a new controller recovers: its placement group stays, with no replica in it."""
    _wait_until_whole(motet, gone=set())
    gangs = _gang_ids(motet)
    raylet = next(process for process in motet.processes() if process.name() == "raylet")
    address = next(one.partition("=")[2] for one in raylet.cmdline() if one.startswith("--gcs-address="))
    command = [sys.executable, "-c", LEFT_BEHIND, address, "SERVE_REPLICA::motet#gang#"]
    ended = subprocess.run(command, env=raylet.environ(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stdout == "it is gone\n", ended.stderr
    _wait_until_whole(motet, gone=set())
    assert _gang_ids(motet) == gangs


def _wait_until_whole(motet: RunningMotet, gone: set[str]) -> None:
    """Waits for two gangs with no process of `gone` in them, in which nothing runs, waits or holds a page."""

    def is_whole() -> bool:
        try:
            status = motet.status()
        except httpx.HTTPError:
            return False  # no router yet
        loads = [gang["load"] for gang in status["gangs"]]
        return (
            len(loads) == 2
            and {gang["gang_id"] for gang in status["gangs"]} != gone
            and not any(load[key] for load in loads for key in ("num_running", "num_waiting", "num_coming_adapters"))
            and all(map(holds_nothing, loads))
        )

    eventually(is_whole)


def _gang_ids(motet: RunningMotet) -> set[str]:
    return {gang["gang_id"] for gang in motet.status()["gangs"]}


def _num_resumed(motet: RunningMotet) -> int:
    with motet.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("motet_resumed_sequences_total"))))
