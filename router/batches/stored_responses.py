"""Responses that are stored where operators allow it, each with the whole conversation that it answers.

A record of it is in Redis, as of a file. On the disk its first line is the response, and its second one the items
before it. The record is made before the file, and removed after it, so no file is ever without one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from ...adapters.errors import AdapterError, NoSuchFile, QuotaExceeded
from ...adapters.registry.batches.file_registry import FileRegistry
from ...adapters.registry.batches.records import FileRecord
from ...adapters.registry.tenants.storage_bounds import StorageBound, storage_bounds
from ..config import CurrentConfig
from ..openai_api.errors import ApiError, NoSuchResponse, from_adapter_error, insufficient_quota, internal_error
from ..openai_api.response_id import parse_response_id
from ..tenants.identity import Identity
from ..uploads.adapters_api import DISK_FULL
from .file_store import FileStore
from .ownership import sees

MAX_RECALLED: Final = 256  # responses that one request refers to
DAY_S: Final = 86_400
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
        self._keeping = set[asyncio.Task[None]]()

    @property
    def is_on(self) -> bool:
        return self._config.now.response_days > 0

    async def check(self, identity: Identity, num_bytes: int) -> None:
        """Raises what `keep` would raise now for a response to a conversation of this size."""
        with _as_api_errors():
            await self._records.check(self._record(identity, "", num_bytes), _bounds(identity))
            await asyncio.to_thread(self._store.check_room, num_bytes)

    async def keep(self, identity: Identity, response_id: str, conversation: bytes, response: bytes) -> None:
        """Stores it, also if the caller is cancelled meanwhile: then its client has left with the end in sight.

        `conversation`: JSON of the items that `response` answers. Raises ApiError.
        """
        keeping = asyncio.create_task(self._keep(identity, response_id, [response, b"\n", conversation]))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._kept)
        await asyncio.shield(keeping)

    async def wait(self) -> None:
        """Until all is stored that was to be."""
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def find(self, identity: Identity, response_id: str) -> FileRecord:
        """Raises 404, also for one that the caller does not see."""
        if parse_response_id(response_id) is None:
            raise NoSuchResponse()
        record = await self._records.get(identity.tenant.tenant_id, response_id)
        if record is None or not sees(identity, record) or record.expires_at <= self._clock():
            raise NoSuchResponse()
        return record

    async def read(self, record: FileRecord) -> tuple[bytes, bytes]:
        """JSON of the response, and of the items before it. Raises 404."""
        try:
            content = await asyncio.to_thread(self._content, record)
        except FileNotFoundError as error:
            raise NoSuchResponse() from error
        end = content.index(b"\n")
        return content[:end], content[end + 1 :]

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
        found = list[bytes]()
        for record in records:
            with suppress(NoSuchResponse):
                response, conversation = await self.read(record)
                found.append(b'"%b":{"input":%b,"response":%b}' % (record.id.encode(), conversation, response))
        return b"{" + b",".join(found) + b"}"

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

    async def _keep(self, identity: Identity, response_id: str, pieces: Sequence[bytes]) -> None:
        record = self._record(identity, response_id, sum(map(len, pieces)))
        with _as_api_errors():
            await self._records.add(record, _bounds(identity))
            try:
                await asyncio.to_thread(self._store.write, record, pieces)
            except OSError:
                with suppress(AdapterError):  # then it expires
                    await self._records.delete(record)
                raise

    def _kept(self, keeping: asyncio.Task[None]) -> None:
        self._keeping.discard(keeping)
        if not keeping.cancelled():
            keeping.exception()  # a caller that has left asks for none

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

    def _content(self, record: FileRecord) -> bytes:
        with self._store.open(record.tenant_id, record.id) as opened:
            return opened.read()


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
