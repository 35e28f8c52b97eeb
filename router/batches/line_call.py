"""One line of a batch, sent as a client would: the same route, with all that it checks, charges and counts.

It is authenticated as the key or the token that made the batch is now.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.types import ASGIApp, Message
from starlette.types import Scope as AsgiScope

from ...adapters.registry.batches.records import BatchRecord
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import KeyRecord, Scope
from ..http.access_log import REQUEST_ID_HEADER
from ..http.auth import Identity, admitted
from ..http.errors import unknown_key
from .batch_files import Line, LineError, LineResponse, Result

_BATCH: Final = "motet.batch"  # in a line's scope, which no client makes


def scope_of(batch: BatchRecord) -> AsgiScope:
    """What a line's scope has for `LineAuthenticator`."""
    return {_BATCH: batch}


def is_line(scope: AsgiScope) -> bool:
    """Whether the request is a line of a batch."""
    return _BATCH in scope


class LineAuthenticator:
    def __init__(self, view: RegistryView, clock: Callable[[], float] = time.time) -> None:
        self._view, self._clock = view, clock

    def identify(self, request: Request, scope: Scope) -> Identity:
        """As `Authenticator.identify`; the line yields to all other work of its tenant and of others."""
        batch: BatchRecord = request.scope[_BATCH]
        identity = admitted(request, self._view, self._key_of(batch), batch.subject, scope, self._clock())
        if identity.tenant.incarnation != batch.incarnation:
            raise unknown_key()
        background = structs.replace(identity.tenant, is_background=True)
        return replace(identity, tenant=background)

    def check_operator(self, request: Request) -> None:
        raise unknown_key()

    def _key_of(self, batch: BatchRecord) -> KeyRecord | None:
        """A token counts as long as its batch: it was good when that was made."""
        if batch.token is not None:
            if not self._view.keys.has_tenant(batch.tenant):
                return None
            return structs.replace(batch.token, expires_at=None)
        entry = self._view.keys.key_with_id(batch.key_id)
        return entry[1] if entry is not None and entry[1].tenant == batch.tenant else None


# Room for the answers of batches' lines in a router's memory: a line begins when its whole answer has room.
#
# An answer is held whole until it is written, so what it may take at most is reserved before it is generated, and
# given back when its result is on the disk. Nothing that has room waits for more, so lines always end.

TOTAL_BYTES: Final = 64 << 20  # of all lines of a router, as text that is sent; in memory about twice as much
MAX_LINE_BYTES: Final = TOTAL_BYTES // 2  # of one answer: a longer one fails
LINE_ROOM: Final = "motet.line_room"  # a `ReservedRoom` in a line's scope, which no client makes


class LineRoom:
    """Belongs to one event loop."""

    def __init__(self, total_bytes: int = TOTAL_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.total_bytes, self.max_line_bytes = total_bytes, max_line_bytes
        self._num_bytes: Counter[str] = Counter()  # reserved, by tenant
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}  # tenant and bytes; in the order of arrival

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""
        return self._num_bytes.total()

    async def reserve(self, tenant: str, num_bytes: int) -> int:
        """Waits for room. Returns what is reserved: no more than an answer may have."""
        num_bytes = min(num_bytes, self.max_line_bytes)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = tenant, num_bytes
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self.give_back(tenant, num_bytes)
            raise
        return num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes[tenant] -= num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]
        self._let_in()

    def _let_in(self) -> None:
        """The tenant that has least goes first."""
        while self._waiting:
            turn = min(self._waiting, key=lambda turn: self._num_bytes[self._waiting[turn][0]])
            tenant, num_bytes = self._waiting[turn]
            if self.num_bytes + num_bytes > self.total_bytes:
                return
            del self._waiting[turn]
            if not turn.done():
                self._num_bytes[tenant] += num_bytes
                turn.set_result(None)


class ReservedRoom:
    """What one line has of a router's room."""

    def __init__(self, room: LineRoom, tenant: str) -> None:
        self._room, self._tenant, self._num_bytes = room, tenant, 0

    @property
    def max_answer_bytes(self) -> int:
        return self._room.max_line_bytes

    async def reserve(self, num_bytes: int) -> None:
        """Waits for room for an answer of at most so many bytes."""
        self._num_bytes += await self._room.reserve(self._tenant, num_bytes)

    def give_back(self) -> None:
        """The answer is written, or is not needed. No-op when it was called before."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._room.give_back(self._tenant, num_bytes)


_TRANSIENT: Final = frozenset({429, 502, 503, 504})  # the same line may be answered later
_log = logging.getLogger(__name__)


class LineAnswer(NamedTuple):
    result: Result
    retry_after_s: float | None  # None: it is final
    code: str  # of its error
    room: ReservedRoom  # the caller gives it back when the result is written, or dropped


class _Detail(msgspec.Struct, frozen=True):
    code: str | None = None


class _Error(msgspec.Struct, frozen=True):
    error: _Detail = _Detail()


class LineCaller:
    def __init__(self, routes: Mapping[str, ASGIApp], room: LineRoom | None = None) -> None:
        """`routes`: by path; each takes its caller's identity from a `LineAuthenticator`. `room`: for answers."""
        self._routes, self._room = dict(routes), room or LineRoom()

    async def call(self, batch: BatchRecord, line: Line) -> LineAnswer:
        """Cancelled, it is a client that leaves."""
        request_id, room = f"{batch.id}-{secrets.token_hex(6)}", ReservedRoom(self._room, batch.tenant_id)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(bytes(line.body))),
            REQUEST_ID_HEADER: request_id,
        }
        scope: AsgiScope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": line.url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
            **scope_of(batch),
            LINE_ROOM: room,
        }
        answer = _Answer(bytes(line.body))
        try:
            await self._routes[line.url](scope, answer.receive, answer.send)
            return _line_answer(line, request_id, answer, room)
        except asyncio.CancelledError:
            room.give_back()
            raise
        except Exception:  # not the line's fault: the other lines are run
            _log.exception("a line of a batch failed", extra={"fields": {"request_id": request_id}})
            failed = LineError("internal_error", "The server had an error while processing the line.")
            return LineAnswer(Result(custom_id=line.custom_id, error=failed), None, failed.code, room)


class _Answer:
    """The other side of one ASGI call."""

    def __init__(self, body: bytes) -> None:
        self.status_code = 0
        self._pieces: list[bytes] = []
        self.headers: dict[str, str] = {}
        self._request: bytes | None = body

    async def receive(self) -> Message:
        if self._request is None:  # the client stays until it has its answer
            await asyncio.Event().wait()
        body, self._request = self._request, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status_code = message["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self._pieces.append(message.get("body", b""))

    def take_body(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def _line_answer(line: Line, request_id: str, answer: _Answer, room: ReservedRoom) -> LineAnswer:
    """Raises msgspec.DecodeError if it is not valid JSON."""
    body = answer.take_body()
    if b"\n" in body:  # which ends a line of the results
        body = msgspec.json.format(body, indent=-1)
    checked = msgspec.json.decode(body, type=msgspec.Raw)
    result = Result(custom_id=line.custom_id, response=LineResponse(answer.status_code, request_id, checked))
    if answer.status_code == 200:
        return LineAnswer(result, None, "", room)
    code = msgspec.json.decode(body, type=_Error).error.code or ""
    is_final = answer.status_code not in _TRANSIENT or answer.headers.get("x-should-retry") == "false"
    return LineAnswer(result, None if is_final else float(answer.headers.get("retry-after", 1)), code, room)
