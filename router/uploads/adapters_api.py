"""/v1/adapters: upload, list, show, delete."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.adapter import AdapterVersion
from ...adapters.errors import (
    AdapterInvalid,
    QuotaExceeded,
    RegistryUnavailable,
    TenantGone,
    UploadTooLarge,
    VersionRefused,
)
from ...adapters.registry.tenants.storage_bounds import storage_bounds
from ...adapters.registry.versions.name_state import VersionNote
from ...adapters.upload import UploadService
from ..access.request_record import record_of
from ..bodies.arrival import ArrivalPace
from ..bodies.turns import Turns
from ..config import CurrentConfig
from ..metrics import Metrics
from ..openai_api.errors import ApiError, insufficient_quota, unavailable
from ..openai_api.list_page import PAGE_QUERY, ListPage, encoded_list, page_request, read_page
from ..route import RouteSpec
from ..tenants.auth import Authenticator, unknown_key
from ..tenants.identity import Identity
from .upload_form import AdapterForm, check_form, declared_bytes, receive_upload
from .upload_spool import UploadSpool

MAX_WAITING_UPLOADS: Final = 64  # of a tenant at a router, with those under way: each holds a connection
_name: Final = attrgetter("name")
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A name's current version."""

    name: str
    version: int
    digest: str  # SHA-256 of what it computes
    rank: int
    targets: tuple[str, ...]
    bytes: int
    created_at: int  # Unix time, seconds
    object: Literal["adapter"] = "adapter"


class DeletedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True


class AdaptersApi:
    """Handlers of a tenant's adapters. They ask the registry itself and not this router's copy of it."""

    def __init__(
        self, config: CurrentConfig, authenticator: Authenticator, uploads: UploadService, metrics: Metrics
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._authenticator = authenticator
        self._uploads = uploads
        self._spool = UploadSpool(config.now.spool_path, config.now.min_free_bytes)
        self._open_uploads = asyncio.Semaphore(config.now.max_open_uploads)
        self._tenants_uploads = Turns(config.now.max_tenant_uploads)

    def routes(self) -> Sequence[RouteSpec]:
        route = partial(RouteSpec, scope="upload")
        return (
            route(
                method="POST",
                path="/v1/adapters",
                handler=self.upload,
                summary="Upload an adapter.",
                form=AdapterForm,
                answers={200: Adapter, 201: Adapter},
                errors=(
                    "invalid_adapter",
                    "version_refused",
                    "insufficient_quota",
                    "uploads_full",
                    "registry_unavailable",
                    "insufficient_storage",
                ),
            ),
            route(
                method="GET",
                path="/v1/adapters",
                handler=self.list,
                summary="List your adapters.",
                answers={200: ListPage[Adapter]},
                query=PAGE_QUERY,
                errors=("registry_unavailable",),
            ),
            route(
                method="GET",
                path="/v1/adapters/{name}",
                handler=self.show,
                summary="Show an adapter.",
                answers={200: Adapter},
                errors=("adapter_not_found", "registry_unavailable"),
            ),
            route(
                method="DELETE",
                path="/v1/adapters/{name}",
                handler=self.delete,
                summary="Delete an adapter.",
                answers={200: DeletedAdapter},
                errors=("adapter_not_found", "registry_unavailable"),
            ),
        )

    async def upload(self, request: Request) -> Response:
        """201 for a new version, 200 for content that the name already points to."""
        started_at = time.perf_counter()
        identity = self._authenticator.identify(request, "upload")
        tenant = identity.name
        if self._tenants_uploads.num_here(tenant) >= MAX_WAITING_UPLOADS:
            raise _too_many_uploads()
        # Its own turns first, so that a tenant who waits for them takes nobody else's.
        async with (
            self._tenants_uploads.of(tenant),
            self._open_uploads,
        ):  # held until the adapter is stored, because until then the spool takes disk
            try:
                adapter, created = await self._receive(request, identity)
            except AdapterInvalid as error:
                raise ApiError(400, str(error), code="invalid_adapter") from error
            except TenantGone as error:
                raise unknown_key() from error
            except VersionRefused as error:
                raise ApiError(409, str(error), param="activate", code="version_refused") from error
            except UploadTooLarge as error:
                raise ApiError(413, str(error), code="too_large") from error
            except QuotaExceeded as error:
                raise insufficient_quota(str(error)) from error
            except RegistryUnavailable as error:
                raise _registry_away(error) from error
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                raise _disk_full() from error
        record_of(request.scope).model = adapter.name
        self._metrics.upload_s.observe(time.perf_counter() - started_at)
        self._metrics.num_upload_bytes += adapter.num_bytes
        return _json(_shown(adapter), 201 if created else 200)

    async def _receive(self, request: Request, identity: Identity) -> tuple[AdapterVersion, bool]:
        config = self._config.now
        pace = ArrivalPace(config.upload_idle_s, config.upload_bytes_per_s, config.upload_deadline_s)
        check_form(request, config.max_upload_bytes)
        with self._spool.room(declared_bytes(request) or 0) as room, self._spool.file() as tensors_path:
            form = await receive_upload(
                request, tensors_path, config.max_upload_bytes, config.upload_idle_s, pace, room
            )
            return await self._uploads.upload(
                identity.name,
                form.name,
                form.config,
                tensors_path,
                activate=form.activate,
                note=VersionNote(form.note, identity.key.key_id),
                incarnation=identity.tenant.incarnation,
                entry=identity.entry(request, "adapter.upload", form.name),
                bounds=storage_bounds(identity.tenant, identity.key),
            )

    async def list(self, request: Request) -> Response:
        """By name."""
        tenant = self._authenticator.identify(request, "upload").name
        wanted = page_request(request)
        try:
            adapters, more = await read_page(partial(self._uploads.list_page, tenant), _name, wanted)
        except RegistryUnavailable as error:
            raise _registry_away(error) from error
        body = await encoded_list([_shown(adapter) for adapter in adapters], [*map(_name, adapters)], more)
        return Response(body, media_type="application/json")

    async def show(self, request: Request) -> Response:
        """The version that requests with its name get now."""
        tenant = self._authenticator.identify(request, "upload").name
        name = request.path_params["name"]
        try:
            adapter = await self._uploads.get(tenant, name)
        except RegistryUnavailable as error:
            raise _registry_away(error) from error
        if adapter is None:
            raise _not_found(name)
        record_of(request.scope).model = name
        return _json(_shown(adapter))

    async def delete(self, request: Request) -> Response:
        """Requests that are under way finish on it."""
        identity = self._authenticator.identify(request, "upload")
        name = request.path_params["name"]
        try:
            deleted = await self._uploads.delete(identity.name, name, identity.entry(request, "adapter.delete", name))
        except RegistryUnavailable as error:
            raise _registry_away(error) from error
        if not deleted:
            raise _not_found(name)
        record_of(request.scope).model = name
        return _json(DeletedAdapter(name=name))


def _shown(adapter: AdapterVersion) -> Adapter:
    return Adapter(
        name=adapter.name,
        version=adapter.version,
        digest=adapter.digest,
        rank=adapter.rank,
        targets=adapter.targets,
        bytes=adapter.num_bytes,
        created_at=int(adapter.created_at),
    )


def _json(body: Any, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")


def _not_found(name: str) -> ApiError:
    return ApiError(404, f"The adapter `{name}` does not exist.", param="name", code="adapter_not_found")


def _disk_full() -> ApiError:
    message = (
        "The server's disk is too full for this adapter, which was not stored: free some space, then upload it again."
    )
    return ApiError(507, message, code="insufficient_storage")


def _too_many_uploads() -> ApiError:
    message = f"{MAX_WAITING_UPLOADS} uploads of yours are under way or wait for their turn: try again later."
    headers = {"Retry-After": "10", "Connection": "close"}
    return ApiError(429, message, code="uploads_full", headers=headers)


def _registry_away(error: RegistryUnavailable) -> ApiError:
    return unavailable(f"Adapters cannot be read or changed now, try again: {error}", "registry_unavailable")
