"""HAProxy's own answers, and those of Serve around the routers, in the shape of OpenAI's API."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path

RETRY_AFTER_S = 1
# By status: the error's code and message. HAProxy sends all of them itself.
HAPROXYS = {
    400: ("invalid_request", "The request is no HTTP, or its body ceased to come."),
    401: ("invalid_api_key", "Send your API key in the header Authorization: Bearer YOUR_KEY."),
    403: ("forbidden", "This is not allowed."),
    404: ("not_found", "There is nothing here."),
    405: ("method_not_allowed", "There is no such method here."),
    407: ("forbidden", "This is no forward proxy."),
    408: ("request_timeout", "The request did not arrive in time."),
    410: ("not_found", "There is nothing here any more."),
    413: ("request_too_large", "The request is too large."),
    422: ("invalid_request", "The body has another transfer encoding than chunked."),
    425: ("too_early", "The request came too early; send it again."),
    429: ("too_many_requests", "Too many requests at once; send it again in a moment."),
    500: ("internal_error", "The server had an error while processing the request."),
    501: ("not_implemented", "There is nothing like that here."),
    502: ("router_lost", "The router that had the request is gone; send it again."),
    503: ("no_router", "No router is ready to take the request; send it again in a moment."),
    504: ("router_timeout", "The router that had the request did not answer in time."),
}
# Statuses beside these that Serve, or the HTTP server in its replicas, may answer with in plain text.
SERVES = {
    414: ("invalid_request", "The URL is too long."),
    426: ("invalid_request", "There is no other protocol here."),
    431: ("invalid_request", "The headers are too long."),
    499: ("client_closed_request", "The client closed the connection."),
}
PASSES = (408, 425, 429, 502, 503, 504)  # another try may find it mended


def error_body(status: int, code: str, message: str) -> str:
    """An error in OpenAI's shape, as JSON that stands between HAProxy's quotes. Raises ValueError if it cannot."""
    kind = "server_error" if status >= 500 else {408: "timeout_error", 429: "rate_limit_error"}.get(status)
    detail = {"message": message, "type": kind or "invalid_request_error", "param": None, "code": code}
    text = json.dumps({"error": detail})
    if "'" in text or not text.isascii():
        raise ValueError(f"HAProxy's configuration cannot hold {text}")
    return text


def returned(status: int, code: str, message: str) -> str:
    """The arguments of HAProxy's `return` for an error in OpenAI's shape."""
    more = f" hdr Retry-After {RETRY_AFTER_S}" if status in PASSES else ""
    more += " hdr WWW-Authenticate Bearer" if status == 401 else ""
    return f"status {status} content-type application/json string '{error_body(status, code, message)}'{more}"


def write_error_files(folder: Path) -> None:
    """Writes what HAProxy answers by itself: whole answers, since to what is no HTTP it sends nothing but such."""
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
    """Directives for errors from behind that are not JSON, as Serve's own are: they keep their status."""
    lines = []
    for status, (code, message) in sorted((HAPROXYS | SERVES).items()):
        condition = f"{{ status {status} }} !{{ res.hdr(content-type) -m beg application/json }}"
        lines.append(f"http-response return {returned(status, code, message)} if {condition}")
    return lines
