"""/health and /ready, which are public; /metrics and /status, which need the operators' key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from .. import __version__
from ..adapters.registry.launches import StartReport
from ..adapters.registry.registry_view import RegistryView
from ..workers.wire.engine_load import EngineLoad
from ..workers.wire.messages import GangInfo
from .config import CurrentConfig
from .exposition.families import (
    MetricsTarget,
    RouterFacts,
    TargetGroup,
    discovery,
    gang_families,
    router_families,
    text_of,
)
from .fleet.dispatch import Dispatcher, probe
from .http.errors import unavailable
from .http.route import route
from .metrics import Metrics
from .versions.version_choice import BaseModel

# Whether this router can serve tokens: it can if it has served one a moment ago.


class Readiness:
    """Probes a gang by asking it for one token, unless a client's request just got one. Checks share a probe.

    Where gangs scale from zero, a router without a gang is ready, because a request makes a gang start. Each gang is
    then probed only once: further probes would count as demand and keep the gang from being stopped.
    """

    def __init__(self, config: CurrentConfig, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._probed_at: float | None = None  # time.perf_counter() of the last success
        self._probed_gang_id: str | None = None  # the gang that was there then
        self._lock = asyncio.Lock()

    async def problem(self) -> str | None:
        """Why no token can be served now; None: one can."""
        gang = self._dispatcher.gang()
        if gang is None:
            return None if self._config.now.scales_from_zero else "no gang of workers is connected"
        async with self._lock:
            if self._is_proved(gang):
                return None
            problem = await self._probe()
            if problem is None:
                self._probed_at = time.perf_counter()
                self._probed_gang_id = gang.gang_id
            return problem

    def _is_proved(self, gang: GangInfo) -> bool:
        if self._config.now.scales_from_zero and self._probed_gang_id == gang.gang_id:
            return True
        times = [at for at in (self._probed_at, self._metrics.last_token_at) if at is not None]
        return bool(times) and time.perf_counter() - max(times) < self._config.now.ready_interval_s

    async def _probe(self) -> str | None:
        try:
            async with asyncio.timeout(self._config.now.ready_timeout_s):
                return await probe(self._dispatcher)
        except TimeoutError:
            return f"no token was served within {self._config.now.ready_timeout_s:g} s"


_ONE_WORD: Final = {"text/plain": "One word."}


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The status of this router, and of the gangs that it is connected to."""

    version: str
    model: str
    redis_connected: bool
    starts: list[StartReport]  # of gangs and routers that cannot start: what they wait for, or why they failed
    taken_back: str | None  # why the newest configuration gave way to the one before; null: it did not
    gangs: list[dict[str, Any]]  # what each is, and its load
    load: dict[str, Any] | None  # of all of them together; null: none is connected
    open_generations: int
    refused_requests: int
    timed_out_requests: int


def router_facts(dispatcher: Dispatcher, view: RegistryView) -> RouterFacts:
    """What a router's metrics show beside its `Metrics`, as of now."""
    return RouterFacts(
        num_gangs=len(dispatcher.gangs()),
        num_resumed=dispatcher.num_resumed,
        num_moved=dispatcher.num_moved,
        num_gang_faults=dict(dispatcher.num_gang_faults),
        is_registry_connected=view.connected,
    )


class OperationsApi:
    def __init__(
        self,
        base: BaseModel,
        dispatcher: Dispatcher,
        view: RegistryView,
        metrics: Metrics,
        readiness: Readiness,
        labels: Mapping[str, str],
        targets: Callable[[], Sequence[MetricsTarget]],
    ) -> None:
        """`labels`: of all that /metrics shows. `targets`: nodes whose processes show metrics, this one included."""
        self._labels, self._targets = labels, targets
        self._base = base
        self._dispatcher = dispatcher
        self._view = view
        self._metrics = metrics
        self._readiness = readiness

    @route("GET", "/health", scope="public", summary="Does the router live?", texts=_ONE_WORD)
    async def health(self, request: Request) -> Response:
        """200: the process runs and its event loop is not blocked. It says nothing about gangs."""
        return PlainTextResponse("ok")

    @route("GET", "/ready", scope="public", summary="Can a token be served?", texts=_ONE_WORD, errors=("not_ready",))
    async def ready(self, request: Request) -> Response:
        """200 if a token can be served, else 503 with the reason."""
        problem = await self._readiness.problem()
        if problem is not None:
            raise unavailable(f"Not ready: {problem}.", "not_ready")
        return PlainTextResponse("ready")

    @route(
        "GET",
        "/metrics",
        scope="operator",
        summary="Metrics for Prometheus.",
        texts={"text/plain": "In Prometheus' text format."},
    )
    async def metrics(self, request: Request) -> Response:
        """This router's own numbers, and what each gang has reported to it: all numbers, where there is one router."""
        router_metrics = router_families(self._metrics, router_facts(self._dispatcher, self._view), self._labels)
        gangs = gang_families({info.gang_id: load for info, load in self._dispatcher.gangs()}, self._labels)
        # In a thread: a hundred gangs have thousands of series.
        text = await asyncio.to_thread(text_of, chain(router_metrics, gangs))
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @route(
        "GET",
        "/metrics/targets",
        scope="operator",
        summary="All nodes that have metrics, for Prometheus.",
        answers={200: list[TargetGroup]},
    )
    async def metrics_targets(self, request: Request) -> Response:
        """For Prometheus' HTTP service discovery: where each node of this motet shows the numbers of its processes."""
        return Response(discovery(self._targets()), media_type="application/json")

    @route("GET", "/status", scope="operator", summary="Gangs, their load and their properties.")
    async def status(self, request: Request) -> Status:
        """What `motet status` shows."""
        load = self._dispatcher.load()
        return Status(
            version=__version__,
            model=self._base.name,
            redis_connected=self._view.connected,
            starts=list(self._metrics.starts or ()),
            taken_back=self._metrics.taken_back,
            gangs=[self._gang_view(gang, gang_load) for gang, gang_load in self._dispatcher.gangs()],
            load=None if load is None else load.flat(),
            open_generations=self._metrics.num_open_generations,
            refused_requests=self._metrics.refused.total(),
            timed_out_requests=self._metrics.num_timed_out,
        )

    def _gang_view(self, gang: GangInfo, load: EngineLoad) -> dict[str, Any]:
        # A gang names its model by the folder on its machine, which stays private.
        return {**msgspec.to_builtins(gang), "model": self._base.name, "load": load.flat()}
