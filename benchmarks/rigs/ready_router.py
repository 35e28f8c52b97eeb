"""The real HTTP front of a router in front of a ready gang, with the data plane or a Serve handle between them."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.applications import Starlette

from motet.adapters.registry.tenants.records import KeyRecord, TenantRecord
from motet.cluster.config import part_config
from motet.cluster.replicas.serve_watch import ADDRESS, ReplicaDirectory
from motet.cluster.settings.settings import Settings
from motet.router.config import CurrentConfig, RouterConfig
from motet.router.fleet.admission import AdmissionConfig, TimeLimit
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.rest_server import create_app
from motet.router.text.text import TextService
from motet.workers.wire.engine_load import EngineLoad
from motet.workers.wire.messages import (
    GangInfo,
    SequenceRequest,
    SequenceUpdate,
    SequenceUsage,
)

Way = Literal["frames", "handles"]
DEFAULTS = Settings()


class OneTenant:
    """Stands in for the registry's view: every key belongs to one tenant, and there are no adapters."""

    connected = True
    last_event = 0
    stream_keys = (bytes(32),)

    def key(self, key: str) -> KeyRecord:
        return KeyRecord(key_id="key", tenant="tenant")

    def tenant(self, name: str) -> TenantRecord:
        return TenantRecord(name=name)

    def resolve(self, tenant: str, name: str) -> None:
        return None


class HandleStream:
    """A sequence whose updates come as the results of a streaming handle call."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        iterator: AsyncIterator[SequenceUpdate] = self._results.__aiter__()
        return iterator

    def cancel(self) -> None:
        self._results.cancel()

    usage, usage_at, is_reported = SequenceUsage(), None, True

    async def reported(self) -> None: ...


class HandleDispatcher:
    """The baseline: each sequence is a streaming call of Serve's `DeploymentHandle`."""

    def __init__(self, gang: Any, info: GangInfo) -> None:
        self._stream = gang.options(stream=True).stream
        self._info = info
        self._last_id = 0

    def submit(
        self, request: SequenceRequest, *, is_resumed: bool = False, limit: TimeLimit | None = None
    ) -> HandleStream:
        self._last_id += 1
        return HandleStream(self._stream.remote(msgspec.structs.replace(request, sequence_id=self._last_id)))

    def gang(self) -> GangInfo:
        return self._info

    def gangs(self) -> list[tuple[GangInfo, EngineLoad]]:
        return [(self._info, EngineLoad())]

    def load(self) -> EngineLoad:
        return EngineLoad()


class ReadyRouter:
    """The ingress replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, way: Way, token: str, model_path: Path, gang: Any
    ) -> None:
        if way == "frames":
            admission = part_config(AdmissionConfig, DEFAULTS, max_gangs=1, queued_tokens_per_gang=0)
            fleet = FleetDispatcher(token, 10.0, adapter_pages=lambda adapter: 1, admission=admission)
            self._directory = ReplicaDirectory(
                gang.app_name,
                gang.deployment_name,
                lambda gangs: fleet.update({key: metadata[ADDRESS] for key, metadata in gangs.items()}),
            )
            self._directory.start()
            while fleet.gang() is None:  # noqa: ASYNC110  # once, at the start
                await asyncio.sleep(0.05)
            dispatcher: Any = fleet
        else:
            dispatcher = HandleDispatcher(gang, await gang.info.remote())
        nothing: Any = None
        view: Any = OneTenant()
        self._app = create_app(
            config=CurrentConfig(
                part_config(
                    RouterConfig,
                    DEFAULTS,
                    model_name="ready",
                    spool_path=Path(tempfile.gettempdir()),
                    scales_from_zero=False,
                )
            ),
            dispatcher=dispatcher,
            view=view,
            uploads=nothing,  # its routes are not requested
            text=TextService.from_folder(model_path),
            operator_key=secrets.token_hex(),
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._app
