"""Error answers of HAProxy, and of Serve in front of the routers, in the format of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Final

RETRY_AFTER_S = 1
# By status: the error's code and message. HAProxy sends all of them itself.
HAPROXYS = {
    400: ("invalid_request", "The request is not valid HTTP, or its body is incomplete."),
    401: ("invalid_api_key", "Send your API key in the header Authorization: Bearer YOUR_KEY."),
    403: ("forbidden", "This is not allowed."),
    404: ("not_found", "There is nothing here."),
    405: ("method_not_allowed", "This path does not have this method."),
    407: ("forbidden", "This is not a forward proxy."),
    408: ("request_timeout", "The request did not arrive in time."),
    410: ("not_found", "There is no longer anything here."),
    413: ("request_too_large", "The request is too large."),
    422: ("invalid_request", "Chunked is the only transfer encoding that is supported."),
    425: ("too_early", "The request came too early; send it again."),
    429: ("too_many_requests", "Too many requests at once; send it again in a moment."),
    500: ("internal_error", "The server had an error while processing the request."),
    501: ("not_implemented", "This is not implemented."),
    502: ("router_lost", "The router that had the request was lost; send it again."),
    503: ("no_router", "No router is ready to take the request; send it again in a moment."),
    504: ("router_timeout", "The router that had the request did not answer in time."),
}
# Further statuses that Serve, or the HTTP server in its replicas, may answer with in plain text.
SERVES = {
    414: ("invalid_request", "The URL is too long."),
    426: ("invalid_request", "There is no protocol to upgrade to."),
    431: ("invalid_request", "The headers are too long."),
    499: ("client_closed_request", "The client closed the connection."),
}
PASSES = (408, 425, 429, 502, 503, 504)  # temporary: another try may succeed


def error_body(status: int, code: str, message: str) -> str:
    """An error in OpenAI's format, as JSON for HAProxy's single quotes. Raises ValueError if it cannot be quoted."""
    kind = "server_error" if status >= 500 else {408: "timeout_error", 429: "rate_limit_error"}.get(status)
    detail = {"message": message, "type": kind or "invalid_request_error", "param": None, "code": code}
    text = json.dumps({"error": detail})
    if "'" in text or not text.isascii():
        raise ValueError(f"HAProxy's configuration cannot hold {text}")
    return text


def returned(status: int, code: str, message: str) -> str:
    """The arguments of HAProxy's `return` for an error in OpenAI's format."""
    more = f" hdr Retry-After {RETRY_AFTER_S}" if status in PASSES else ""
    more += " hdr WWW-Authenticate Bearer" if status == 401 else ""
    return f"status {status} content-type application/json string '{error_body(status, code, message)}'{more}"


def write_error_files(folder: Path) -> None:
    """Writes the files of HAProxy's own errors: whole responses, the only kind that it sends to invalid HTTP."""
    for status, (code, message) in HAPROXYS.items():
        body = error_body(status, code, message)
        headers = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-cache",
            "Connection: close",
            *([f"Retry-After: {RETRY_AFTER_S}"] if status in PASSES else []),
        ]
        _error_file(folder, status).write_bytes("\r\n".join([*headers, "", body]).encode("ascii"))


def error_file_lines(folder: Path) -> list[str]:
    """Directives that name the files of `write_error_files`."""
    return [f"errorfile {status} {_error_file(folder, status)}" for status in HAPROXYS]


def _error_file(folder: Path, status: int) -> Path:
    return folder / f"motet-{status}.http"


def rewritten_error_lines() -> list[str]:
    """Directives that rewrite errors of servers that are not JSON, as Serve's are not. The status stays."""
    lines = []
    for status, (code, message) in sorted((HAPROXYS | SERVES).items()):
        condition = f"{{ status {status} }} !{{ res.hdr(content-type) -m beg application/json }}"
        lines.append(f"http-response return {returned(status, code, message)} if {condition}")
    return lines


# Why the edge refuses what no router sees, and how HAProxy counts it.
#
# The counts are in a table of HAProxy with an entry for each reason; a variable of its process holds the last refusal.

TABLE: Final = "motet_refused"
LAST: Final = "proc.motet_refused"  # reason, source and request id
COUNTER: Final = 3  # of HAProxy's stick counters: the ones before count connections, sources and keys
REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "keyless": "without a key, or with one of an invalid form",
        "rate": "more a second without a known key from one address than --max-keyless-per-second",
        "source": "more under way from one address than --max-connections-per-source",
        "key": "more under way with one key than --max-requests-per-key",
        "headers": "headers that are too long, or odd",
        "http": "no HTTP, or cut off or too slow before it was a request",
        "connection": "connections of one address that were closed at once",
    }
)


def refusal_lines(reason: str, status: int, code: str, message: str, condition: str) -> list[str]:
    """Directives that answer a request with this error, and count it, if the condition holds."""
    assert reason in REASONS, reason
    return [
        f"http-request track-sc{COUNTER} str({reason}) table {TABLE} if {condition}",
        f'http-request set-var-fmt({LAST}) "{reason} %[var(txn.motet_source)] %[var(txn.motet_id)]" if {condition}',
        f"http-request set-log-level silent if {condition}",  # a flood would be a flood of HAProxy's own log, too
        f"http-request return {returned(status, code, message)} if {condition}",
    ]


def refusal_table_lines() -> list[str]:
    return [f"backend {TABLE}", "    stick-table type string len 16 size 100 expire 20d store http_req_cnt"]
