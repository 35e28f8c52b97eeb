"""The access log: one line for each request, written when its answer has ended or its client has left."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import Scope

from ..config import CurrentConfig

# The id of a request: its client's own if that is harmless, else a new one. It is in the answer and in the logs.

REQUEST_ID_HEADER: Final = "x-request-id"
_RAW_HEADER: Final = REQUEST_ID_HEADER.encode()
# What UUIDs, ULIDs, base64 and the trace ids of clouds consist of: nothing that ends a line, a header or a quoted text.
ID_PATTERN: Final = "[A-Za-z0-9._:=+/@~-]{1,128}"
_GOOD: Final = re.compile(ID_PATTERN)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id in the headers of an ASGI scope. A new one if there is none, more than one, or one with odd characters."""
    request_ids = [value for name, value in headers if name == _RAW_HEADER]
    if len(request_ids) == 1:
        text = request_ids[0].decode("latin-1")
        if _GOOD.fullmatch(text):
            return text
    return str(uuid.uuid4())


# What is known of one request, for its line in the access log and for lines that are about it.
#
# It travels in the request's ASGI scope, from the endpoint that creates it to the parts that fill it in: the tenant,
# the model, the number of tokens. Nothing in it is content: no prompt, no key, no text of a client's choice but names
# that the registry knows, and `ignored`, which only the answer contains.

_KEY: Final = "motet.request"
# Of an answer's id these characters are random. Those before them are derived from the prompt.
NUM_ANSWER_CHARS: Final = 21
WARNING_HEADER: Final = b"x-motet-warning"
MOST_NAMES: Final = 8  # in a header
_MOST_CHARS: Final = 64  # of a name
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def warning_header(names: Sequence[str]) -> tuple[bytes, bytes]:
    """The warning header for these ignored fields; it lists some of very many.

    >>> warning_header(["logit_bias", "tools[0]"])
    (b'x-motet-warning', b'ignored fields: logit_bias, tools[0]')
    """
    parts = [_UNSAFE.sub("?", name[:_MOST_CHARS]) for name in names[:MOST_NAMES]]
    more = ", ..." if len(names) > MOST_NAMES else ""
    return WARNING_HEADER, f"ignored fields: {', '.join(parts)}{more}".encode("ascii")


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    request_id: str
    method: str
    route: str  # the route's own text, never the path that was requested
    started_at: float = field(default_factory=time.perf_counter)
    tenant: str = ""  # empty: the key is unknown, or none is needed
    model: str = ""  # a name that the registry has, or the base's; empty: none was found
    answer: str = ""  # the end of the answer's id
    error: str = ""  # the code of the error that the client got
    is_stream: bool = False
    is_cancelled: bool = False  # the client left before the end
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    num_cached_tokens: int | None = None
    first_token_s: float | None = None  # from the request's arrival
    finish: str = ""  # why each choice ended, with how many did so
    num_sent_bytes: int | None = None  # of the answer's body; None: it was not sent
    ignored: list[str] = field(default_factory=list)  # names of fields in the body that were ignored
    headers: Sequence[tuple[bytes, bytes]] = ()  # for the answer, unless it has them with other values

    @property
    def header(self) -> tuple[bytes, bytes]:
        """The answer's header with the request's id."""
        return _RAW_HEADER, self.request_id.encode("ascii")

    def headers_besides(self, response_headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The request's id, a warning, and those of `headers` that are not among an answer's own."""
        headers = [self.header]
        if self.ignored:
            headers.append(warning_header(self.ignored))
        if self.headers:
            names = {name for name, _ in response_headers}
            headers += [header for header in self.headers if header[0] not in names]
        return headers

    @property
    def tags(self) -> dict[str, Any]:
        """`extra` of a log line that is about this request."""
        return tags(self.request_id, self.tenant)


def tags(request_id: str, tenant: str) -> dict[str, Any]:
    """`extra` of a log line that is about a request of this tenant."""
    fields = {"request_id": request_id, "tenant": tenant}
    return {"fields": {name: value for name, value in fields.items() if value}}


def begin_record(scope: Scope, route: str) -> RequestRecord:
    """Puts a new record into the scope."""
    record = RequestRecord(request_id=request_id_of(scope["headers"]), method=scope["method"], route=route)
    scope[_KEY] = record
    return record


def record_of(scope: Scope) -> RequestRecord:
    """The record that the endpoint has begun."""
    record = scope[_KEY]
    assert isinstance(record, RequestRecord)
    return record


LOGGER: Final = "motet.router.access"
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # others are free text

_log = logging.getLogger(LOGGER)


class AccessLog:
    def __init__(self, config: CurrentConfig) -> None:
        """`config`: whether there is one, which may change at any time."""
        self._config = config

    def write(self, record: RequestRecord, status_code: int) -> None:
        """`status_code`: that was sent; 499: the client had left before anything was."""
        if self._config.now.access_log:
            fields = fields_of(record, status_code, time.perf_counter() - record.started_at)
            _log.info("request", extra={"fields": fields})


def fields_of(record: RequestRecord, status_code: int, duration_s: float) -> dict[str, Any]:
    """The fields of the line without empty ones."""
    fields = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "method": record.method if record.method in METHODS else "other",
        "route": record.route,
        "status": status_code,
        "error": record.error,
        "model": record.model,
        "answer": record.answer,
        "stream": record.is_stream or None,
        "cancelled": record.is_cancelled or None,
        "duration_s": round(duration_s, 6),
        "first_token_s": None if record.first_token_s is None else round(record.first_token_s, 6),
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": record.num_completion_tokens,
        "cached_tokens": record.num_cached_tokens,
        "finish": record.finish,
        "sent_bytes": record.num_sent_bytes,
    }
    return {name: value for name, value in fields.items() if value is not None and value != ""}
