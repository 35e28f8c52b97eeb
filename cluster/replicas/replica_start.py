"""How a replica starts and stops its parts, and waits while Redis, the model or a volume is away."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

import ray
from prometheus_client.metrics_core import Metric
from ray.serve._private import replica as serves_replica

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.launches import Kind, StartReport, Starts
from ...adapters.registry.registry import connect
from ...router.exposition.families import FAILED_STARTS, WAITING_STARTS, Families
from ..application.model_source import ModelUnavailable
from ..exposition.node_page import ExpositionConfig, ProcessPage
from ..launch_secrets import LaunchSecrets
from ..process_log import LogConfig, ProcessLog, start_process_log
from ..progress import OnEvent, ignore_event

# The part of a node's page of metrics that a replica has while it cannot start.

TIMEOUT_S = 5.0  # the data folder, which may have the key, may be what hangs

_log = logging.getLogger(__name__)


class StartPage:
    """Says without Redis and without a router that a start waits or has failed. Belongs to one event loop."""

    def __init__(self, config: ExpositionConfig, kind: Kind, replica: str, node_address: str) -> None:
        """`replica`: its id, the label `start`. `node_address`: of this machine, for others."""
        self._config, self._kind, self._replica, self._node_address = config, kind, replica, node_address
        self._has_failed = False
        self._page: ProcessPage | None = None

    async def show(self, operator_key: str | None, *, has_failed: bool) -> None:
        """Shows it from now on. `operator_key`: None: the one in the data folder."""
        self._has_failed = has_failed
        if self._page is not None:
            return
        self._page = ProcessPage(self._config, "start", self._replica, operator_key, self._families)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._page.start(self._node_address)
        except (OSError, TimeoutError) as error:
            _log.warning("no metrics of this start: %s", str(error) or type(error).__name__)

    async def stop(self) -> None:
        """Shows nothing any more. Idempotent."""
        page, self._page = self._page, None
        if page is not None:
            await page.stop()

    def _families(self) -> Iterator[Metric]:
        make = Families({"start": self._replica, "base": self._config.name})
        for (name, text), value in ((WAITING_STARTS, not self._has_failed), (FAILED_STARTS, self._has_failed)):
            yield make.gauges(name, text, ("kind",), [((self._kind,), float(value))])


# The parts of a replica that were started, and how they are stopped.


class Part(Protocol):
    """Something that works in the background between its start and its stop. Either may be a coroutine function."""

    def start(self) -> Awaitable[None] | None: ...
    def stop(self) -> Awaitable[None] | None: ...


P = TypeVar("P", bound=Part)


class RunningParts(AsyncExitStack):
    """Stops on `aclose` what was started, the last part first. A stop that fails does not keep others from stopping.

    As a context manager it stops everything if the start of a later part fails; `pop_all` ends that.
    """

    async def start(self, part: P) -> P:
        """Returns the part once it has started."""
        if (starting := part.start()) is not None:
            await starting
        self.push_async_callback(_stop, part)
        return part

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Has the work done in the background. It is cancelled and has ended before what was started earlier stops."""
        self.push_async_callback(end_tasks, asyncio.create_task(work))


async def _stop(part: Part) -> None:
    if (stopping := part.stop()) is not None:
        await stopping


# Keeps Ray Serve's own server of a replica off the network.

EVERYWHERE = "[::]:0"  # where Serve would listen


def serve_only_at(host: str) -> None:
    """Has Serve listen at this address alone, in this process, for calls of this replica by other replicas.

    To be called in the replica's constructor: Serve begins to listen after it. Its server unpickles whatever it is
    sent, so a process that reaches it runs code as motet; by default all can, also where all else listens on loopback.
    Serve itself calls it at the node's address.
    """
    add_port = serves_replica.add_port_to_grpc_server

    def add_port_at_host(server: object, address: str) -> int:
        port: int = add_port(server, f"{host}:0" if address == EVERYWHERE else address)
        return port

    serves_replica.add_port_to_grpc_server = add_port_at_host


# What the interpreter does by itself must not hold up every stream of a replica.

# A search of the second generation goes through all that was made and kept since the one before: 25,000 objects at
# most, 2 ms. What survives it lives long, and a search of all objects, which takes 100 ms where thousands of sequences
# are under way, comes after a number of these searches that is hardly ever reached.
THRESHOLDS = (5_000, 4, 10_000)
# After which a thread that renders, tokenizes or plans gives way to the one that answers or computes.
SWITCH_INTERVAL_S = 0.0005


def keep_pauses_short() -> None:
    """Makes garbage collection rare and turns of threads short, once the replica has been built."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # objects of libraries stay for ever, and need not be searched
    gc.set_threshold(*THRESHOLDS)


# Logs of a Serve replica's process, and of a worker's.


def configure_replica_logging(config: LogConfig, kind: str, **origin: Any) -> ProcessLog:
    """Has this process's log lines written where Ray keeps its session's logs. `kind`: "router", "gang" or "worker".

    `origin`: what every line is to say of this process, beside its kind and its node.
    """
    node = ray._private.worker._global_node  # Serve finds its own log folder like this
    return start_process_log(
        config, kind, {"node": ray.util.get_node_ip_address(), **origin}, Path(node.get_logs_dir_path())
    )


MAX_FAILED_STARTS: Final = 1_000_000  # of a deployment, in a row: Serve begins no other one after them
AWAY: Final = (RegistryUnavailable, ModelUnavailable, OSError)  # what is needed may be there later
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LOG_INTERVAL_S = 300.0

Answer = TypeVar("Answer")


def pause_s(num_failures: int) -> float:
    """How long to wait after `num_failures` in a row.

    >>> [pause_s(num_failures) for num_failures in (1, 2, 3, 30)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 30))


class ReplicaStart:
    """One start of a replica, as a context manager around its constructor. Belongs to one event loop."""

    def __init__(
        self,
        kind: Kind,
        replica: str,
        cluster: str,
        on_event: OnEvent = ignore_event,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        page: StartPage | None = None,
    ) -> None:
        """`replica`, `cluster`: ids. `on_event`: gets what is waited for. `page`: shown once there are secrets."""
        self._kind, self._replica, self._cluster = kind, replica, cluster
        self._on_event, self._sleep = on_event, sleep
        self._began_at = time.time()
        self._page = page
        self.secrets: LaunchSecrets | None = None  # once they are known; reports are stored in their Redis

    async def __aenter__(self) -> ReplicaStart:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            await self.failed(error)

    async def until(self, dependency: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `ask` returns, which is called until what it asks for is there. `dependency`: "the model", "Redis"."""
        try:
            return await ask()
        except AWAY as error:
            why = error
        self._on_event(f"waiting for {dependency}", 0, 1)
        try:
            return await self._until(dependency, ask, why)
        finally:
            self._on_event(f"waiting for {dependency}", 1, 1)
            if self._page is not None:
                await self._page.stop()

    async def _until(self, dependency: str, ask: Callable[[], Awaitable[Answer]], why: Exception) -> Answer:
        said, said_at = "", 0.0
        for pause in map(pause_s, count(1)):
            if str(why) != said or time.monotonic() - said_at >= LOG_INTERVAL_S:
                said, said_at = str(why), time.monotonic()
                _log.warning("this %s waits for %s: %s", self._kind, dependency, why)
            await self._report(f"it waits for {dependency}: {why}", has_failed=False)
            await self._sleep(pause)
            try:
                return await ask()
            except AWAY as error:
                why = error
        raise AssertionError("there is always another pause")

    async def failed(self, error: Exception) -> None:
        """Reports why, if Redis is there, and returns when another start may begin."""
        num_failures: int | None = None
        try:
            await self._report(str(error) or type(error).__name__, has_failed=True)
            num_failures = await self._with_registry(self._num_failures)
        except Exception as why:  # such as an invalid URL
            _log.warning("the failed start of this %s cannot be reported: %s", self._kind, why)
        pause = pause_s(num_failures or 1)
        _log.error("this %s cannot start; the next one begins in %.0f s: %s", self._kind, pause, error)
        await self._sleep(pause)
        if self._page is not None:
            await self._page.stop()

    async def succeeded(self) -> None:
        """The replica serves: deletes what was reported."""
        await self._with_registry(lambda starts: starts.succeeded(self._kind, self._replica))

    async def _report(self, reason: str, *, has_failed: bool) -> None:
        report = StartReport(
            kind=self._kind,
            replica=self._replica,
            reason=reason,
            has_failed=has_failed,
            began_at=self._began_at,
            reported_at=time.time(),
        )
        if self._page is not None and self.secrets is not None:
            await self._page.show(self.secrets.operator_key, has_failed=has_failed)
        await self._with_registry(lambda starts: starts.report(report))

    async def _num_failures(self, starts: Starts) -> int:
        return sum(report.has_failed and report.kind == self._kind for report in await starts.reports())

    async def _with_registry(self, ask: Callable[[Starts], Awaitable[Answer]]) -> Answer | None:
        """None: there is no Redis that answers; then the log has it alone."""
        if self.secrets is None:
            return None
        client: Any = connect(self.secrets.redis_url)
        try:
            with suppress(RegistryUnavailable):
                return await ask(Starts(client, self._cluster))
        finally:
            with suppress(Exception):  # what cannot be closed is gone
                await client.aclose()
        return None
