"""Authentication: whose the bearer key of a request is."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from ...adapters.registry.registry_view import RegistryView
from ..access.request_record import record_of
from ..openai_api.errors import ApiError

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


def tenant_of(request: Request, view: RegistryView) -> str:
    """The tenant of the request's key, from the copy of the registry. Raises 401 for a missing or unknown key."""
    tenant = view.tenant_of_key(_key_of(request))
    if tenant is None:
        raise _unknown()
    record_of(request.scope).tenant = tenant
    return tenant


def check_operator(request: Request, operator_key: str) -> None:
    """Raises 401 unless the request has the operators' key. A tenant's key is none."""
    if not hmac.compare_digest(_key_of(request).encode(), operator_key.encode()):
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
