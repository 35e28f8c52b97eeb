"""The public keys of one identity provider, fetched in the background and kept while it cannot be reached."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import jwt

from ...adapters.ended_tasks import end_tasks
from .oidc_config import LOOPBACK, is_safe

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
                kept = "none are known yet" if self.keys is None else "the last ones are kept"
                _log.warning("keys of a token issuer were not fetched, %s: %s", kept, type(error).__name__)
                rest_s = backoff_s * random.uniform(0.5, 1.0)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            except Exception:  # if this loop ended, tokens with the issuer's new keys would be refused for ever
                _log.exception("keys of a token issuer cannot be read")
                rest_s = _MAX_BACKOFF_S
            fetched.set()
            await self._rest(rest_s)

    async def _rest(self, rest_s: float) -> None:
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
    found: dict[str, PublicKey] = {}
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("kty") not in _KINDS or entry.get("use", "sig") != "sig":
            continue
        key_id, algorithm = entry.get("kid"), entry.get("alg", "")
        if not isinstance(key_id, str) or not isinstance(algorithm, str):
            continue
        try:
            found[key_id] = PublicKey(jwt.PyJWK(entry).key, algorithm)
        except (jwt.PyJWTError, ValueError, TypeError):  # the other keys can still be used
            continue
    if not found:
        raise IssuerError("none of its keys can be used")
    return MappingProxyType(found)


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
