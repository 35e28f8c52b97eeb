"""/v1/batches: create, list, show, cancel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import CallerGone, NoSuchFile, QuotaExceeded, RegistryFull
from ...adapters.registry.batches.batch_registry import BatchRegistry
from ...adapters.registry.batches.file_registry import FileRegistry
from ...adapters.registry.batches.records import BATCH_PREFIX, FILE_PREFIX, BatchRecord, FileRecord, new_id
from ...adapters.registry.tenants.records import storage_bounds
from ...adapters.tenant_places import TenantPlaces
from ..bodies.request_decoder import ArrivalPace
from ..config import CurrentConfig
from ..http.auth import Identity
from ..http.errors import ApiError, invalid_value
from ..http.list_page import PAGE_QUERY, ListPage, list_answer, page_request
from ..http.route import route
from ..tenancy.quotas import Quotas
from ..uploads.adapters_api import DISK_FULL, MAX_WAITING_UPLOADS, too_many_uploads
from ..uploads.upload_form import FormReader, UploadSpool, declared_bytes
from .batch_files import FileContent, FileStore
from .schema import (
    ORDER_QUERY,
    Batch,
    BatchBody,
    DeletedFile,
    File,
    FileForm,
    page_of,
    requested_order,
    sees,
    shown_batch,
    shown_file,
)

# /v1/files: upload, list, show, read, delete.

_FILES: Final = "/v1/files"
_FILE: Final = f"{_FILES}/{{file_id}}"
_FIELD, _PURPOSE = "file", "purpose"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_MAX_NAME_CHARS: Final = 255
_SECONDS_RANGE: Final = range(3600, 2_592_001)
_LIST_QUERY: Final[dict[str, Any]] = {
    **PAGE_QUERY,
    ORDER_QUERY: Annotated[str, Meta(pattern="^(asc|desc)$", description="By time: the newest first, unless asc.")],
    _PURPOSE: Annotated[str, Meta(description="Only files of this purpose.")],
}


class FilesApi:
    def __init__(
        self,
        config: CurrentConfig,
        files: FileRegistry,
        store: FileStore,
        quotas: Quotas | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`quotas`: None: there are none."""
        self._config, self._files, self._store, self._quotas, self._clock = config, files, store, quotas, clock
        self._spool: UploadSpool | None = None
        self._open_uploads = TenantPlaces(config.now.max_open_uploads, config.now.max_tenant_uploads)

    @route(
        "POST",
        _FILES,
        scope="infer",
        summary="Upload a file for a batch.",
        form=FileForm,
        errors=(
            "invalid_value",
            "rate_limit_exceeded",
            "insufficient_quota",
            "uploads_full",
            "registry_unavailable",
            "insufficient_storage",
        ),
    )
    async def upload(self, request: Request, identity: Identity) -> File:
        """JSON lines: see `/v1/batches`. A batch says what is wrong with them."""
        if self._open_uploads.num_here(identity.name) >= MAX_WAITING_UPLOADS:
            raise too_many_uploads()
        if self._quotas is not None:
            await self._quotas.take_upload(identity)
        async with self._open_uploads.of(identity.name):
            try:
                return shown_file(await self._take(request, identity))
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                message = "The server's disk is too full for this file, which was not stored: send it again later."
                raise ApiError(507, message, code="insufficient_storage") from error

    async def _take(self, request: Request, identity: Identity) -> FileRecord:
        config = self._config.now
        limits = {_PURPOSE: 64, _FIELD: config.max_file_bytes, _ANCHOR: 64, _SECONDS: 16}
        reader = FormReader(limits, _FIELD, (_FIELD, _PURPOSE))
        reader.boundary(request)
        if self._spool is None:
            self._spool = await asyncio.to_thread(UploadSpool, self._store.arriving, config.min_free_bytes, 1)
        pace = ArrivalPace(config.upload_idle_s, config.upload_bytes_per_s, config.upload_deadline_s)
        with self._spool.room(declared_bytes(request) or 0) as room, self._spool.file() as path:
            await reader.receive(request, path, config.upload_idle_s, pace, room)
            if (purpose := reader.text(_PURPOSE, "The purpose")) != "batch":
                raise invalid_value(_PURPOSE, f"{purpose!r} is not supported: batch is.")
            now = int(self._clock())
            file = FileRecord(
                id=new_id(FILE_PREFIX),
                tenant=identity.name,
                incarnation=identity.tenant.incarnation,
                user=identity.user,
                key_id=identity.key.key_id,
                filename=(reader.filename or "file")[:_MAX_NAME_CHARS],
                num_bytes=reader.num_file_bytes,
                purpose="batch",
                created_at=now,
                expires_at=now + min(_kept_s(reader), config.file_days * 86_400),
            )
            await asyncio.to_thread(self._store.keep, path, file)
        try:
            bounds = storage_bounds(identity.tenant, identity.key, identity.user)
            await self._files.add(file, bounds, identity.last_event)
        except (CallerGone, QuotaExceeded, RegistryFull):  # after others it may be registered; if not, it is swept
            await asyncio.to_thread(self._store.delete, file.tenant_id, file.id)
            raise
        return file

    @route(
        "GET",
        _FILES,
        scope="infer",
        summary="List your files.",
        query=_LIST_QUERY,
        answers={200: ListPage[File]},
        errors=("registry_unavailable",),
    )
    async def list(self, request: Request, identity: Identity) -> Response:
        """A user sees its own, keys without a user those of such keys, and administrators all."""
        page_query, is_ascending = page_request(request), requested_order(request)
        purpose = request.query_params.get(_PURPOSE)

        def is_shown(file: FileRecord) -> bool:
            return self._is_there(identity, file) and (not purpose or file.purpose == purpose)

        pages = self._files.pages_of(identity.tenant.tenant_id, page_query.after, is_ascending=is_ascending)
        page, more = await page_of(pages, page_query.limit, is_shown)
        return await list_answer(map(shown_file, page), [file.id for file in page], more)

    @route("GET", _FILE, scope="infer", summary="Show a file.", errors=("file_not_found", "registry_unavailable"))
    async def show(self, request: Request, identity: Identity) -> File:
        return shown_file(await self.find(identity, request.path_params["file_id"]))

    @route(
        "GET",
        f"{_FILE}/content",
        scope="infer",
        summary="Read a file.",
        texts={"application/octet-stream": "The file as it was sent, or the lines that a batch has made."},
        errors=("file_not_found", "registry_unavailable"),
    )
    async def content(self, request: Request, identity: Identity) -> FileContent:
        file = await self.find(identity, request.path_params["file_id"])
        try:
            opened = await asyncio.to_thread(self._store.open, file.tenant_id, file.id)
        except FileNotFoundError as error:
            raise NoSuchFile("there is no such file") from error
        return FileContent(opened, file.num_bytes)

    @route(
        "DELETE",
        _FILE,
        scope="infer",
        summary="Delete a file.",
        errors=("file_not_found", "file_in_use", "registry_unavailable"),
    )
    async def delete(self, request: Request, identity: Identity) -> DeletedFile:
        """Not while a batch that has not ended reads it."""
        file = await self.find(identity, request.path_params["file_id"])
        await self.remove(file)
        return DeletedFile(id=file.id)

    async def find(self, identity: Identity, file_id: str) -> FileRecord:
        """Raises NoSuchFile, also for one that the caller does not see."""
        file = await self._files.get(identity.tenant.tenant_id, file_id)
        if file is None or not self._is_there(identity, file):
            raise NoSuchFile("there is no such file")
        return file

    def _is_there(self, identity: Identity, file: FileRecord) -> bool:
        """For the caller. One that has expired is not, though it is removed later: a batch may still read it."""
        return sees(identity, file) and file.expires_at > self._clock()

    async def remove(self, file: FileRecord) -> None:
        """Raises NoSuchFile, FileInUse, RegistryUnavailable."""
        await self._files.delete(file)
        await asyncio.to_thread(self._store.delete, file.tenant_id, file.id)


def _kept_s(reader: FormReader) -> int:
    anchor, seconds = reader.bytes_of(_ANCHOR), reader.bytes_of(_SECONDS)
    if not anchor and not seconds:
        return _SECONDS_RANGE[-1] * 1000
    if anchor != b"created_at":
        raise invalid_value(_ANCHOR, "it is created_at.")
    if not (seconds.isdigit() and int(seconds) in _SECONDS_RANGE):
        raise invalid_value(_SECONDS, f"it is a whole number from {_SECONDS_RANGE[0]} to {_SECONDS_RANGE[-1]}.")
    return int(seconds)


WINDOW_S: Final = 86_400
_BATCHES: Final = "/v1/batches"
_BATCH: Final = f"{_BATCHES}/{{batch_id}}"


class BatchesApi:
    def __init__(
        self, config: CurrentConfig, batches: BatchRegistry, files: FilesApi, wake: Callable[[], None]
    ) -> None:
        """`wake`: is called when there is a new batch."""
        self._config, self._batches, self._files, self._wake = config, batches, files, wake

    @route(
        "POST",
        _BATCHES,
        scope="infer",
        summary="Have the lines of a file answered within a day.",
        errors=("file_not_found", "insufficient_quota", "registry_unavailable"),
    )
    async def create(self, request: Request, identity: Identity, body: BatchBody) -> Batch:
        """Each line is a request to `endpoint`: `custom_id`, `method`, `url` and `body`. All yield to other work."""
        file = await self._files.find(identity, body.input_file_id)
        now = int(self._batches.clock())
        batch = BatchRecord(
            id=new_id(BATCH_PREFIX),
            tenant=identity.name,
            incarnation=identity.tenant.incarnation,
            user=identity.user,
            key_id=identity.key.key_id,
            subject=identity.subject,
            token=identity.key if identity.subject else None,
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            metadata=body.metadata,
            output_kept_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
            created_at=now,
            expires_at=now + WINDOW_S,
        )
        kept_until = now + WINDOW_S + self._config.now.file_days * 86_400
        await self._batches.add(batch, kept_until, identity.last_event)
        self._wake()
        return shown_batch(batch)

    @route(
        "GET",
        _BATCHES,
        scope="infer",
        summary="List your batches.",
        query=PAGE_QUERY,
        answers={200: ListPage[Batch]},
        errors=("registry_unavailable",),
    )
    async def list(self, request: Request, identity: Identity) -> Response:
        """The newest first. Whose are seen: as files."""
        page_query = page_request(request)
        pages = self._batches.pages_of(identity.tenant.tenant_id, page_query.after)
        page, more = await page_of(pages, page_query.limit, lambda batch: sees(identity, batch))
        return await list_answer(map(shown_batch, page), [batch.id for batch in page], more)

    @route("GET", _BATCH, scope="infer", summary="Show a batch.", errors=("batch_not_found", "registry_unavailable"))
    async def show(self, request: Request, identity: Identity) -> Batch:
        return shown_batch(await self._find(request, identity))

    @route(
        "POST",
        f"{_BATCH}/cancel",
        scope="infer",
        summary="Cancel a batch.",
        errors=("batch_not_found", "batch_ended", "registry_unavailable"),
    )
    async def cancel(self, request: Request, identity: Identity) -> Batch:
        """Lines that are under way are answered; no other is begun."""
        record = await self._find(request, identity)
        batch = await self._batches.cancel(record.tenant_id, record.id)
        if batch is None:
            raise _not_found()
        if batch.has_ended:
            raise ApiError(409, f"The batch is {batch.status}, and cannot be cancelled.", code="batch_ended")
        return shown_batch(batch)

    async def _find(self, request: Request, identity: Identity) -> BatchRecord:
        """Raises 404, also for one that the caller does not see."""
        batch = await self._batches.get(identity.tenant.tenant_id, request.path_params["batch_id"])
        if batch is None or not sees(identity, batch):
            raise _not_found()
        return batch


def _not_found() -> ApiError:
    return ApiError(404, "There is no such batch.", param="batch_id", code="batch_not_found")
