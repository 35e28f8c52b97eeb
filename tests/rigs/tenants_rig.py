"""A router's app over a real registry, with tenants and keys made through its API; generation is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, cast

import httpx
from redis.asyncio import Redis

from motet.adapters.registry.administration.administration import Administration
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload import UploadLimits, UploadService
from motet.router.config import CurrentConfig
from motet.router.http.auth import Tokens
from motet.router.rest_server import create_app
from motet.tests.rigs.lora_files import LAYOUT
from motet.tests.rigs.part_configs import router_config
from motet.tests.rigs.router_rig import BASE, OPERATOR_KEY, FakeDispatcher, text_service


class TenantsRig:
    """Use it as a context manager."""

    def __init__(self, client: Redis, folder: Path, tokens: Tokens | None = None, **given: Any) -> None:
        self.registry = Registry(client)
        self.view = RegistryView(self.registry)
        self.dispatcher = FakeDispatcher(answer=[40, 41])
        limits = UploadLimits(max_tensors_bytes=1 << 20)
        self.uploads = UploadService(AdapterStore(folder / "store"), self.registry, self.view, [LAYOUT], limits)
        self.config = CurrentConfig(router_config(BASE, folder / "spool"))
        self.app = create_app(
            config=self.config,
            dispatcher=self.dispatcher,
            view=self.view,
            uploads=self.uploads,
            text=text_service(),
            operator_key=OPERATOR_KEY,
            administration=Administration.of(client),
            tokens=tokens,
            **given,
        )
        transport = httpx.ASGITransport(app=self.app)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://router")

    async def __aenter__(self) -> Self:
        await self.view.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        await self.view.stop()

    async def ask(self, method: str, path: str, key: str = OPERATOR_KEY, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self._http.request(method, path, headers=headers, **options)

    async def ask_from(self, position: str, path: str, key: str, **options: Any) -> httpx.Response:
        """For the rest of a stream, behind the event with this id."""
        headers = {"Authorization": f"Bearer {key}", "Last-Event-ID": position}
        return await self._http.request("POST", path, headers=headers, **options)

    async def done(self, method: str, path: str, key: str = OPERATOR_KEY, **options: Any) -> Any:
        """The answer's JSON. The request must not be refused."""
        response = await self.ask(method, path, key, **options)
        assert response.is_success, response.text
        return response.json()

    async def refused(self, method: str, path: str, key: str = OPERATOR_KEY, **options: Any) -> tuple[int, str]:
        """Status and code of the error."""
        response = await self.ask(method, path, key, **options)
        return response.status_code, cast(str, response.json()["error"]["code"])

    async def make_key(self, tenant: str, *scopes: str, **fields: Any) -> str:
        """A new key of a tenant that there is."""
        body = {"scopes": list(scopes), **fields} if scopes else fields
        made = await self.done("POST", f"/v1/admin/tenants/{tenant}/keys", json=body)
        return cast(str, made["key"])
