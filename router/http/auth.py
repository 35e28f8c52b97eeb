"""Authentication: which tenant's key or token a request carries."""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Protocol

from starlette.requests import Request

from ...adapters.names import Sight
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import Actor, Admission, AuditEntry, KeyRecord, Scope, TenantRecord
from .access_log import record_of
from .errors import BEARER_CHALLENGE, ApiError, unavailable, unknown_key

# The caller: what a request's credentials were found to mean.


@dataclass(frozen=True, slots=True)
class Identity:
    tenant: TenantRecord
    key: KeyRecord  # of a token: what it allows
    subject: str = ""  # whom the issuer of a token means; empty: it is a key
    last_event: int = 0  # of the registry, that the router had when it admitted the request

    @property
    def name(self) -> str:
        """The tenant's."""
        return self.tenant.name

    @property
    def user(self) -> str:
        """The tenant's user; empty: the key belongs to no user."""
        return self.key.user

    @property
    def admission(self) -> Admission:
        """For the request's writes."""
        return Admission(incarnation=self.tenant.incarnation, last_event=self.last_event, user=self.user)

    @property
    def is_admin(self) -> bool:
        return "admin" in self.key.scopes

    @property
    def sight(self) -> Sight:
        """Which of the tenant's adapters may be seen."""
        return Sight(self.key.user, "admin" in self.key.scopes)

    def actor(self, request: Request) -> Actor:
        """For the audit log."""
        request_id = record_of(request.scope).request_id
        if self.subject:
            return Actor(kind="token", id=self.subject, tenant=self.name, user=self.user, request_id=request_id)
        return Actor(kind="key", id=self.key.key_id, tenant=self.name, user=self.user, request_id=request_id)

    def entry(self, request: Request, action: str, target: str) -> AuditEntry:
        """A change of the tenant's own things, for the audit log."""
        return AuditEntry(action=action, tenant=self.name, target=target, actor=self.actor(request))


def operators(request: Request) -> Actor:
    """The operators, for the audit log. The caller has seen their key."""
    return Actor(kind="operator", request_id=record_of(request.scope).request_id)


# The key of this motet's operators.


class OperatorKey:
    """The key that counts now. Its maker may put another in its place; readers read it for each request."""

    def __init__(self, key: str) -> None:
        self.now = key

    @classmethod
    def of(cls, key: str | OperatorKey) -> OperatorKey:
        """`key` itself, or one that never changes."""
        return cls(key) if isinstance(key, str) else key

    def __repr__(self) -> str:
        return "OperatorKey(…)"


_MAX_KEY_CHARS = 1024
BROWSERS_HEADERS: Final = ("origin", "sec-fetch-site")  # a browser sends one with every request that could do harm
NO_BROWSERS_PASSWORD: Final = (
    "A key as a password is not accepted from a browser. Send it in the header Authorization: Bearer YOUR_KEY."
)


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
        credential = "token" if subject else "API key"
        raise ApiError(403, f"This {credential} lacks the scope {scope}.", code="missing_scope")
    return Identity(tenant, key, subject, view.last_event)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _credential_of(request: Request) -> str:
    """The key in the header Authorization, else in `x-api-key`, which Anthropic's clients send.

    It may be the password of HTTP Basic, which programs make of a URL such as http://:KEY@host. Browsers would send it
    by themselves, for pages of others too: theirs is refused, and no answer asks for it.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if scheme.lower() == "basic":
        if any(name in request.headers for name in BROWSERS_HEADERS):
            raise ApiError(401, NO_BROWSERS_PASSWORD, code="invalid_api_key", headers=BEARER_CHALLENGE)
        key = _password(key.strip())
    else:
        key = "" if scheme else request.headers.get("x-api-key", "").strip()
    if not key:
        raise ApiError(
            401,
            "You didn't provide an API key. Send it in the header Authorization: Bearer YOUR_KEY.",
            code="invalid_api_key",
            headers=BEARER_CHALLENGE,
        )
    return key


def _password(credentials: str) -> str:
    """Of HTTP Basic, RFC 7617; empty: there is none.

    >>> _password("dXNlcjprZXk="), _password("dXNlcg=="), _password("?")
    ('key', '', '')
    """
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2].strip()
    except ValueError:
        return ""
