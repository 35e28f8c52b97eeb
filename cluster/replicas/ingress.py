"""A router as Ray Serve sees it: the ingress replica that builds the HTTP front and all that it works with."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ray
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve._private.constants import RAY_SERVE_HAPROXY_SOCKET_PATH
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from ...adapters.errors import RegistryUnavailable
from ...adapters.names import names_of_folder
from ...adapters.packing.layout import AdapterLayout
from ...adapters.registry.administration.administration import Administration
from ...adapters.registry.administration.key_registry import EndedKeys
from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.registry.launches import Launches, Rollouts, Starts
from ...adapters.registry.preloads import Preloads
from ...adapters.registry.registry import Registry
from ...adapters.registry.registry_view import RegistryView
from ...adapters.store.store import AdapterStore
from ...adapters.upload import UploadLimits, UploadService
from ...router.batches.batches import Batches
from ...router.config import CurrentConfig
from ...router.exposition.families import router_families
from ...router.fleet.dispatch import FleetDispatcher
from ...router.fleet.pin_keeper import PinKeeper
from ...router.http.auth import OperatorKey
from ...router.loop_watchdog import LoopWatchdog
from ...router.metrics import Metrics, ServeFacts
from ...router.operations_api import router_facts
from ...router.rest_server import create_app
from ...router.tenancy.quotas import Quotas
from ...router.text.model_tokenizer import import_transformers_without_torch
from ...router.text.text import TextService
from ...router.training_api import RANK_OF_ADAPTERS
from ...router.usage.usage import LEDGERS_PART, UsageService
from ...router.usage.usage_rows import read_prices
from ...router.versions.canary_book import CanaryBook, CanaryJudge
from ...workers.models.config import ModelConfig
from ...workers.models.sharding import layouts_of_gang
from ...workers.models.stored_tensor import base_tensors
from ..application.application_config import live_values
from ..application.model_source import check_model
from ..application.registration import check_objectives_of, register_router
from ..application.secret_files import (
    OperatorKeyWatch,
    connect_with_secrets,
    read_secrets,
    secrets_of_this_node,
    shared_token,
)
from ..config import MotetConfig
from ..edge.edge_watch import EdgeWatch
from ..exposition.node_page import ProcessPage, targets_of
from ..launch_secrets import LaunchSecrets, operator_key_in
from ..progress import ProgressWriter, ignore_event, step
from ..settings.setting_field import ConfigError
from .disk_watch import DiskWatch
from .launch_keeper import LaunchKeeper, RolloutKeeper, id_of_this_cluster
from .replica_start import (
    ReplicaStart,
    RunningParts,
    StartPage,
    configure_replica_logging,
    keep_pauses_short,
    serve_only_at,
)
from .serve_watch import ADDRESS, GangDemand, Metadata, PlacementKeeper, ReplicaDirectory, ServeWatch

if TYPE_CHECKING:
    from ...router.tenancy.token_verifier import TokenVerifier


# Keeps a huge request body out of memory.

MAX_MESSAGES = 4  # of a body, read and not yet consumed; each holds some 64 KiB to 256 KiB


class BoundedReceive:
    """ASGI middleware: reads a request no faster than the app consumes it.

    To notice a client that leaves, a Serve replica reads every request ahead into a queue without a limit: an upload
    that arrives faster than the disk takes it would fill the memory. This gives the queue a limit; a full queue makes
    the replica stop reading, and TCP then slows the client down.

    A request that comes through Serve's fallback proxy, as some do while routers come and go, has another queue, which
    gets no limit: the code that fills it does not wait, and at a limit would lose the rest of the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(receive, ASGIDIReceiveProxy):
            queue: Any = receive.queue
            queue._maxsize = MAX_MESSAGES  # asyncio.Queue has no public way to set it after construction
        await self._app(scope, receive, send)


SWEEP_INTERVAL_S = 3600.0
SWEEP_TRY_S = 300.0  # how often each router asks whether a sweep is due
REDIS_MEMORY_S = 30.0  # how often each router reads how much memory Redis uses
STARTS_S = 5.0  # how often each router reads which replicas cannot start

_log = logging.getLogger(__name__)


class RouterReplica:
    """Serves HTTP. Composes what `router` and `adapters` define; decides nothing itself."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: MotetConfig, secrets_path: Path | None, gang: Any, progress_path: Path | None
    ) -> None:
        """`secrets_path`: of `LaunchSecrets`; None: the node has them. `gang`: Serve's handle of the gangs, from which
        their deployment's name comes. `progress_path`: the file for the progress of the start.
        """
        replica = serve.get_replica_context().replica_id.unique_id
        self._log = configure_replica_logging(config.logs, "router", replica=replica)
        serve_only_at(ray.util.get_node_ip_address())
        self._is_up = False
        on_event = ignore_event if progress_path is None else ProgressWriter(progress_path)
        page = StartPage(config.exposition, "router", replica, ray.util.get_node_ip_address())
        self._replica_start = replica_start = ReplicaStart("router", replica, id_of_this_cluster(), on_event, page=page)
        with step(on_event, "starting a router"):
            async with replica_start:
                secrets = await replica_start.until(
                    "its secrets", partial(asyncio.to_thread, read_secrets, secrets_path)
                )
                replica_start.secrets = secrets
                check = partial(asyncio.to_thread, check_model, config.model_path, config.hub_id, on_event)
                await replica_start.until("the model", check)
                async with RunningParts() as parts:
                    await self._start(parts, config, secrets, secrets_path, gang)
                    self._parts = parts.pop_all()

    async def _start(
        self, parts: RunningParts, config: MotetConfig, secrets: LaunchSecrets, secrets_path: Path | None, gang: Any
    ) -> None:
        """Starts each part after those that it needs."""
        await asyncio.to_thread(import_transformers_without_torch)
        self._config, self._current, self._metrics = config, CurrentConfig(config.router), Metrics()
        self._metrics.dropped_log_lines = lambda: self._log.num_dropped
        self._gangs: Mapping[str, Metadata] = {}
        self._routers: Mapping[str, Metadata] = {}
        redis = connect_with_secrets(secrets.redis_url, secrets_of_this_node if secrets_path is None else None)
        parts.push_async_callback(redis.aclose)
        self._registry = Registry(redis)
        await self._start_launch_keeper(parts, redis, secrets, secrets_path)
        view = self._view = RegistryView(self._registry)
        view.num_routers = lambda: len(self._routers)
        await self._replica_start.until("Redis", view.start)
        parts.push_async_callback(view.stop)
        token = await self._replica_start.until("Redis", partial(shared_token, secrets))
        model = await asyncio.to_thread(ModelConfig.from_folder, config.model_path)
        layouts = layouts_of_gang(model, *config.packing)
        self._uploads = UploadService(
            await self._replica_start.until("the store", partial(asyncio.to_thread, AdapterStore, config.store_path)),
            self._registry,
            view,
            layouts=layouts,
            reserved=[config.serving.name],
            limits=UploadLimits(max_tensors_bytes=config.router.max_upload_bytes),
            base=await asyncio.to_thread(base_tensors, config.model_path, model.shape),
        )
        router = config.router
        text = await asyncio.to_thread(
            TextService.from_folder, config.model_path, router.control_tokens, router.response_template
        )
        parts.callback(text.close)
        usage = await parts.start(await _make_usage(redis, config))
        self._metrics.ledger = usage.behind
        quotas = await parts.start(Quotas(redis, lambda: len(self._routers)))
        self._metrics.quota_calls = quotas.call_outcomes
        batches = Batches(redis, config.files_path, view, self._current, self._metrics, quotas)
        self._administration = Administration.of(redis, [batches.retire, usage.retire])
        canary_counts = CanaryCounts(redis)
        canaries = await parts.start(CanaryBook(canary_counts))
        await parts.start(CanaryJudge(self._uploads, canary_counts))
        await parts.start(EndedKeys(redis))
        tokens = await _start_token_verifier(parts, config)
        pins = await self._start_fleet(parts, gang, token, layouts[0])
        operator_key = await self._start_operator_key(parts, secrets, secrets_path)
        name = uuid4().hex[:8]
        self._labels = {"router": name, "base": config.serving.name}
        self._page = ProcessPage(config.exposition, "router", name, operator_key, self._families)
        parts.push_async_callback(self._page.stop)
        await self._page.start(ray.util.get_node_ip_address())
        self._app = create_app(
            config=self._current,
            dispatcher=self._dispatcher,
            view=view,
            uploads=self._uploads,
            text=text,
            operator_key=operator_key,
            base_names=await asyncio.to_thread(names_of_folder, config.model_path),
            metrics=self._metrics,
            labels=self._labels,
            administration=self._administration,
            tokens=tokens,
            targets=lambda: targets_of(config.exposition, (*self._routers.values(), *self._gangs.values())),
            quotas=quotas,
            canaries=canaries,
            preloads=Preloads(redis),
            pins=pins,
            batches=batches,
            adapter_pages=layouts[0].num_pages(dict.fromkeys(layouts[0].shape.modules, RANK_OF_ADAPTERS)),
            accountants=[usage.metering],
            more_routes=usage.routes,
        )
        self._app.add_middleware(BoundedReceive)
        await parts.start(batches)
        keep_pauses_short()
        edge = await parts.start(EdgeWatch(RAY_SERVE_HAPROXY_SOCKET_PATH))
        self._metrics.edge_refused = lambda: edge.refused
        parts.run(self._sweep_forever())
        await parts.start(DiskWatch(config.store_path, self._note_free_bytes))
        parts.run(self._measure_redis_forever())
        cluster = id_of_this_cluster()
        starts = Starts(redis, cluster)
        parts.run(self._read_starts_forever(starts))
        await parts.start(RolloutKeeper(gang.app_name, cluster, Rollouts(redis), starts, self._note_rollout))
        await parts.start(LoopWatchdog(self._metrics.loop_held_s, self._metrics.loop_held_cpu_s))

    async def _start_operator_key(
        self, parts: RunningParts, secrets: LaunchSecrets, secrets_path: Path | None
    ) -> OperatorKey:
        """The one of the secrets, and what a node's secrets say later; else the one in the data folder."""
        if secrets.operator_key is None:
            return OperatorKey(await asyncio.to_thread(operator_key_in, self._config.serving.data_dir))
        key = OperatorKey(secrets.operator_key)
        if secrets_path is None:
            await parts.start(OperatorKeyWatch(key, secrets_of_this_node))
        return key

    async def _start_launch_keeper(
        self, parts: RunningParts, redis: Redis, secrets: LaunchSecrets, secrets_path: Path | None
    ) -> None:
        """Registers this router's base and its launch's keys, and follows changes of these keys."""
        launch = LaunchKeeper(self._registry, Launches(redis), id_of_this_cluster(), partial(_keys_of, secrets_path))
        make_folder = partial(self._config.serving.data_dir.mkdir, parents=True, exist_ok=True)
        await self._replica_start.until("the data folder", partial(asyncio.to_thread, make_folder))
        register = partial(register_router, self._registry, self._config, launch.owner, secrets.keys)
        await self._replica_start.until("Redis", register)
        # A node's secrets may get a file of keys later.
        keys = secrets.keys if secrets_path is not None else secrets.keys or ()
        await self._replica_start.until("Redis", partial(launch.start, keys))
        parts.push_async_callback(launch.stop)

    async def _start_fleet(self, parts: RunningParts, gang: Any, token: str, layout: AdapterLayout) -> PinKeeper:
        """Connects to gangs as they start and end, and calls for a gang where there may be none."""
        config = self._config
        self._admission = config.admission
        self._dispatcher = FleetDispatcher(
            token,
            config.sequence_wait_s,
            self._show_demand,
            adapter_pages=lambda adapter: layout.num_pages(adapter.module_ranks),  # the same on every worker
            admission=config.admission,
        )
        parts.push_async_callback(self._dispatcher.close)
        self._view.on_outdated = self._dispatcher.outdate
        pins = await parts.start(PinKeeper(self._view.pins, self._dispatcher.connected))
        self._demand: GangDemand | None = None
        if config.scaling.min_gangs == 0:
            self._demand = GangDemand(gang, lambda: self._dispatcher.num_waiting)
            parts.callback(self._demand.stop)
        own_deployment = serve.get_replica_context().deployment
        await parts.start(ReplicaDirectory(gang.app_name, gang.deployment_name, self._update_gangs))
        await parts.start(ReplicaDirectory(gang.app_name, own_deployment, self._update_routers))
        await parts.start(PlacementKeeper(gang.app_name, gang.deployment_name))
        await parts.start(ServeWatch(gang.app_name, gang.deployment_name, self._note_serve))
        return pins

    def record_replica_metadata(self) -> dict[str, str]:
        """Metadata for the directory of every router."""
        return self._page.metadata

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve's hook for settings of a replica. Raises ConfigError as it starts; one that runs goes on as before.

        Serve would replace a running replica that refuses, by others that refuse as well.
        """
        try:
            config = self._config.replaced(**live_values("router", user_config))
            check = partial(check_objectives_of, self._registry, config)
            await (check() if self._is_up else self._replica_start.until("Redis", check))
        except (ConfigError, RegistryUnavailable) as error:
            if not self._is_up:
                await self._replica_start.failed(error)
                raise
            _log.error("the settings stay as they were: %s", error)
            return
        self._current.now, self._admission = config.router, config.admission
        self._change_admission()
        try:
            await self._administration.audit.note_settings(config.written)
        except RegistryUnavailable as error:  # they apply nevertheless; the next router that starts records them
            _log.warning("settings that have changed were not noted in the audit log: %s", error)

    async def check_health(self) -> None:
        """Serve's hook: a router that answers is well."""
        if not self._is_up:
            self._is_up = True
            await self._replica_start.succeeded()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Serve's hook for the app of a replica."""
        return self._app

    async def __del__(self) -> None:
        """Serve's hook for a graceful end, after the last request."""
        await self._parts.aclose()
        self._log.close()

    def _update_gangs(self, replicas: Mapping[str, Metadata]) -> None:
        self._gangs = replicas
        self._dispatcher.update({key: metadata[ADDRESS] for key, metadata in replicas.items() if ADDRESS in metadata})

    def _update_routers(self, replicas: Mapping[str, Metadata]) -> None:
        self._routers = replicas

    def _note_serve(self, facts: ServeFacts) -> None:
        before, self._metrics.serve = self._metrics.serve, facts
        if before is None or before.max_gangs != facts.max_gangs:
            self._change_admission()

    def _change_admission(self) -> None:
        """Applies this router's settings, with the most gangs that Serve may have, which can change while it runs."""
        serve_facts = self._metrics.serve
        max_gangs = self._admission.max_gangs if serve_facts is None else max(1, serve_facts.max_gangs)
        self._dispatcher.change_admission(dataclasses.replace(self._admission, max_gangs=max_gangs))

    def _families(self) -> Iterator[Metric]:
        return router_families(self._metrics, router_facts(self._dispatcher, self._view), self._labels)

    def _show_demand(self) -> None:
        """Called when a sequence waits for a gang. With `min_gangs` of 1 or more Serve starts gangs anyway."""
        if self._demand is not None:
            self._demand.show()

    async def _measure_redis_forever(self) -> None:
        """Reads Redis' memory for the metrics, which leave it out while Redis is away or does not let this user ask."""
        is_logged = False
        while True:
            try:
                self._metrics.redis_memory = await self._registry.memory()
            except RegistryUnavailable as error:
                self._metrics.redis_memory = None
                if not is_logged:
                    _log.warning("the memory of Redis cannot be read, so its alert is silent: %s", error)
                    is_logged = True
            await asyncio.sleep(REDIS_MEMORY_S)

    async def _read_starts_forever(self, starts: Starts) -> None:
        """Reads which gangs and routers cannot start, for the status and the metrics of this router."""
        while True:
            try:
                self._metrics.starts = await starts.reports()
            except RegistryUnavailable:
                self._metrics.starts = None
            await asyncio.sleep(STARTS_S)

    def _note_rollout(self, taken_back: str | None) -> None:
        self._metrics.taken_back = taken_back

    def _note_free_bytes(self, free_bytes: int | None) -> None:
        self._metrics.store_free_bytes = free_bytes

    async def _sweep_forever(self) -> None:
        """Frees the disk of adapters that no name points to any more: one router of all, once in an interval."""
        while True:
            try:
                num_removed = await self._uploads.sweep(rest_s=SWEEP_INTERVAL_S)
                self._metrics.sweep_tried_at = time.time()
                if num_removed:
                    _log.info("removed %d adapters that no name points to from the store", num_removed)
            except (RegistryUnavailable, OSError) as error:
                _log.warning("the store was not swept: %s", error)
            await asyncio.sleep(SWEEP_TRY_S)


def _keys_of(secrets_path: Path | None) -> Sequence[tuple[str, str]] | None:
    return read_secrets(secrets_path).keys


async def _make_usage(redis: Redis, config: MotetConfig) -> UsageService:
    limits = config.requests
    return UsageService(
        redis,
        config.ledger_path,
        config.ledger_archive_path,
        kept_days=limits.ledger_days,
        spool_bytes=limits.ledger_spool_bytes,
        min_free_bytes=limits.min_free_bytes // LEDGERS_PART,
        prices=None if limits.prices_path is None else await asyncio.to_thread(read_prices, limits.prices_path),
    )


async def _start_token_verifier(parts: RunningParts, config: MotetConfig) -> TokenVerifier | None:
    """Verifies tokens of the configured identity providers; None: there are none."""
    if not config.access.oidc_issuers:
        return None
    from ...router.tenancy.token_verifier import TokenVerifier  # what verifies signatures takes memory and time to load

    return await parts.start(TokenVerifier(config.oidc))
