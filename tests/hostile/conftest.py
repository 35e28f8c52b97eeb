"""One running motet for all attacks, a tenant who attacks it and a neighbour who measures.

`--hostile-scale FACTOR` sets how large attacks are: 1 is what was shown to break a motet once. A smaller
factor fits into a developer's test run, and finds what breaks at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import pytest

from motet.cluster.launch.local_serve import free_ports
from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.held_loop import HeldLoop, held_until_now, measured_loop
from motet.tests.rigs.neighbour import ATTACKED_S, QUIET_S, Neighbour, hold
from motet.tests.rigs.running_motet import BASE, KEYS, RunningMotet, running_motet

HERE = Path(__file__).parent
ATTACKER, NEIGHBOUR = "globex", "acme"
RUNNING = pytest.StashKey[tuple[ExitStack, RunningMotet, HeldLoop]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the folder's motet with the folder's last test: pytest's own scopes know files and sessions only."""
    if RUNNING in item.session.stash and (nextitem is None or HERE not in nextitem.path.parents):
        stack, _, _ = item.session.stash[RUNNING]
        del item.session.stash[RUNNING]
        stack.close()


@pytest.fixture
def motet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunningMotet:
    """The same one for every test here; a test must leave it as it found it."""
    stash = request.session.stash
    if RUNNING not in stash:
        stack = ExitStack()
        data_dir = tmp_path_factory.mktemp("hostile") / "data"
        redis = RedisServer(data_dir.parent / "redis", host="127.0.0.1")  # with a password
        stack.callback(redis.stop)
        # One thread computes: two that wait for each other on busy cores would be what the neighbour measures.
        options = ["--redis-url", redis.start(), "--threads", "1"]
        options += ["--log-level", "debug", "--log-format", "json"]  # all that can be logged; see test_logs.py
        for tenant, key in KEYS.items():
            options += ["--key", f"{tenant}={key}"]  # see test_secrets.py
        motet = stack.enter_context(running_motet(data_dir, free_ports(1)[0], *options))
        stash[RUNNING] = stack, motet, held_until_now(motet)
    return stash[RUNNING][1]


@pytest.fixture
def held_before(motet: RunningMotet, request: pytest.FixtureRequest) -> HeldLoop:
    """How its router's loop had been held when it was ready."""
    return request.session.stash[RUNNING][2]


Hold = Callable[..., None]


@pytest.fixture
def holds(motet: RunningMotet, neighbour: Neighbour, request: pytest.FixtureRequest) -> Hold:
    """`hold` for this motet and neighbour: takes the attack, and at most how much longer waits become."""
    # Half of it has a hundred chats, too. A round in which one of them waited for something else is done again.
    share = 1.0 if request.config.getoption("thorough") else 0.5

    def holds(attack: Callable[[], AbstractContextManager[object]], *, at_most: float) -> None:
        loop = partial(measured_loop, motet)
        hold(neighbour, attack, loop, at_most=at_most, quiet_s=share * QUIET_S, attacked_s=share * ATTACKED_S)

    return holds


@pytest.fixture
def neighbour(motet: RunningMotet) -> Neighbour:
    """Measures, in a process of its own. See `holds`."""
    return Neighbour(motet.url, KEYS[NEIGHBOUR], BASE)


@pytest.fixture(scope="session")
def scaled(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """So much of an attack's size as `--hostile-scale` wants, and at least one."""
    scale: float = pytestconfig.getoption("hostile_scale")
    return lambda size: max(1, round(scale * size))
