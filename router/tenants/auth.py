"""Authentication: whose the bearer key of a request is."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from ...adapters.registry.registry_view import RegistryView
from ...adapters.tenants.records import Scope
from ..access.request_record import record_of
from ..openai_api.errors import ApiError
from .identity import Identity

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class Door:
    """Knows whose a request is, from what this router has of the registry: no request waits for Redis."""

    def __init__(self, view: RegistryView, operator_key: str) -> None:
        self._view, self._operator_key = view, operator_key

    def identify(self, request: Request, scope: Scope) -> Identity:
        """Raises 401 for a missing or unknown key, 403 for one that lacks the scope."""
        key = self._view.key(_key_of(request))
        if key is None:
            raise _unknown()
        record_of(request.scope).tenant = key.tenant
        if scope not in key.scopes:
            raise ApiError(403, f"This API key lacks the scope {scope}.", code="missing_scope")
        return Identity(self._view.tenant(key.tenant), key)

    def check_operator(self, request: Request) -> None:
        """Raises 401 unless the request has the operators' key. A tenant's key is none."""
        if not hmac.compare_digest(_key_of(request).encode(), self._operator_key.encode()):
            raise _unknown()


def _key_of(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise ApiError(
            401,
            "You didn't provide an API key. Send it in the header Authorization: Bearer YOUR_KEY.",
            code="invalid_api_key",
            headers=_CHALLENGE,
        )
    return key


def _unknown() -> ApiError:
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=_CHALLENGE)
