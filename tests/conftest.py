"""Fixtures that many tests share."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import redis
from redis.asyncio import Redis

from motet.adapters.format import targets
from motet.adapters.registry import registry_view
from motet.adapters.registry.batches.batch_registry import BatchRegistry
from motet.adapters.registry.batches.file_registry import FileRegistry
from motet.adapters.registry.launches import Lease
from motet.adapters.registry.ledger.ledger import Ledger
from motet.adapters.registry.name_records import NameRecords
from motet.adapters.registry.redis_deadline import answered_within
from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.store import Store
from motet.cluster.launch.redis_server import RedisServer
from motet.router import openapi_document as document
from motet.router.bodies import body_reader
from motet.router.grammars import grammar_check
from motet.router.openai import generation_response
from motet.tests.rigs.cost_report import CostReport
from motet.tests.rigs.described_routes import described_routes
from motet.tests.rigs.imports import ROOT
from motet.tests.rigs.moving_seed import commit_seed
from motet.tests.rigs.passed_files import covered_files
from motet.tests.rigs.passing_runs import PassingRuns
from motet.tests.rigs.patience import PATIENCE_S
from motet.workers import device_probe

# Torch reads it when it is loaded. Of so small tensors a second thread computes nothing faster, and spins in between.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What asks Redis, and raises an error if it does not answer in time.
ASKS_REDIS: tuple[Callable[..., object], ...] = (
    connect,
    inspect.unwrap(answered_within),
    BatchRegistry.__init__,
    FileRegistry.__init__,
    Lease.__init__,
    Ledger.__init__,
    NameRecords.__init__,
    Registry.__init__,
    Store.__init__,
)

# Of tests with the mark `each_kind`: the variants of tests/rigs/oracle.py that have them without --thorough, and the
# fixtures that are made of a variant.
KINDS = (
    *("llama", "gemma3", "olmo3", "cohere2", "starcoder2", "apertus", "gemma4", "gemma4_dense"),
    *("qwen2_moe", "gpt_oss", "glm4_moe", "llama4", "gemma4_moe", "hunyuan_moe", "deepseek_v3", "mistral4"),
    *("qwen3_5", "qwen3_next", "lfm2_bias", "falcon_h1_biases", "granite_hybrid_moe", "nemotron_h_moe"),
)
_OF_A_VARIANT = ("bench", "case", "stock")

_OWN_SETTINGS = "_hypothesis_internal_use_settings"  # of a test of hypothesis, which has no other way to its settings
# How long an example takes says only how busy the machine is.
hypothesis.settings.register_profile("motet", deadline=None)
hypothesis.settings.load_profile("motet")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("motet")
    group.addoption("--thorough", action="store_true", help="Attacks and draws at full scale.")
    group.addoption("--first-seed", type=int, help="Where tests that draw begin; otherwise it follows from the commit.")
    group.addoption(
        "--redis-server", type=os.path.abspath, help="The Redis that tests share; otherwise the one that motet starts."
    )
    group.addoption("--kill-rounds", type=int, default=1, help="Kills of each kind of process in test_kills.py.")
    group.addoption("--network-seeds", type=int, help="Runs of test_network_fuzz.py: 40, or 400 with --thorough.")
    group.addoption(
        "--hostile-scale",
        type=float,
        help="Size of the attacks in tests/hostile: 0.1, or 1, their whole size, if thorough.",
    )
    group.addoption("--by-file", action="store_true", help="Print what the tests of each file cost.")
    group.addoption("--note-passed", action="store_true", help="Note in tests/passed.json which covered files passed.")


def pytest_configure(config: pytest.Config) -> None:
    """In the background of a script SIGINT is ignored, and processes that tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    scale = config.option
    whole = scale.thorough
    scale.first_seed = commit_seed() if scale.first_seed is None else scale.first_seed
    scale.network_seeds = scale.network_seeds or (400 if whole else 40)
    scale.hostile_scale = scale.hostile_scale or (1.0 if whole else 0.1)
    if scale.by_file:
        config.pluginmanager.register(CostReport())
    if scale.note_passed and not hasattr(config, "workerinput"):  # the controller gets all workers' reports
        if scale.keyword or scale.markexpr not in ("", "not cluster") or any("::" in name for name in config.args):
            raise pytest.UsageError("--note-passed is for runs of all tests of a file")
        config.pluginmanager.register(PassingRuns())


def pytest_report_header(config: pytest.Config) -> str:
    return f"tests that draw: --first-seed {config.option.first_seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first: they are shared out file by file, and a long one at the end would run alone."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not config.option.thorough:
        left_out = [item for item in items if _is_of_no_kind(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_of_no_kind(item)]
        rarely_run = {ROOT / file for file in covered_files()}
        for test in {_function_of(item) for item in items if item.path not in rarely_run}:
            _halve_examples(test)


def pytest_collection_finish() -> None:
    """A tenth of the CPU went into searches for garbage. What modules hold stays to the end, and is not searched."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)


def pytest_unconfigure() -> None:
    """nanobind reports what is not collected when the interpreter ends."""
    gc.unfreeze()


def _is_of_no_kind(item: pytest.Item) -> bool:
    """Has the mark `each_kind`, and is of a variant that is not in `KINDS`."""
    if item.get_closest_marker("each_kind") is None:
        return False
    variants: dict[str, object] = vars(item)["callspec"].params
    return any(variants.get(fixture, KINDS[0]) not in KINDS for fixture in _OF_A_VARIANT)


def _function_of(item: pytest.Item) -> Callable[..., object] | None:
    found: Callable[..., object] | None = getattr(item, "function", None)
    return found


def _halve_examples(test: Callable[..., object] | None) -> None:
    """Those of hypothesis, which draws others in each run."""
    if test is not None and _OWN_SETTINGS in vars(test):
        own = vars(test)[_OWN_SETTINGS] or hypothesis.settings.get_profile("motet")
        setattr(test, _OWN_SETTINGS, hypothesis.settings(own, max_examples=max(1, own.max_examples // 2)))


def patient_defaults(function: Callable[..., object]) -> tuple[object, ...]:
    """Its default arguments, with the tests' patience for `timeout_s`."""
    parameters = inspect.signature(function).parameters.values()
    given = [one for one in parameters if one.default is not one.empty and one.kind is not one.KEYWORD_ONLY]
    assert any(one.name == "timeout_s" for one in given)
    return tuple(PATIENCE_S if one.name == "timeout_s" else one.default for one in given)


@pytest.fixture(scope="session", autouse=True)
def patient_routers() -> Iterator[None]:
    """Routers wait as long as a busy machine needs. A test of what they do after a second sets that second itself."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (registry_view, "_LOOKUP_S"),
            (registry_view, "_CATCH_UP_S"),
            (generation_response, "HEADERS_AFTER_S"),
            (body_reader, "DEADLINE_S"),  # of processes that yield to all others
            (grammar_check, "DEADLINE_S"),
            (targets, "TIMEOUT_S"),
            (device_probe, "_TIMEOUT_S"),
        ):
            patch.setattr(module, name, PATIENCE_S)
        for function in ASKS_REDIS:
            patch.setattr(function, "__defaults__", patient_defaults(function))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Each client of httpx would read all authorities' certificates, 15 ms of CPU, and tests speak plain HTTP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_openapi_document() -> Iterator[None]:
    """Each router describes its routes when it starts, 0.1 s of CPU. Hundreds of tests have the same routes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "openapi_document", described_routes)
        yield


@pytest.fixture(scope="session")
def redis_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """A real server for the whole session. Nothing on it has to survive, so no test waits for a disk."""
    binary: str | None = pytestconfig.option.redis_server
    with tempfile.TemporaryDirectory(prefix="motet-") as folder:  # short enough for a Unix socket
        server = RedisServer(Path(folder) / "redis", None if binary is None else Path(binary))
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
