"""Tokens of identity providers, verified with keys that this router has: no request waits for a provider."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final, get_args

import jwt

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_tenant, check_user
from ...adapters.registry.tenants.records import KeyRecord, Scope
from ..tenants.auth import TokensUnavailable
from .issuer_keys import IssuerKeys, PublicKey
from .oidc_config import OidcConfig

MAX_TOKEN_CHARS: Final = 8192
LEEWAY_S: Final = 60.0  # between the provider's clock and this one
MAX_CACHED: Final = 4096  # verified tokens that are remembered
MAX_SUBJECT_CHARS: Final = 256
_MAX_KEY_ID_CHARS: Final = 256
_DIGEST: Final = "oidc-"  # prefix of the names of users whose claim is not a valid name
_FIRST_WAIT_S: Final = 5.0
_SCOPES: Final[Sequence[Scope]] = get_args(Scope)
_Verified = tuple[KeyRecord, str]
# What PyJWT or a JSON parser can raise for a hostile token.
_REFUSALS: Final = (jwt.PyJWTError, AdapterInvalid, ValueError, TypeError, OverflowError, RecursionError)


class TokenVerifier:
    """Belongs to one event loop."""

    def __init__(self, config: OidcConfig, clock: Callable[[], float] = time.time) -> None:
        self._config, self._clock = config, clock
        self._algorithms = frozenset(config.oidc_algorithms.split(","))
        self.issuers = {issuer: IssuerKeys(issuer, self._forget) for issuer in config.oidc_issuers.split(",")}
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()  # by the token's hash; the last used one last

    async def start(self) -> None:
        """Waits some seconds for keys; a provider that cannot be reached delays no router further."""
        await asyncio.gather(*(issuer.start(_FIRST_WAIT_S) for issuer in self.issuers.values()))

    async def stop(self) -> None:
        await asyncio.gather(*(issuer.stop() for issuer in self.issuers.values()))

    def verify(self, token: str) -> _Verified | None:
        """What a token allows until it expires, and its subject; None: it is not accepted.

        Raises TokensUnavailable while no keys of its issuer were ever fetched.
        """
        if len(token) > MAX_TOKEN_CHARS or token.count(".") != 2 or not token.isascii():
            return None
        name = sha256(token.encode()).digest()
        known = self._verified.get(name)
        if known is not None:
            self._verified.move_to_end(name)
            return known  # the authenticator checks its expiry
        try:
            found = self._verify(token)
        except _REFUSALS:
            return None
        if found is not None:
            self._verified[name] = found
            if len(self._verified) > MAX_CACHED:
                self._verified.popitem(last=False)
        return found

    def _verify(self, token: str) -> _Verified | None:
        parts = jwt.decode_complete(token, options={"verify_signature": False})
        header, unproven = parts["header"], parts["payload"]
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._algorithms or "crit" in header:
            return None
        if not isinstance(key_id, str) or len(key_id) > _MAX_KEY_ID_CHARS:
            return None
        claimed = unproven.get("iss")
        issuer = self.issuers.get(claimed) if isinstance(claimed, str) else None
        if issuer is None:
            return None
        if issuer.keys is None:
            raise TokensUnavailable
        key = issuer.keys.get(key_id)
        if key is None:
            issuer.ask()
            return None
        return self._accepted(self._claims(token, key, algorithm, issuer.issuer), issuer.issuer)

    def _claims(self, token: str, key: PublicKey, algorithm: str, issuer: str) -> dict[str, Any]:
        if key.algorithm and key.algorithm != algorithm:
            raise jwt.InvalidAlgorithmError("the key is for another algorithm")
        return jwt.decode(
            token,
            key.key,
            algorithms=[algorithm],
            audience=self._config.oidc_audience,
            issuer=issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud", "sub"]},
        )

    def _accepted(self, claims: dict[str, Any], issuer: str) -> _Verified | None:
        tenant, subject = claims.get(self._config.oidc_tenant_claim), claims["sub"]
        if not isinstance(tenant, str) or not isinstance(subject, str) or not 0 < len(subject) <= MAX_SUBJECT_CHARS:
            return None
        check_tenant(tenant)
        claimed = claims.get(self._config.oidc_scopes_claim)
        words = claimed.split(" ") if isinstance(claimed, str) else claimed if isinstance(claimed, list) else []
        scopes = frozenset(scope for scope in _SCOPES if scope in words)
        user = claims.get(self._config.oidc_user_claim)
        if not isinstance(user, str) or not 0 < len(user) <= MAX_SUBJECT_CHARS:
            return None  # a caller without a user would see all that is the tenant's
        # One id for all tokens of a subject, so that what it uses is counted together.
        key_id = f"oidc-{sha256(f'{issuer} {subject}'.encode()).hexdigest()[:16]}"
        expires_at = int(claims["exp"]) + LEEWAY_S
        made_at = int(claims["iat"]) + LEEWAY_S if "iat" in claims else 0.0
        key = KeyRecord(
            key_id=key_id,
            tenant=tenant,
            scopes=scopes,
            created_at=made_at,
            expires_at=expires_at,
            user=self._user(user, issuer),
        )
        return key, subject

    def _user(self, claimed: str, issuer: str) -> str:
        """The user's name: the claim, or its digest if that is not a valid name or is ambiguous between issuers."""
        try:
            check_user(claimed)
        except AdapterInvalid:
            return _digest_name(claimed, issuer)
        is_of_issuer = self._config.oidc_user_claim == "sub" and len(self.issuers) > 1
        is_like_a_digest = claimed.startswith(_DIGEST)  # a person who can set the claim could set another user's digest
        return _digest_name(claimed, issuer) if is_of_issuer or is_like_a_digest else claimed

    def _forget(self) -> None:
        """A provider's keys have changed: tokens that were signed with a removed key are no longer accepted."""
        self._verified.clear()


def _digest_name(claimed: str, issuer: str) -> str:
    return f"{_DIGEST}{sha256(f'{issuer} {claimed}'.encode()).hexdigest()[:32]}"
