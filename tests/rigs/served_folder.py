"""A model's folder served as `motet serve` serves it, in one process without Ray.

After the same checks come a real gang, the gRPC stream, a real router with registry and uploads, and HTTP on loopback.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from redis.asyncio import Redis

from motet.adapters.names import names_of_folder
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload import UploadLimits, UploadService
from motet.cluster.application.model_source import resolve_model
from motet.cluster.config import MotetConfig
from motet.cluster.launch.local_serve import free_ports
from motet.cluster.launch.preflight import check_data_dir, check_settings
from motet.cluster.progress import ignore_event
from motet.router.config import CurrentConfig
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.rest_server import create_app
from motet.router.text.text import TextService
from motet.tests.rigs.gang_rig import worker_processes
from motet.tests.rigs.given_keys import give_key
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.router_rig import HEADERS, KEYS, OPERATOR_KEY
from motet.workers.engine_builder import build_engine_loop
from motet.workers.leader.frame_server import FrameServer
from motet.workers.loop import EngineLoop
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import layouts_of_gang
from motet.workers.models.stored_tensor import base_tensors
from motet.workers.wire.engine_load import EngineLoad


@dataclass(frozen=True)
class ServedFolder:
    """`base`: the model's name in requests."""

    base: str
    http: httpx.AsyncClient  # of the tenant acme
    loop: EngineLoop
    _server: FrameServer

    @property
    def load(self) -> EngineLoad:
        """The gang's, after its last step."""
        return self._server.load

    async def upload(self, name: str, folder: Path) -> None:
        """Uploads a PEFT folder."""
        files = {file: (folder / file).read_bytes() for file in ("adapter_config.json", "adapter_model.safetensors")}
        response = await self.http.post("/v1/adapters", data={"name": name}, files=files)
        assert response.status_code == 201, response.text

    async def complete(self, adapter: str | None, prompt: list[int], **fields: Any) -> httpx.Response:
        """A good answer to a request for completions. `adapter`: None: of the base."""
        body = {"model": adapter or self.base, "prompt": prompt, **fields}
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response


@asynccontextmanager
async def served_folder(folder: Path, data_dir: Path, redis: Redis, **settings: Any) -> AsyncIterator[ServedFolder]:
    """Serves the folder. `settings`: those of `motet serve`. Raises what keeps it from starting."""
    check_data_dir(data_dir)
    model_path = resolve_model(str(folder), data_dir / "models", ignore_event)
    config = MotetConfig.of(model_path=model_path, data_dir=data_dir, port=free_ports(1)[0], **settings)
    check_settings(config)
    token = secrets.token_hex()
    async with AsyncExitStack() as parts:
        spawn, _ = parts.enter_context(worker_processes())
        loop = await asyncio.to_thread(build_engine_loop, config.engine, None, spawn)
        gang = FrameServer(loop, loop.info, token, config.leader)
        parts.push_async_callback(gang.stop)
        address = await gang.start("127.0.0.1")
        model = ModelConfig.from_folder(model_path)
        layouts = layouts_of_gang(model, *config.packing)
        registry = Registry(redis, PATIENCE_S)
        for key, tenant in KEYS.items():
            await give_key(registry, tenant, key)
        view = RegistryView(registry)
        await view.start()
        parts.push_async_callback(view.stop)
        text = TextService.from_folder(model_path)
        parts.callback(text.close)
        dispatcher = FleetDispatcher(
            token,
            config.sequence_wait_s,
            adapter_pages=lambda adapter: layouts[0].num_pages(adapter.module_ranks),
            admission=config.admission,
        )
        parts.push_async_callback(dispatcher.close)
        dispatcher.update({"gang": address})
        limits = UploadLimits(max_tensors_bytes=config.router.max_upload_bytes)
        app = create_app(
            config=CurrentConfig(config.router),
            dispatcher=dispatcher,
            view=view,
            uploads=UploadService(
                AdapterStore(config.store_path),
                registry,
                view,
                layouts,
                limits,
                reserved=[config.serving.name],
                base=base_tensors(model_path, model.shape),
            ),
            text=text,
            operator_key=OPERATOR_KEY,
            base_names=names_of_folder(model_path),
        )
        server = uvicorn.Server(
            uvicorn.Config(
                app, port=config.access.port, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
            )
        )
        serving = asyncio.create_task(server.serve())
        try:
            await eventually_in_loop(lambda: server.started or serving.done())
            await eventually_in_loop(dispatcher.gangs)
            async with httpx.AsyncClient(base_url=config.url, headers=HEADERS, timeout=PATIENCE_S) as http:
                yield ServedFolder(config.serving.name, http, loop, gang)
        finally:
            server.should_exit = True
            await serving
