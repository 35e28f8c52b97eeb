"""Responses that are stored where operators allow it, each with the whole conversation that it answers.

A record of it is in Redis, as of a file. On the disk are the items of the conversation, behind their number of bytes,
and the response. The record is made before the file, and removed after it, so no file stays without one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, BinaryIO, Final, TypeVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from ...adapters.errors import AdapterError, NoSuchFile, QuotaExceeded
from ...adapters.registry.batches.file_registry import FileRegistry
from ...adapters.registry.batches.records import FileRecord
from ...adapters.registry.tenants.records import StorageBound, storage_bounds
from ..config import CurrentConfig
from ..http.auth import Identity
from ..http.errors import ApiError, NoSuchResponse, from_adapter_error, insufficient_quota, internal_error, unsupported
from ..http.list_page import PAGE_QUERY, list_answer, page_request
from ..http.route import route
from ..http.stream_position import parse_response_id
from ..responses.response_chat import input_page
from ..responses.response_schema import DeletedResponse, InputItemList, Response
from ..uploads.adapters_api import DISK_FULL
from .batch_files import FileContent, FileStore
from .schema import ORDER_QUERY, requested_order, sees

MAX_RECALLED: Final = 256  # responses that one request refers to
DAY_S: Final = 86_400
_HEAD_BYTES: Final = 16  # hexadecimal digits
T = TypeVar("T")
_log = logging.getLogger(__name__)


class StoredResponses:
    def __init__(
        self,
        config: CurrentConfig,
        records: FileRegistry,
        store: FileStore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._records, self._store, self._clock = config, records, store, clock
        self._adding = set[asyncio.Task[None]]()

    @property
    def is_on(self) -> bool:
        return self._config.now.response_days > 0

    async def check(self, identity: Identity, num_bytes: int) -> None:
        """Raises what `add` would raise now for a response to a conversation of this size."""
        with _as_api_errors():
            await self._records.check(self._record(identity, "", num_bytes), _bounds(identity), identity.last_event)
            await asyncio.to_thread(self._store.check_room, num_bytes)

    async def add(self, identity: Identity, response_id: str, conversation: bytes, response: bytes) -> None:
        """Stores it, also if the caller is cancelled meanwhile: then its client has left with the end in sight.

        `conversation`: JSON of the items that `response` answers. Raises ApiError.
        """
        pieces = [b"%0*x" % (_HEAD_BYTES, len(conversation)), conversation, response]
        adding = asyncio.create_task(self._add(identity, response_id, pieces))
        self._adding.add(adding)
        adding.add_done_callback(self._adding.discard)
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(partial(_log_failure, response_id))
            raise

    async def wait(self) -> None:
        """Until all is stored that was to be."""
        await asyncio.gather(*self._adding, return_exceptions=True)

    async def find(self, identity: Identity, response_id: str) -> FileRecord:
        """Raises 404, also for one that the caller does not see."""
        if parse_response_id(response_id) is None:
            raise NoSuchResponse()
        record = await self._records.get(identity.tenant.tenant_id, response_id)
        if record is None or not sees(identity, record) or record.expires_at <= self._clock():
            raise NoSuchResponse()
        return record

    async def open(self, record: FileRecord) -> FileContent:
        """JSON of the response. Raises 404."""
        opened, num_before = await asyncio.to_thread(self._opened, record)
        opened.seek(num_before, os.SEEK_CUR)
        num_bytes = record.num_bytes - _HEAD_BYTES - num_before
        return FileContent(opened, num_bytes, b"application/json")

    async def with_conversation(self, record: FileRecord, work: Callable[[bytes], T]) -> T:
        """What `work` makes, in a thread, of the JSON of the items that the response answers. Raises 404."""

        def run() -> T:
            opened, num_bytes = self._opened(record)
            with opened:
                return work(opened.read(num_bytes))

        return await asyncio.to_thread(run)

    async def recall(self, identity: Identity, response_ids: Sequence[str], most_bytes: int) -> bytes:
        """JSON of those that there are: id → `KeptConversation`. Raises 400 and 413 for too many."""
        if len(response_ids) > MAX_RECALLED:
            message = f"The request refers to {len(response_ids)} responses: at most {MAX_RECALLED} are accepted."
            raise ApiError(400, message, param="input", code="invalid_value")
        records = list[FileRecord]()
        for response_id in response_ids:
            with suppress(NoSuchResponse):
                records.append(await self.find(identity, response_id))
        if (num_bytes := sum(record.num_bytes for record in records)) > most_bytes:
            message = f"The stored conversation has {num_bytes} bytes: at most {most_bytes} are accepted."
            raise ApiError(413, message, code="request_too_large")
        documents = list[bytes]()
        for record in records:
            with suppress(NoSuchResponse):
                documents.append(await asyncio.to_thread(self._recalled, record))
        return b"{" + b",".join(documents) + b"}"

    async def remove(self, tenant_id: str, response_id: str) -> bool:
        """Whether it was there. Its file goes first: see above."""
        record = await self._records.get(tenant_id, response_id)
        if record is None:
            return False
        await asyncio.to_thread(self._store.delete, tenant_id, response_id)
        with suppress(NoSuchFile):
            await self._records.delete(record)
        return True

    async def remove_of_user(self, tenant_id: str, user: str) -> int:
        """Returns how many there were."""
        num_removed = 0
        async for page in self._records.scan(tenant_id):
            for record in page:
                if record.user == user:
                    num_removed += await self.remove(tenant_id, record.id)
        return num_removed

    async def retire(self, tenant_id: str) -> None:
        """A tenant is deleted, and its records are gone."""
        await asyncio.to_thread(self._store.retire, tenant_id)

    async def _add(self, identity: Identity, response_id: str, pieces: Sequence[bytes]) -> None:
        record = self._record(identity, response_id, sum(map(len, pieces)))
        with _as_api_errors():
            await self._records.add(record, _bounds(identity), identity.last_event)
            try:
                await asyncio.to_thread(self._store.write, record, pieces)
            except OSError:
                with suppress(AdapterError):  # then it expires
                    await self._records.delete(record)
                raise
            if await self._records.get(record.tenant_id, record.id) is None:  # deleted meanwhile, by user or tenant
                await asyncio.to_thread(self._store.delete, record.tenant_id, record.id)

    def _record(self, identity: Identity, response_id: str, num_bytes: int) -> FileRecord:
        now = int(self._clock())
        return FileRecord(
            id=response_id,
            tenant=identity.name,
            incarnation=identity.tenant.incarnation,
            user=identity.user,
            key_id=identity.key.key_id,
            num_bytes=num_bytes,
            created_at=now,
            expires_at=now + self._config.now.response_days * DAY_S,
        )

    def _opened(self, record: FileRecord) -> tuple[BinaryIO, int]:
        """The file, read up to the conversation, which has so many bytes. Raises 404."""
        try:
            opened = self._store.open(record.tenant_id, record.id)
        except FileNotFoundError as error:
            raise NoSuchResponse() from error
        return opened, int(opened.read(_HEAD_BYTES), 16)

    def _recalled(self, record: FileRecord) -> bytes:
        """An entry of what `recall` returns."""
        opened, num_bytes = self._opened(record)
        with opened:
            parts = (record.id.encode(), opened.read(num_bytes), opened.read())
        return b'"%b":{"input":%b,"response":%b}' % parts


def _log_failure(response_id: str, adding: asyncio.Task[None]) -> None:
    if not adding.cancelled() and (error := adding.exception()) is not None:
        _log.warning("%s, whose client has left, was not stored: %s", response_id, error)


def _bounds(identity: Identity) -> Sequence[StorageBound]:
    return storage_bounds(identity.tenant, identity.key, identity.user)


@contextmanager
def _as_api_errors() -> Iterator[None]:
    """What keeps a response from being stored, as the answer to its request."""
    try:
        yield
    except QuotaExceeded as error:
        raise insufficient_quota(f"{error}; or send store: false") from error
    except AdapterError as error:
        raise from_adapter_error(error) or internal_error() from error
    except OSError as error:
        if error.errno not in DISK_FULL:
            _log.exception("a response could not be stored")
            raise internal_error() from error
        message = "The server's disk is too full to store the response: send store: false, or try again later."
        raise ApiError(507, message, code="insufficient_storage") from error


# /v1/responses/{response_id}: what is stored of a response, by the caller's own requests.

_RESPONSE: Final = "/v1/responses/{response_id}"
_STREAM: Final = "stream"
_PAGE_SIZE: Final = 20  # OpenAI's
_ITEMS_QUERY: Final[dict[str, Any]] = {
    **PAGE_QUERY,
    ORDER_QUERY: Annotated[str, Meta(pattern="^(asc|desc)$", description="The newest first, unless asc.")],
}


class ResponsesApi:
    def __init__(self, responses: StoredResponses) -> None:
        self._responses = responses

    @route(
        "GET",
        _RESPONSE,
        scope="infer",
        summary="Show a stored response.",
        query={_STREAM: Annotated[str, Meta(description="Refused but false.")]},
        answers={200: Response},
        errors=("response_not_found", "registry_unavailable", "unsupported_parameter"),
    )
    async def show(self, request: Request, identity: Identity) -> FileContent:
        """As it was answered. A user sees its own, keys that are no user's those of such keys, administrators all."""
        if request.query_params.get(_STREAM, "false") != "false":
            raise unsupported(_STREAM, "what is stored is sent as one document: leave it out.")
        record = await self._responses.find(identity, request.path_params["response_id"])
        return await self._responses.open(record)

    @route(
        "GET",
        f"{_RESPONSE}/input_items",
        scope="infer",
        summary="List the items that a stored response answers.",
        query=_ITEMS_QUERY,
        answers={200: InputItemList},
        errors=("response_not_found", "registry_unavailable"),
    )
    async def input_items(self, request: Request, identity: Identity) -> HttpResponse:
        """Those of the conversation before it included. Of long ones a page has fewer."""
        page_query, is_ascending = page_request(request), requested_order(request)
        limit = page_query.limit if "limit" in request.query_params else _PAGE_SIZE
        record = await self._responses.find(identity, request.path_params["response_id"])
        read = partial(
            input_page, response_id=record.id, after=page_query.after, limit=limit, is_ascending=is_ascending
        )
        page, more = await self._responses.with_conversation(record, read)
        return await list_answer(page, [item.id for item in page], more)

    @route(
        "DELETE",
        _RESPONSE,
        scope="infer",
        summary="Delete a stored response.",
        errors=("response_not_found", "registry_unavailable"),
    )
    async def delete(self, request: Request, identity: Identity) -> DeletedResponse:
        """Later ones of its conversation stay, with all that they answer."""
        record = await self._responses.find(identity, request.path_params["response_id"])
        if not await self._responses.remove(record.tenant_id, record.id):
            raise NoSuchResponse()
        return DeletedResponse(id=record.id)
