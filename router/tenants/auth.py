"""Authentication: the tenant that the bearer key of a request belongs to."""

from __future__ import annotations

from starlette.requests import Request

from ...adapters.registry.registry_view import RegistryView
from ..openai_api.errors import ApiError

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


def tenant_of(request: Request, view: RegistryView) -> str:
    """The tenant of the request's key, from the copy of the registry. Raises 401 for a missing or unknown key."""
    header = request.headers.get("authorization", "")
    scheme, _, key = header.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise ApiError(
            401,
            "You didn't provide an API key. Send it in the header Authorization: Bearer YOUR_KEY.",
            code="invalid_api_key",
            headers=_CHALLENGE,
        )
    tenant = view.tenant_of_key(key)
    if tenant is None:
        raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=_CHALLENGE)
    return tenant
