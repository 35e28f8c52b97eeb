"""/health and /ready, for everybody; /metrics and /status, for the operators of motet, who have a key of their own."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from .. import __version__
from ..adapters.registry.registry_view import RegistryView
from ..workers.wire.engine_load import EngineLoad
from ..workers.wire.messages import GangInfo
from .base_model import BaseModel
from .fleet.dispatch import Dispatcher
from .metrics import Metrics
from .openai_api.errors import unavailable
from .readiness import Readiness
from .tenants.auth import check_operator


class OperationsApi:
    def __init__(
        self,
        base: BaseModel,
        dispatcher: Dispatcher,
        view: RegistryView,
        metrics: Metrics,
        readiness: Readiness,
        operator_key: str,
    ) -> None:
        self._operator_key = operator_key
        self._base = base
        self._dispatcher = dispatcher
        self._view = view
        self._metrics = metrics
        self._readiness = readiness

    async def health(self, request: Request) -> Response:
        """200: the process runs and its event loop is not blocked. It says nothing about gangs."""
        return PlainTextResponse("ok")

    async def ready(self, request: Request) -> Response:
        """200 if a token can be served, else 503 with the reason."""
        problem = await self._readiness.problem()
        if problem is not None:
            raise unavailable(f"Not ready: {problem}.", "not_ready")
        return PlainTextResponse("ready")

    async def metrics(self, request: Request) -> Response:
        check_operator(request, self._operator_key)
        return Response(
            self._metrics.exposition(
                self._dispatcher.load(),
                self._dispatcher.num_resumed,
                self._dispatcher.num_moved,
                self._dispatcher.num_gang_faults,
                self._view.connected,
            ),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    async def status(self, request: Request) -> Response:
        """What `motet status` shows."""
        check_operator(request, self._operator_key)
        load = self._dispatcher.load()
        status: dict[str, Any] = {
            "version": __version__,
            "model": self._base.name,
            "redis_connected": self._view.connected,
            "gangs": [self._shown(gang, gang_load) for gang, gang_load in self._dispatcher.gangs()],
            "load": None if load is None else load.flat(),
            "open_generations": self._metrics.num_open_generations,
            "refused_requests": self._metrics.refused.total(),
            "timed_out_requests": self._metrics.num_timed_out,
        }
        return Response(msgspec.json.encode(status), media_type="application/json")

    def _shown(self, gang: GangInfo, load: EngineLoad) -> dict[str, Any]:
        # A gang knows its model by the folder on its machine, which is nobody's business.
        return {**msgspec.to_builtins(gang), "model": self._base.name, "load": load.flat()}
