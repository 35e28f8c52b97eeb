"""What is known of one request, for its line in the access log and for lines that are about it.

It travels in the request's ASGI scope, from the endpoint that creates it to the parts that fill it in: the tenant, the
model, the number of tokens. Nothing in it is content: no prompt, no key, no text of a client's choice but names that
the registry knows, and `ignored`, which only the answer contains.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import Scope

from ..openai_api.unknown_fields import warning_header
from .request_id import REQUEST_ID_HEADER, request_id_of

_KEY: Final = "motet.request"
_RAW_HEADER: Final = REQUEST_ID_HEADER.encode()
# Of an answer's id these characters are random. Those before them are derived from the prompt.
NUM_ANSWER_CHARS: Final = 21


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

    def headers_besides(self, own: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The request's id, a warning, and those of `headers` that are not among an answer's own."""
        names = {name for name, _ in own} if self.headers else set()
        warnings = [warning_header(self.ignored)] if self.ignored else []
        return [self.header, *warnings, *(header for header in self.headers if header[0] not in names)]

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
    found = scope[_KEY]
    assert isinstance(found, RequestRecord)
    return found
