"""A `Dispatcher` for an engine in this process: all of motet except the connection between router and gang."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count
from typing import cast

import httpx
import msgspec
from starlette.applications import Starlette

from motet.adapters.adapter import AdapterVersion
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.upload import UploadService
from motet.router.config import CurrentConfig
from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.dispatch import Dispatcher
from motet.router.fleet.known_gang import AdapterTier
from motet.router.fleet.leader_connection import FaultKind
from motet.router.fleet.open_sequence import OpenSequence
from motet.router.rest_server import create_app
from motet.router.text.text import TextService
from motet.router.usage.usage import UsageService
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.part_configs import router_config
from motet.tests.rigs.router_rig import BASE, HEADERS, OPERATOR_KEY, FakeUploads, FakeView, text_service
from motet.workers.wire.engine_load import EngineLoad
from motet.workers.wire.messages import Cancel, GangInfo, SequenceRequest, Submit


def app_of(
    dispatcher: Dispatcher,
    stock: Stock,
    *adapters: str,
    usage: UsageService | None = None,
    text: TextService | None = None,
) -> Starlette:
    """A router in front of this engine, or of gangs, for a tenant that has these adapters.

    `usage`: counts answers. `text`: of the model; None: of the rig's tokenizer, for a model that has none.
    """
    view = FakeView()
    for name in adapters:
        ref = stock.refs[name]
        version = AdapterVersion("acme", name, 1, ref.digest, ref.module_ranks, 1, 1.7e9)
        if (head := stock.heads.get(name)) is not None:
            version, view.heads[ref.digest] = replace(version, num_labels=head.num_labels), head
        view.adapters["acme", name] = version
    return create_app(
        config=CurrentConfig(router_config(BASE, stock.store_path.parent / "spool")),
        dispatcher=dispatcher,
        view=cast(RegistryView, view),
        uploads=cast(UploadService, FakeUploads(view)),
        text=text_service() if text is None else text,
        operator_key=OPERATOR_KEY,
        accountants=() if usage is None else (usage.metering,),
        more_routes=(lambda view: ()) if usage is None else usage.routes,
    )


def client_of(
    dispatcher: Dispatcher,
    stock: Stock,
    *adapters: str,
    usage: UsageService | None = None,
    text: TextService | None = None,
) -> httpx.AsyncClient:
    """A client of `app_of`, with the tenant's key."""
    app = app_of(dispatcher, stock, *adapters, usage=usage, text=text)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router", headers=HEADERS)


class EngineDispatcher:
    """Steps the engine in the event loop for as long as it has work. `requests`: all that came to it."""

    num_resumed = num_moved = 0
    num_gang_faults: Mapping[FaultKind, int] = {}

    def __init__(self, rig: EngineRig) -> None:
        self.rig = rig
        self.requests: list[SequenceRequest] = []
        self._ids = count(1)
        self._open: dict[int, OpenSequence] = {}
        self._cancelled: dict[int, OpenSequence] = {}
        self._stepping: asyncio.Task[None] | None = None

    def submit(
        self, request: SequenceRequest, *, is_resumed: bool = False, limit: TimeLimit | None = None
    ) -> OpenSequence:
        request = msgspec.structs.replace(request, sequence_id=next(self._ids))
        self.requests.append(request)
        sequence = self._open[request.sequence_id] = OpenSequence(request)
        sequence.move(None, self)
        self.rig.engine.receive(Submit(request))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        return sequence

    def gang(self) -> GangInfo:
        return self.rig.engine.info

    def gangs(self) -> list[tuple[GangInfo, EngineLoad]]:
        return [(self.gang(), self.load())]

    def bring(self, request: SequenceRequest, num_gangs: int, wait_s: float) -> dict[str, OpenSequence]:
        return {self.gang().gang_id: self.submit(request)} if num_gangs else {}

    def residency(self, tenant: str, digest: str, known_gangs: Collection[str] = ()) -> Mapping[str, AdapterTier]:
        return {}

    def hold(self, tenant: str) -> None:
        raise NotImplementedError

    release = hold

    def load(self) -> EngineLoad:
        return self.rig.engine.load()

    def cancel(self, sequence: OpenSequence) -> None:
        sequence_id = sequence.request.sequence_id
        self._cancelled[sequence_id] = self._open.pop(sequence_id)
        sequence.await_last_report()
        self.rig.engine.receive(Cancel(sequence_id))

    async def _step(self) -> None:
        while self.rig.engine.has_work():
            for update in self.rig.engine.step():
                is_last = update.finish_reason is not None or update.error is not None
                if (cancelled := self._cancelled.get(update.sequence_id)) is not None:
                    cancelled.note_usage(update.usage)
                    if is_last:
                        cancelled.end_reports()
                        del self._cancelled[update.sequence_id]
                elif is_last:
                    self._open.pop(update.sequence_id).push(update)
                else:
                    self._open[update.sequence_id].push(update)
            self.rig.engine.check_integrity()
            await asyncio.sleep(0)
