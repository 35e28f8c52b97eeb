"""Routers with a real registry and store between stand-ins: what is uploaded, promoted and tried is so for real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from motet.adapters.registry.canary_counts import CanaryCounts
from motet.adapters.registry.preloads import Preloads
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload import UploadLimits, UploadService
from motet.router.config import CurrentConfig
from motet.router.fleet.pin_keeper import PinKeeper
from motet.router.rest_server import create_app
from motet.router.tenancy.account import Accountant
from motet.router.text.text import TextService
from motet.router.versions.canary_book import CanaryBook, CanaryJudge
from motet.tests.rigs.given_keys import give_key
from motet.tests.rigs.lora_files import LAYOUT, lora_files
from motet.tests.rigs.part_configs import router_config
from motet.tests.rigs.router_rig import BASE, HEADERS, KEYS, OPERATOR_KEY, FakeDispatcher, encoded


class VersionRig:
    """A router. Several may share a Redis."""

    def __init__(self, client: Redis, folder: Path, text: TextService, accountants: Sequence[Accountant] = ()) -> None:
        self._folder = folder
        self.digests: dict[int, str] = {}  # of the versions that were uploaded here
        self.registry = Registry(client)
        self.view = RegistryView(self.registry)
        self.dispatcher = FakeDispatcher(answer=encoded(text, "hi"))
        self.uploads = UploadService(
            AdapterStore(folder / "store"),
            self.registry,
            self.view,
            [LAYOUT],
            limits=UploadLimits(max_tensors_bytes=1 << 20),
            reserved=[BASE],
        )
        counts = CanaryCounts(client)
        self.canaries, self.judge = CanaryBook(counts), CanaryJudge(self.uploads, counts)
        self.gangs: list[Any] = []  # as the keeper of pins knows them
        self.keeper = PinKeeper(self.view.pins, lambda: self.gangs)
        self.app = create_app(
            config=CurrentConfig(router_config(BASE, folder / "spool")),
            dispatcher=self.dispatcher,
            view=self.view,
            uploads=self.uploads,
            text=text,
            operator_key=OPERATOR_KEY,
            canaries=self.canaries,
            accountants=accountants,
            preloads=Preloads(client),
            pins=self.keeper,
        )
        transport = httpx.ASGITransport(app=self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://router", headers=HEADERS)

    async def upload(
        self, seed: int, name: str = "x", *, headers: Mapping[str, str] | None = None, **fields: str
    ) -> httpx.Response:
        """Another seed, another content."""
        files = lora_files(seed=seed)
        response = await self.http.post(
            "/v1/adapters",
            data={"name": name, **fields},
            headers=headers,
            files={
                "adapter_config.json": files.config_bytes,
                "adapter_model.safetensors": files.write(self._folder).read_bytes(),
            },
        )

        if response.is_success:
            self.digests[response.json()["version"]] = response.json()["digest"]
        return response

    async def complete(
        self, model: str = "x", *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": model, "prompt": "hello", "max_tokens": 2, **fields}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def version_for(self, model: str = "x", **fields: Any) -> str:
        """Which version answers, as the answer says."""
        response = await self.complete(model, **fields)
        assert response.status_code == 200, response.text
        return response.headers["x-motet-version"]


@asynccontextmanager
async def version_rigs(
    client: Redis, folder: Path, text: TextService, num: int = 1, accountants: Sequence[Accountant] = ()
) -> AsyncIterator[Sequence[VersionRig]]:
    """So many routers of one motet."""
    rigs = [VersionRig(client, folder, text, accountants) for _ in range(num)]
    for key, tenant in KEYS.items():
        await give_key(rigs[0].registry, tenant, key)
    for rig in rigs:
        await rig.view.start()
        rig.canaries.start()
        rig.judge.start()
        rig.keeper.start()
    yield rigs
    for rig in rigs:
        await rig.http.aclose()
        await rig.keeper.stop()
        await rig.judge.stop()
        await rig.canaries.stop()
        await rig.view.stop()
