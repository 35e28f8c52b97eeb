"""Fixtures that many tests share."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import redis
import torch
from redis.asyncio import Redis

from motet.adapters.registry import registry_view
from motet.adapters.registry.registry import connect
from motet.cluster.registry_server.redis_server import RedisServer
from motet.kernels.backend import Kernels
from motet.router.answers import generation_response
from motet.tests.rigs.cost_report import CostReport
from motet.tests.rigs.native_builds import BUILDS, load_build
from motet.tests.rigs.patience import PATIENCE_S

# How long an example takes says only how busy the machine is.
hypothesis.settings.register_profile("motet", deadline=None)
hypothesis.settings.load_profile("motet")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("motet")
    group.addoption("--kill-rounds", type=int, default=1, help="Kills of each kind of process in test_kills.py.")
    group.addoption("--kill-seed", type=int, default=0, help="Draws the victims and the moments.")
    group.addoption("--network-seeds", type=int, default=200, help="Runs of test_network_fuzz.py.")
    group.addoption("--first-network-seed", type=int, default=0, help="The seed of the first of them.")
    group.addoption("--hostile-scale", type=float, default=0.1, help="Size of the attacks in tests/hostile; 1: whole.")
    group.addoption("--by-file", action="store_true", help="Print what the tests of each file cost.")


def pytest_configure(config: pytest.Config) -> None:
    """In the background of a script SIGINT is ignored, and processes that tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("by_file"):
        config.pluginmanager.register(CostReport())


# Files that take long, the longest first: tests are shared out file by file, and a long one in the end would run alone.
# scripts/test --quick leaves them out.
SLOW_FILES = (
    "kernels/test_sanitizers.py",
    "router/test_network_fuzz.py",
    "workers/test_tensor_parallel.py",
    "kernels/test_triton.py",
    "workers/test_exactness.py",
    "kernels/test_native.py",
    "kernels/test_native_lora.py",
    "kernels/test_lora.py",
    "kernels/test_native_linear.py",
    "workers/test_expert_adapters.py",
    "kernels/test_attention.py",
    "kernels/test_native_experts.py",
    "kernels/test_native_sampling.py",
    "kernels/test_experts.py",
)
TESTS = Path(__file__).resolve().parent
assert all((TESTS / name).exists() for name in SLOW_FILES), "a file of SLOW_FILES has another name"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {TESTS / name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        if item.path in order:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def patient_routers() -> Iterator[None]:
    """Routers wait as long as a busy machine needs; what they do after a second, a test says that is about it."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (registry_view, "_LOOKUP_S"),
            (registry_view, "_CATCH_UP_S"),
            (generation_response, "HEADERS_AFTER_S"),
        ):
            patch.setattr(module, name, PATIENCE_S)
        yield


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real server for the whole session. Nothing on it has to survive, so no test waits for a disk."""
    with tempfile.TemporaryDirectory(prefix="motet-") as folder:  # short enough for a Unix socket
        server = RedisServer(Path(folder) / "redis")
        url = server.start()
        with redis.Redis.from_url(url) as settings:
            settings.config_set("appendfsync", "no")
        yield url
        server.stop()


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty server."""
    client = connect(redis_url, PATIENCE_S)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def native(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    """The native CPU kernels of each build in turn, and their dtype."""
    return load_build(request.param), request.param[0]
