"""One route: its paths, and an ASGI app that authenticates, decodes the body, calls the handler and sends errors.

And CORS.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from ..adapters.errors import AdapterError, RegistryUnavailable
from .bodies.body_reader import small_body
from .config import CurrentConfig
from .http.access_log import AccessLog, RequestRecord, begin_record
from .http.auth import Authenticates
from .http.errors import ApiError, from_adapter_error, internal_error
from .http.route import Answer, RouteSpec
from .metrics import Metrics
from .openai.chat_fields import renamed
from .openai.generation_response import CLIENT_CLOSED_REQUEST

# CORS: the origins whose pages may read answers in a browser.

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


_log = logging.getLogger(__name__)


class RegistryOutages:
    """While the registry is away one request of a tenant waits for it, and the next ones are refused at once.

    `is_unreachable`: whether the router's own tries to read the registry fail; these end the outage for all tenants.
    """

    def __init__(self, is_unreachable: Callable[[], bool]) -> None:
        self._is_unreachable = is_unreachable
        self._tenants: set[str] = set()

    def check(self, tenant: str) -> None:
        """Raises RegistryUnavailable if a request of the tenant has waited in vain during this outage."""
        if not self._is_unreachable():
            self._tenants.clear()
        elif tenant in self._tenants:
            raise RegistryUnavailable("the registry cannot be reached: try again in a moment")

    def add(self, tenant: str) -> None:
        """A request of the tenant has waited in vain."""
        self._tenants.add(tenant)


class Endpoint:
    """An ASGI app for one route. It is one so that no middleware wraps `send`, which is called for every token.

    Errors of a handler other than `ApiError` and those of the registry are answered with 500 and logged here: where the
    server's own log would quote the error, which may quote the request.
    """

    def __init__(
        self,
        route: RouteSpec,
        authenticator: Authenticates,
        metrics: Metrics,
        access_log: AccessLog,
        cors: Cors,
        outages: RegistryOutages,
    ) -> None:
        self._route = route
        self._name = f"{route.method} {route.path}"
        self._authenticator = authenticator
        self._body = None if route.body is None or route.reads_body else msgspec.json.Decoder[Any](route.body)
        self._status_code = next(iter(route.answers), 200)
        self._headers = {"Cache-Control": "no-store"} if route.no_store else None
        self._metrics = metrics
        self._access_log, self._cors = access_log, cors
        self._needs_registry = route.needs_registry and "registry_unavailable" in route.errors
        self._outages = outages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status_code = 500  # of an error that passes through
        record = begin_record(scope, self._name)
        answer: Answer | None = None
        try:
            answer = await self._answer(Request(scope, receive), record)
            answer.raw_headers += record.headers_besides(answer.raw_headers)
            answer.raw_headers += self._cors.headers(scope)
            await answer(scope, receive, send)
            status_code = answer.status_code
            if isinstance(answer, Response):
                record.num_sent_bytes = len(answer.body)
        except ClientDisconnect:
            status_code, record.is_cancelled = CLIENT_CLOSED_REQUEST, True
        except asyncio.CancelledError:  # the server cancels the call when the client closes the connection
            status_code, record.is_cancelled = CLIENT_CLOSED_REQUEST, True
            raise
        finally:
            self._metrics.requests[self._name, status_code] += 1
            self._access_log.write(record, status_code)

    async def _answer(self, request: Request, record: RequestRecord) -> Answer:
        """Authenticates before anything of the body is read. Errors name fields as the client does."""
        arguments: list[Any] = [request]
        tenant = ""  # the operators
        refusal: ApiError | None
        try:
            if self._route.scope == "operator":
                self._authenticator.check_operator(request)
            elif self._route.scope != "public":
                identity = self._authenticator.identify(request, self._route.scope)
                arguments.append(identity)
                tenant = identity.name
            if self._needs_registry:
                self._outages.check(tenant)
            if self._body is not None:
                arguments.append(await small_body(request, self._body))
            result = await self._route.handler(*arguments)
            if isinstance(result, msgspec.Struct):
                return Response(msgspec.json.encode(result), self._status_code, self._headers, "application/json")
            return result
        except ApiError as error:
            refusal = renamed(error, self._route.names)
        except ClientDisconnect:
            raise
        except Exception as error:
            if isinstance(error, RegistryUnavailable):
                self._outages.add(tenant)
            refusal = from_adapter_error(error) if isinstance(error, AdapterError) else None
            if refusal is None:
                _log.exception("a request failed", extra=record.tags)
                refusal = internal_error()
        self._metrics.count_error(refusal)
        record.error = refusal.detail.code or ""
        return self._route.refusal(refusal)


# The paths of a route.

_SLASH: Final = re.compile("%2f", re.IGNORECASE)
_IN_NAME: Final = "\0"  # replaces the slash of a name while paths are matched
# A user's private adapter is `~user/name`; possessive, so that "~user" alone is never taken for a name.
_NAME: Final = r"(?P<name>(?:~[^/\0]*/)?+[^/]+)"


class EndpointRoute(Route):
    """Serves its path with a slash at the end, too: behind a proxy that ends TLS a redirect would lead to http://."""

    def __init__(self, path: str, endpoint: Endpoint, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.path_regex = re.compile(self.path_regex.pattern.replace("(?P<name>[^/]+)", _NAME))
        if not path.endswith(("/", ":path}")):
            self.path_regex = re.compile(f"{self.path_regex.pattern.removesuffix('$')}/?$")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """A slash that is sent as %2F does not separate path segments: it belongs to a name, as in `org%2Fname`."""
        raw: bytes = scope.get("raw_path") or b""
        if b"%2f" not in raw.lower():
            return super().matches(scope)
        path = unquote(_SLASH.sub(_IN_NAME, raw.decode("latin-1")))
        match, child_scope = super().matches({**scope, "path": path})
        if match is not Match.NONE:
            params = {name: str(value).replace(_IN_NAME, "/") for name, value in child_scope["path_params"].items()}
            child_scope = {**child_scope, "path_params": params}
        return match, child_scope
