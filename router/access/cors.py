"""CORS: the origins whose pages may read answers in a browser."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ..config import CurrentConfig

Headers = list[tuple[bytes, bytes]]
ALL: Final = "*"
MAX_AGE_S: Final = 600  # for which a browser caches the answer to its preflight request
_METHODS: Final = b"GET, POST, PUT, PATCH, DELETE"
_EXPOSED: Final = b"*"  # no request carries a browser's own credentials, so * covers every header


class Cors:
    """Keys are sent by pages themselves, in the header Authorization: a browser's own credentials are never allowed."""

    def __init__(self, config: CurrentConfig) -> None:
        self._config = config

    def headers(self, scope: Scope) -> Headers:
        """Headers of an answer; none if no origin is allowed, or the request has no origin."""
        allowed = self._config.now.cors_origins
        if not allowed:
            return []
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if allowed == ALL:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        varies = (b"vary", b"Origin")
        if origin is None or origin.decode("latin-1") not in allowed.split(","):
            return [varies]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED), varies]

    def preflight(self, request: Request) -> Response | None:
        """The answer to a preflight request, for any route; None: the request is none."""
        requested = request.headers.get("access-control-request-headers", "")
        if request.method != "OPTIONS" or "access-control-request-method" not in request.headers:
            return None
        headers = self.headers(request.scope)
        if not any(name == b"access-control-allow-origin" for name, _ in headers):
            return None
        response = Response(status_code=204)
        response.raw_headers += [*headers, (b"access-control-allow-methods", _METHODS)]
        response.raw_headers.append((b"access-control-max-age", str(MAX_AGE_S).encode()))
        if requested:
            response.raw_headers.append((b"access-control-allow-headers", requested.encode("latin-1")))
        return response
