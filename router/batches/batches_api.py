"""/v1/batches: create, list, show, cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ...adapters.registry.batches.batch_registry import BatchRegistry
from ...adapters.registry.batches.records import BATCH_PREFIX, BatchRecord, new_id
from ..config import CurrentConfig
from ..openai_api.errors import ApiError
from ..openai_api.list_page import PAGE_QUERY, ListPage, list_answer, page_request
from ..route import route
from ..tenants.identity import Identity
from .files_api import FilesApi
from .ownership import page_of, sees
from .schema import Batch, BatchBody, shown_batch

WINDOW_S: Final = 86_400
_PATH: Final = "/v1/batches"
_BATCH: Final = f"{_PATH}/{{batch_id}}"


class BatchesApi:
    def __init__(
        self, config: CurrentConfig, batches: BatchRegistry, files: FilesApi, wake: Callable[[], None]
    ) -> None:
        """`wake`: is called when there is a new batch."""
        self._config, self._batches, self._files, self._wake = config, batches, files, wake

    @route(
        "POST",
        _PATH,
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
        _PATH,
        scope="infer",
        summary="List your batches.",
        query=PAGE_QUERY,
        answers={200: ListPage[Batch]},
        errors=("registry_unavailable",),
    )
    async def list(self, request: Request, identity: Identity) -> Response:
        """The newest first. Whose are seen: as files."""
        wanted = page_request(request)
        pages = self._batches.pages_of(identity.tenant.tenant_id, wanted.after)
        page, more = await page_of(pages, wanted.limit, lambda batch: sees(identity, batch))
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
        found = await self._find(request, identity)
        batch = await self._batches.cancel(found.tenant_id, found.id)
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
