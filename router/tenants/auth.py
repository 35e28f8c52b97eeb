"""Authentication: which tenant's key or token a request carries."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Protocol

from starlette.requests import Request

from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import KeyRecord, Scope
from ..access.request_record import record_of
from ..openai_api.errors import BEARER_CHALLENGE, ApiError, unavailable, unknown_key
from ..operator_key import OperatorKey
from .identity import Identity

_MAX_KEY_CHARS = 1024


class TokensUnavailable(Exception):  # noqa: N818
    """Tokens cannot be verified now."""


class Tokens(Protocol):
    """Verifies tokens of identity providers."""

    def verify(self, token: str) -> tuple[KeyRecord, str] | None:
        """What a token allows, and its subject; None: it is not accepted. It never blocks. Raises TokensUnavailable."""


class Authenticates(Protocol):
    def identify(self, request: Request, scope: Scope) -> Identity:
        """The caller. Raises 401 and 403."""

    def check_operator(self, request: Request) -> None:
        """Raises 401 unless the request has the operators' key."""


class Authenticator:
    """Finds the tenant and the key of a request in this router's copy of the registry: no request waits for Redis."""

    def __init__(
        self,
        view: RegistryView,
        operator_key: OperatorKey,
        tokens: Tokens | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`tokens`: None: only keys are accepted."""
        self._view, self._tokens, self._clock = view, tokens, clock
        self._operator_key = operator_key

    def identify(self, request: Request, scope: Scope) -> Identity:
        """Raises 401 for a missing, unknown or expired key, 403 for a suspended tenant and for a missing scope."""
        credential = _credential_of(request)
        key, subject = self._view.key(credential) if len(credential) <= _MAX_KEY_CHARS else None, ""
        if key is None and self._tokens is not None:
            key, subject = self._of_token(self._tokens, credential)
        return admitted(request, self._view, key, subject, scope, self._clock())

    def _of_token(self, tokens: Tokens, token: str) -> tuple[KeyRecord | None, str]:
        try:
            key, subject = tokens.verify(token) or (None, "")
        except TokensUnavailable as error:
            raise unavailable("Tokens cannot be verified now, try again.", "issuer_unavailable") from error
        if key is None or not self._view.keys.has_tenant(key.tenant):
            return None, ""  # tenants are made by operators, not by issuers of tokens
        tenant = self._view.tenant(key.tenant)
        if tenant.num_ended and key.created_at < tenant.created_at:
            return None, ""  # issued for an earlier tenant of this name
        return key, subject

    def check_operator(self, request: Request) -> None:
        """Raises 401 unless the request has the operators' key. A tenant's key is not accepted."""
        # Digests have one length, so the time of the comparison does not reveal the key's length.
        if not hmac.compare_digest(_digest(_credential_of(request)), _digest(self._operator_key.now)):
            raise unknown_key()


def admitted(
    request: Request, view: RegistryView, key: KeyRecord | None, subject: str, scope: Scope, now: float
) -> Identity:
    """The caller with this key, or token if there is a subject. Raises as `Authenticator.identify`."""
    if key is None or (key.expires_at is not None and key.expires_at <= now):
        raise unknown_key()
    tenant = view.tenant(key.tenant)
    if tenant.is_ending:
        raise unknown_key()
    record_of(request.scope).tenant = tenant.name
    if tenant.is_suspended:
        raise ApiError(403, "This tenant is suspended: ask the operators of this server.", code="tenant_suspended")
    if scope not in key.scopes:
        what = "token" if subject else "API key"
        raise ApiError(403, f"This {what} lacks the scope {scope}.", code="missing_scope")
    return Identity(tenant, key, subject, view.last_event)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _credential_of(request: Request) -> str:
    """The key in the header Authorization, else in `x-api-key`, which Anthropic's clients send."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    key = "" if scheme else request.headers.get("x-api-key", "").strip()
    if not key:
        raise ApiError(
            401,
            "You didn't provide an API key. Send it in the header Authorization: Bearer YOUR_KEY.",
            code="invalid_api_key",
            headers=BEARER_CHALLENGE,
        )
    return key
