"""Receives and decodes requests' JSON bodies, so that no tenant's bodies take other tenants' time or memory."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from ...adapters.processes.child_processes import ChildProcesses
from ..http.access_log import record_of
from ..http.errors import ApiError, NoSuchResponse
from ..http.json_body import decode, unknown_fields
from ..metrics import Metrics
from .decode_process import Question, Refusal
from .request_decoder import (
    BODY_KINDS,
    MAX_BYTES_ON_LOOP,
    ArrivalPace,
    BodyRequest,
    PackedRequest,
    RequestDecoder,
    check_extent,
    unpacked,
)

# A bounded number of turns at once for each tenant.


class Turns:
    """Lets at most `limit` of each tenant inside at once; others wait in the order of their arrival.

    It keeps only tenants that have a turn or wait for one. Belongs to one event loop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: dict[str, asyncio.Semaphore] = {}
        self._num_here: Counter[str] = Counter()

    def num_here(self, tenant: str) -> int:
        """How many have a turn or wait for one."""
        return self._num_here[tenant]

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        places = self._places.setdefault(tenant, asyncio.Semaphore(self._limit))
        self._num_here[tenant] += 1
        try:
            async with places:
                yield
        finally:
            self._num_here[tenant] -= 1
            if not self._num_here[tenant]:
                del self._num_here[tenant], self._places[tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError if a tenant is kept that has no turn and waits for none."""
        assert self._places.keys() == self._num_here.keys()
        assert all(number > 0 for number in self._num_here.values())


# The memory that bodies of requests may take in a router while they arrive and are decoded.

TENANT_SHARE: Final = 4  # one tenant may hold a fourth of a router's budget
RETRY_AFTER_S: Final = 1


class BodyBudget:
    """Counts bytes that are held, by tenant. Bytes count when they are there: a declared length holds nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max(1, max_bytes // TENANT_SHARE)
        self._tenant_bytes: Counter[str] = Counter()
        self.num_held = 0  # bytes of all tenants

    def take(self, tenant: str, num_bytes: int) -> None:
        """Counts bytes that have arrived. Raises 429, and counts nothing, if they are too many."""
        if not num_bytes:
            return  # the end of a body: only tenants that hold bytes are kept
        if self._tenant_bytes[tenant] + num_bytes > self._max_tenant_bytes:
            raise _full(
                f"Your requests that are arriving hold {self._tenant_bytes[tenant]} bytes", self._max_tenant_bytes
            )
        if self.num_held + num_bytes > self._max_bytes:
            raise _full("Requests that are arriving hold this router's memory for them", self._max_bytes)
        self._tenant_bytes[tenant] += num_bytes
        self.num_held += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self._tenant_bytes[tenant] -= num_bytes
        self.num_held -= num_bytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError if bytes are miscounted, or a tenant that holds nothing is remembered."""
        assert self.num_held == self._tenant_bytes.total()
        assert all(0 < num_bytes <= self._max_tenant_bytes for num_bytes in self._tenant_bytes.values())
        assert self.num_held <= self._max_bytes


def _full(problem: str, limit: int) -> ApiError:
    message = f"{problem}, of at most {limit}: send fewer large requests at once, or try again in a moment."
    headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}  # its body is not read to the end
    return ApiError(429, message, code="bodies_full", headers=headers)


# Decodes large bodies in processes beside the router.

NUM_PROCESSES: Final = 2
DEADLINE_S: Final = 60.0  # for one body; the largest take a second or two

_MODULE: Final = "motet.router.bodies.decode_process"
_log = logging.getLogger(__name__)

R = TypeVar("R", bound=BodyRequest)


class BodyDecoder:
    """Starts its processes at first use; they end with it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._processes = ChildProcesses(_MODULE, NUM_PROCESSES, DEADLINE_S)

    async def decode(
        self, body: bytearray, kind: type[R], context: int | None, conversations: bytes | None
    ) -> tuple[R, list[str]]:
        """The request in the body, checked for its extent, and the fields that its schema lacks.

        `conversations`: see `RequestDecoder.decode`.

        Raises ApiError for one that does not fit the schema.

        Raises 413 for a body that cannot be decoded in time or in the memory that is there.
        """

        def read(frames: list[bytes]) -> tuple[R, list[str]] | Refusal:
            head, *tail = frames
            if not tail:
                return msgspec.msgpack.decode(head, type=Refusal)
            values, unknown, *pieces = tail
            request = unpacked(PackedRequest(head, values, pieces), kind)
            return request, msgspec.msgpack.decode(unknown, type=list[str])

        question = msgspec.msgpack.encode(Question(kind.__name__, context))
        try:
            async with self._processes.process() as process:
                outcome = await process.ask([question, body, *([] if conversations is None else [conversations])], read)
        except (OSError, EOFError, TimeoutError) as error:
            _log.warning("a body of %d bytes could not be decoded: %r", len(body), error)
            raise ApiError(413, "The request's body takes too long to decode.", code="request_too_large") from error
        if isinstance(outcome, Refusal):
            refusal = ApiError(outcome.status_code, outcome.message, param=outcome.param, code=outcome.code)
            if outcome.response_ids is not None:
                refusal = NoSuchResponse(outcome.param or "", outcome.response_ids)
            refusal.is_as_sent = outcome.is_as_sent
            raise refusal
        return outcome


# Bodies of requests that change something: JSON of a few kilobytes, read at once.

T = TypeVar("T")
MAX_BYTES: Final = 16 << 10
_DEADLINE_S: Final = 10.0


async def small_body(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded body; an empty one counts as {}. Raises 400, 408 for one that arrives too slowly, and 413."""
    body = bytearray()
    try:
        async with asyncio.timeout(_DEADLINE_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > MAX_BYTES:
                    message = f"The request's body is larger than {MAX_BYTES} bytes."
                    raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
                body += chunk
    except TimeoutError:
        message = f"The request's body did not come within {_DEADLINE_S:g} s."
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    return decode(body or b"{}", decoder)


PACE: Final = ArrivalPace(grace_s=10.0, bytes_per_s=32 << 10, deadline_s=120.0)
TRIM_BYTES: Final = 8 << 20  # of released bodies, after which their memory is returned to the machine

# JSON of the stored responses with these ids, which has at most so many bytes: see `RequestDecoder.decode`.
Recall = Callable[[Sequence[str], int], Awaitable[bytes]]


class BodyReader:
    """Belongs to one event loop. `budget` bounds the bytes of bodies that are not decoded yet."""

    def __init__(self, max_held_bytes: int, metrics: Metrics, pace: ArrivalPace = PACE) -> None:
        self.budget = BodyBudget(max_held_bytes)
        self._metrics = metrics
        self._pace = pace
        self._decoder = BodyDecoder()
        self._turns = Turns(1)
        self._small: Final[Mapping[type[Any], RequestDecoder[Any]]] = {
            kind: RequestDecoder(kind) for kind in BODY_KINDS
        }
        self._num_untrimmed = 0  # bytes of large bodies that were released since the last trim
        self._trimming: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def open(
        self,
        http: Request,
        tenant: str,
        kind: type[R],
        *,
        max_bytes: int,
        context: int | None,
        recall: Recall | None = None,
    ) -> AsyncIterator[R]:
        """The request in the body, decoded. `context`: tokens of the model's context; None: not known yet.

        `recall`: for requests that may refer to stored responses; None: they may not.

        Fields that the schema lacks are noted in the request's record. A tenant's large requests, and those that refer
        to stored responses, are inside of the block one at a time: what is done there for a long prompt takes others'
        time too.

        Raises 400 for a body that does not fit the schema, 408 for one that arrives too slowly, 413 for one over the
        limit, 415 for one that is compressed, and 429 when the memory for bodies is used up.
        """
        _check_headers(http, max_bytes)
        body = _HeldBody(tenant)
        try:
            await self._receive(http, body, max_bytes)
            async with AsyncExitStack() as turn:
                if is_large := body.num_bytes > self._small[kind].max_bytes_on_loop:
                    await turn.enter_async_context(self._turns.of(tenant))
                try:
                    request, unknown = await self._decoded(body, kind, context, None if recall is None else b"{}")
                except NoSuchResponse as error:
                    if recall is None or not error.response_ids:
                        raise
                    if not is_large:  # what it refers to may be
                        await turn.enter_async_context(self._turns.of(tenant))
                    conversations = await recall(error.response_ids, max_bytes)
                    self._hold(body, len(conversations))
                    request, unknown = await self._decoded(body, kind, context, conversations)
                record_of(http.scope).ignored += unknown
                self._release(body)
                yield request
        finally:
            self._release(body)

    async def _decoded(
        self, body: _HeldBody, kind: type[R], context: int | None, conversations: bytes | None
    ) -> tuple[R, list[str]]:
        """The request, and the fields that its schema lacks. `conversations`: see `RequestDecoder.decode`."""
        decoder = self._small[kind]
        if body.num_bytes > decoder.max_bytes_on_loop:
            return await self._decoder.decode(body.data, kind, context, conversations)
        small = decoder.decode(body.data, conversations)
        assert isinstance(small, kind)
        check_extent(small, context)
        return small, unknown_fields(body.data, decoder.schema)

    async def _receive(self, http: Request, body: _HeldBody, max_bytes: int) -> None:
        loop, pace = asyncio.get_running_loop(), self._pace
        began_at = loop.time()
        try:
            async with asyncio.timeout(pace.latest_s(0)) as limit:
                async for chunk in http.stream():
                    if body.num_bytes + len(chunk) > max_bytes:
                        raise _too_large(max_bytes)
                    self._hold(body, len(chunk))
                    body.data += chunk
                    limit.reschedule(began_at + pace.latest_s(body.num_bytes))
        except TimeoutError:
            taken_s = loop.time() - began_at
            message = f"The request's body arrives too slowly: {body.num_bytes} bytes in {taken_s:.0f} s."
            raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None

    def _hold(self, body: _HeldBody, num_bytes: int) -> None:
        """Raises a 429 where the memory for bodies is taken."""
        self.budget.take(body.tenant, num_bytes)
        self._metrics.num_held_body_bytes = self.budget.num_held
        body.num_bytes += num_bytes

    def _release(self, body: _HeldBody) -> None:
        """Drops the bytes; further calls do nothing. A thread that was cancelled may hold them for a moment longer."""
        num_bytes, body.num_bytes, body.data = body.num_bytes, 0, bytearray()
        if not num_bytes:
            return
        self.budget.give_back(body.tenant, num_bytes)
        self._metrics.num_held_body_bytes = self.budget.num_held
        if num_bytes > MAX_BYTES_ON_LOOP:
            self._num_untrimmed += num_bytes
        if self._num_untrimmed >= TRIM_BYTES and (self._trimming is None or self._trimming.done()):
            self._num_untrimmed = 0
            self._trimming = asyncio.get_running_loop().run_in_executor(None, _trim_heap)


@dataclass
class _HeldBody:
    tenant: str
    num_bytes: int = 0  # as the budget counts them
    data: bytearray = field(default_factory=bytearray)


def _check_headers(http: Request, max_bytes: int) -> None:
    """Refuses a body by its headers, before any of it is read."""
    encoding = http.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding {encoding[:40]!r} is not supported: send the body uncompressed."
        raise ApiError(415, message, code="unsupported_encoding", headers={"Connection": "close"})
    declared = http.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> ApiError:
    message = f"The request's body is larger than {max_bytes} bytes."
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _trim_heap() -> None:
    """Returns the C library's free memory to the machine. Blocking, some ms; releases the GIL.

    The library keeps what lies below a block that is still in use, so a router that has once held many large bodies
    would keep that memory. A no-op where the library cannot do it.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
