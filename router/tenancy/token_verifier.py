"""Tokens of identity providers, verified with keys that this router has: no request waits for a provider."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, get_args
from urllib.parse import urlsplit

import httpx
import jwt

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_tenant, check_user
from ...adapters.registry.tenants.records import KeyRecord, Scope
from ..http.auth import TokensUnavailable
from .oidc_config import LOOPBACK, OidcConfig, is_safe

# The public keys of one identity provider, fetched in the background and kept while it cannot be reached.

_log = logging.getLogger(__name__)
DISCOVERY: Final = "/.well-known/openid-configuration"
REFRESH_S: Final = 600.0
FETCH_S: Final = 10.0  # for both documents
MAX_BYTES: Final = 256 << 10  # of each
MAX_KEYS: Final = 100
_FIRST_BACKOFF_S: Final = 1.0
_MAX_BACKOFF_S: Final = 60.0
REQUESTED_GAP_S: Final = 30.0  # between two fetches because of tokens with unknown keys
_KINDS: Final = frozenset({"RSA", "EC", "OKP"})  # that have a public part


@dataclass(frozen=True)
class PublicKey:
    key: Any  # for PyJWT
    algorithm: str  # the only allowed one; empty: any of its kind


class IssuerError(Exception):
    """The provider's documents cannot be used; the message says why."""


class IssuerKeys:
    """Requests only read `keys`. Belongs to one event loop."""

    def __init__(self, issuer: str, on_changed: Callable[[], None] = lambda: None) -> None:
        """`on_changed`: called when the keys have changed."""
        self.issuer = issuer
        self.keys: Mapping[str, PublicKey] | None = None  # by id; None: they were never fetched
        self.num_fetches = 0
        self._on_changed = on_changed
        self._requested = asyncio.Event()
        self._requested_at = float("-inf")
        self._documents: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, wait_s: float) -> None:
        """Begins to fetch; waits at most `wait_s` for the first keys."""
        fetched = asyncio.Event()
        self._task = asyncio.create_task(self._follow(fetched), name="issuer keys")
        with suppress(TimeoutError):
            await asyncio.wait_for(fetched.wait(), wait_s)

    async def stop(self) -> None:
        await end_tasks(self._task)

    def ask(self) -> None:
        """Requests a fetch, because a token names an unknown key; at most one every REQUESTED_GAP_S."""
        self._requested.set()

    async def _follow(self, fetched: asyncio.Event) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self.fetch()
                backoff_s, rest_s = _FIRST_BACKOFF_S, REFRESH_S
            except (IssuerError, httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
                key_state = "none are known yet" if self.keys is None else "the last ones are kept"
                _log.warning("keys of a token issuer were not fetched, %s: %s", key_state, type(error).__name__)
                rest_s = backoff_s * random.uniform(0.5, 1.0)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            except Exception:  # if this loop ended, tokens with the issuer's new keys would be refused for ever
                _log.exception("keys of a token issuer cannot be read")
                rest_s = _MAX_BACKOFF_S
            fetched.set()
            await self._sleep(rest_s)

    async def _sleep(self, rest_s: float) -> None:
        """Waits until the next fetch is due, or a token has requested one."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._requested.wait(), rest_s)
            since_s = time.monotonic() - self._requested_at
            await asyncio.sleep(max(0.0, REQUESTED_GAP_S - since_s))
        if self._requested.is_set():
            self._requested_at = time.monotonic()
        self._requested.clear()

    async def fetch(self) -> None:
        """Raises IssuerError, errors of httpx, and TimeoutError, and then keeps the old keys."""
        self.num_fetches += 1
        # A proxy of the environment cannot reach this machine's loopback.
        is_local = urlsplit(self.issuer).hostname in LOOPBACK
        async with asyncio.timeout(FETCH_S), httpx.AsyncClient(timeout=FETCH_S, trust_env=not is_local) as client:
            discovery = await _document(client, self.issuer.rstrip("/") + DISCOVERY)
            if discovery.get("issuer") != self.issuer:
                raise IssuerError("its discovery document is another issuer's")
            address = discovery.get("jwks_uri")
            if not isinstance(address, str) or not is_safe(address):
                raise IssuerError("its jwks_uri is not an https URL")
            document = await _document(client, address)
        keys = public_keys(document)
        if self.keys is None or document != self._documents:
            self.keys, self._documents = keys, document
            self._on_changed()
            _log.info("a token issuer has %d keys", len(keys))


def public_keys(document: Mapping[str, Any]) -> Mapping[str, PublicKey]:
    """The keys for signatures of a JWKS (RFC 7517), by id. Raises IssuerError where there is none."""
    entries = document.get("keys")
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise IssuerError(f"a list of at most {MAX_KEYS} keys is needed")
    keys: dict[str, PublicKey] = {}
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("kty") not in _KINDS or entry.get("use", "sig") != "sig":
            continue
        key_id, algorithm = entry.get("kid"), entry.get("alg", "")
        if not isinstance(key_id, str) or not isinstance(algorithm, str):
            continue
        try:
            keys[key_id] = PublicKey(jwt.PyJWK(entry).key, algorithm)
        except (jwt.PyJWTError, ValueError, TypeError):  # the other keys can still be used
            continue
    if not keys:
        raise IssuerError("none of its keys can be used")
    return MappingProxyType(keys)


async def _document(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    body = bytearray()
    async with client.stream("GET", url) as response:
        if response.status_code != 200:
            raise IssuerError(f"it answered with {response.status_code}")
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > MAX_BYTES:
                raise IssuerError(f"a document is larger than {MAX_BYTES} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise IssuerError("a document is not JSON") from error
    if not isinstance(document, dict):
        raise IssuerError("a document is not a JSON object")
    return document


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
        cached_identity = self._verified.get(name)
        if cached_identity is not None:
            self._verified.move_to_end(name)
            return cached_identity  # the authenticator checks its expiry
        try:
            identity = self._verify(token)
        except _REFUSALS:
            return None
        if identity is not None:
            self._verified[name] = identity
            if len(self._verified) > MAX_CACHED:
                self._verified.popitem(last=False)
        return identity

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
