"""Tokens of identity providers, with keys that are made here and a provider on loopback that may be slow or away."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from redis.asyncio import Redis

from motet.adapters.registry.administration.administration import Administration
from motet.adapters.registry.tenants.records import Actor, TenantRecord
from motet.router.http.auth import TokensUnavailable
from motet.router.tenancy import token_verifier
from motet.router.tenancy import token_verifier as token_verifier_module
from motet.router.tenancy.oidc_config import OidcConfig, is_safe
from motet.router.tenancy.token_verifier import (
    LEEWAY_S,
    MAX_CACHED,
    IssuerError,
    IssuerKeys,
    TokenVerifier,
    public_keys,
)
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.tenants_rig import TenantsRig

AUDIENCE = "motet"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def jwk(key: Any, key_id: str, **more: str) -> dict[str, Any]:
    kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return {**json.loads(kind.to_jwk(key.public_key())), "kid": key_id, **more}


class Provider:
    """An identity provider on loopback."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = [jwk(RSA_KEY, "one", alg="RS256", use="sig"), jwk(EC_KEY, "two")]
        self.mode = "well"
        self.num_requested = 0
        self.issuer = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.issuer = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
            self.num_requested += 1
            if self.mode == "slow":
                await asyncio.sleep(3600)
            document: Any = {"keys": self.keys}
            if path.startswith("/.well-known"):
                document = {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys"}
                if self.mode == "of another":
                    document["issuer"] = "https://else.example"
                if self.mode == "astray":
                    document["jwks_uri"] = "http://else.example/keys"
            elif self.mode == "giant":
                document = {"keys": self.keys, "more": "x" * (1 << 20)}
            body = b"<html>" if self.mode == "no json" else json.dumps(document).encode()
            status = b"500 Away" if self.mode == "away" else b"200 OK"
            writer.write(
                b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)
            )
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def token(
        self, key: PrivateKeyTypes = RSA_KEY, key_id: str = "one", algorithm: str = "RS256", **claims: Any
    ) -> str:
        now = int(time.time())
        reported = {"iss": self.issuer, "aud": AUDIENCE, "sub": "ann", "tenant": "acme", "scope": "infer openid"}
        reported |= {"iat": now, "exp": now + 600} | claims
        return jwt.encode({k: v for k, v in reported.items() if v is not None}, key, algorithm, {"kid": key_id})  # type: ignore[arg-type]


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    provider = Provider()
    await provider.start()
    yield provider
    provider.mode = "well"
    await provider.stop()


def config(issuers: str, **given: Any) -> OidcConfig:
    fields = {
        "oidc_issuers": issuers,
        "oidc_audience": AUDIENCE,
        "oidc_algorithms": "RS256,ES256",
        "oidc_tenant_claim": "tenant",
        "oidc_user_claim": "sub",
        "oidc_scopes_claim": "scope",
    }
    return OidcConfig(**{**fields, **given})


@pytest.fixture
async def tokens(provider: Provider) -> AsyncIterator[TokenVerifier]:
    verifier = TokenVerifier(config(provider.issuer))
    await verifier.start()
    yield verifier
    await verifier.stop()


async def test_a_token_lets_its_tenant_in(
    provider: Provider, tokens: TokenVerifier, redis_client: Redis, tmp_path: Path
) -> None:
    await Administration.of(redis_client).tenants.create(TenantRecord(name="acme"), Actor(kind="operator"))
    async with TenantsRig(redis_client, tmp_path, tokens) as rig:
        models = "/v1/models"
        token = provider.token()
        assert (await rig.ask("GET", models, token)).status_code == 200
        assert (await rig.ask("GET", models, provider.token(EC_KEY, "two", "ES256"))).status_code == 200
        assert await rig.refused("GET", "/v1/adapters", token) == (403, "missing_scope")
        assert (await rig.ask("GET", "/v1/adapters", provider.token(scope=["upload"]))).status_code == 200
        assert await rig.refused("GET", models, provider.token(scope="public")) == (403, "missing_scope")
        assert await rig.refused("GET", "/v1/admin/tenants", token) == (401, "invalid_api_key")
        # A provider makes no tenants.
        assert await rig.refused("GET", models, provider.token(tenant="unknown")) == (401, "invalid_api_key")
        admin = provider.token(scope="admin infer", sub="bob")
        await rig.done("POST", "/v1/keys", admin, json={})
        entry = (await rig.done("GET", "/v1/admin/audit"))["data"][0]
        assert entry["actor"] == {"kind": "token", "id": "bob", "tenant": "acme", "user": "bob"}
        await rig.done("POST", "/v1/admin/tenants/acme/suspend")
        assert await rig.refused("GET", models, token) == (403, "tenant_suspended")
        await rig.done("DELETE", "/v1/admin/tenants/acme")
        assert await rig.refused("GET", models, token) == (401, "invalid_api_key")
        # A later tenant of this name needs new tokens.
        await rig.done("POST", "/v1/admin/tenants", json={"name": "acme"})
        for made_at in (int(time.time()) - 3600, None):
            assert await rig.refused("GET", models, provider.token(iat=made_at)) == (401, "invalid_api_key")
        assert (await rig.ask("GET", models, provider.token())).status_code == 200


def forged(token: str, header: dict[str, Any], signature: bytes = b"") -> str:
    head = base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=").decode()
    return f"{head}.{token.split('.')[1]}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


async def test_tokens_that_are_not_accepted(provider: Provider, tokens: TokenVerifier) -> None:
    good, now = provider.token(), int(time.time())
    assert tokens.verify(good) is not None
    public = RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with_public_key = forged(good, {"alg": "HS256", "kid": "one"})
    signed = hmac.digest(public, with_public_key.rpartition(".")[0].encode(), hashlib.sha256)
    bad = {
        "no signature": forged(good, {"alg": "none", "kid": "one"}),
        "the public key as a secret": forged(good, {"alg": "HS256", "kid": "one"}, signed),
        "another's signature": provider.token(OTHER_RSA_KEY),
        "changed": good[:-8] + ("A" * 8),
        "an algorithm that is not listed": provider.token(algorithm="RS512"),
        "not the key's algorithm": provider.token(EC_KEY, "one", "ES256"),
        "no key id": jwt.encode({"iss": provider.issuer}, RSA_KEY, "RS256"),
        "unknown key": provider.token(key_id="three"),
        "another issuer": provider.token(iss="https://else.example"),
        "an issuer that is no text": provider.token(iss=None),
        "another audience": provider.token(aud="else"),
        "no audience": provider.token(aud=None),
        "expired": provider.token(exp=now - 61),
        "not yet": provider.token(nbf=now + 120),
        "no end": provider.token(exp=None),
        "no subject": provider.token(sub=None),
        "a long subject": provider.token(sub="x" * 300),
        "no tenant": provider.token(tenant=None),
        "a tenant that cannot be": provider.token(tenant="a/b"),
        "tenants": provider.token(tenant=["acme"]),
        "too long": provider.token(more="x" * 8192),
        "a demand": forged(good, {"alg": "RS256", "kid": "one", "crit": ["exp"]}),
        "deep": f"{base64.urlsafe_b64encode(b'[' * 3000).decode()}.e30.e30",
        "no token": "a.b.c",
        "no ASCII": "ä.b.c",
        "empty": "..",
    }
    assert {what for what, token in bad.items() if tokens.verify(token) is not None} == set()
    assert tokens.verify(provider.token(exp=now - 30)) is not None  # clocks differ


async def test_a_token_is_its_users(provider: Provider) -> None:
    """By the claim that is set. What is no name, and what two issuers may say of two people, becomes a digest."""

    async def user_of(token: str, issuers: str = provider.issuer, **given: str) -> str | None:
        tokens = TokenVerifier(config(issuers, **given))
        await tokens.start()
        found = tokens.verify(token)
        await tokens.stop()
        return None if found is None else found[0].user

    assert await user_of(provider.token(sub="auth0|5f7c")) == "auth0|5f7c"
    named = provider.token(sub="1", email="eve@id.example")
    assert await user_of(named, oidc_user_claim="email") == "eve@id.example"
    odd = [await user_of(provider.token(sub=sub)) for sub in ("a/b", "~ann", "Zoë", "x" * 65)]
    assert len({*odd}) == 4 and all(one is not None and re.fullmatch(r"oidc-[0-9a-f]{32}", one) for one in odd)
    assert await user_of(provider.token(sub="a/b")) == odd[0]
    assert odd[0] is not None and await user_of(provider.token(sub=odd[0])) not in (None, odd[0])
    for claimed in (None, "", 7, ["ann"], "x" * 300):
        assert await user_of(provider.token(email=claimed), oidc_user_claim="email") is None
    two = f"{provider.issuer},http://localhost:1/other"
    assert str(await user_of(named, two)).startswith("oidc-")
    assert await user_of(named, two, oidc_user_claim="email") == "eve@id.example"


async def test_a_token_ends_though_it_is_remembered(provider: Provider, redis_client: Redis, tmp_path: Path) -> None:
    tokens = TokenVerifier(config(provider.issuer))
    await tokens.start()
    await Administration.of(redis_client).tenants.create(TenantRecord(name="acme"), Actor(kind="operator"))
    async with TenantsRig(redis_client, tmp_path, tokens) as rig:
        ends_at = int(time.time()) + 5
        token = provider.token(exp=ends_at - int(LEEWAY_S))
        assert (await rig.ask("GET", "/v1/models", token)).status_code == 200
        await asyncio.sleep(max(0.0, ends_at - time.time()))
        assert await rig.refused("GET", "/v1/models", token) == (401, "invalid_api_key")
    await tokens.stop()


async def test_a_token_is_verified_once(
    provider: Provider, tokens: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = provider.token()
    assert tokens.verify(token) is not None
    monkeypatch.setattr(tokens, "_verify", lambda token: pytest.fail("it was verified before"))
    assert tokens.verify(token) is not None
    monkeypatch.undo()
    monkeypatch.setattr(token_verifier, "MAX_CACHED", 3)
    many = [provider.token(sub=f"s{number}") for number in range(5)]
    assert all(tokens.verify(one) is not None for one in many)
    assert len(tokens._verified) == 3 < MAX_CACHED


async def test_keys_that_rotate_are_taken_over(
    provider: Provider, tokens: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_verifier_module, "REQUESTED_GAP_S", 0.3)
    old = provider.token()
    assert tokens.verify(old) is not None
    provider.keys = [jwk(OTHER_RSA_KEY, "three")]
    new = provider.token(OTHER_RSA_KEY, "three")
    assert tokens.verify(new) is None  # and the keys are fetched
    await eventually_in_loop(lambda: tokens.verify(new) is not None)
    assert tokens.verify(old) is None  # its key is gone, though it was remembered


async def test_keys_are_fetched_again_without_requests(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_verifier_module, "REFRESH_S", 0.05)
    monkeypatch.setattr(token_verifier_module, "REQUESTED_GAP_S", 0.0)
    tokens = TokenVerifier(config(provider.issuer))
    await tokens.start()
    (issuer,) = tokens.issuers.values()
    provider.keys = [jwk(OTHER_RSA_KEY, "three")]
    await eventually_in_loop(lambda: issuer.keys is not None and set(issuer.keys) == {"three"})
    await tokens.stop()


async def test_no_request_waits_for_the_provider_and_no_token_is_reported(
    provider: Provider,
    redis_client: Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While the provider hangs, no token is accepted, known key or not, and none is logged."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(token_verifier_module, "FETCH_S", 3600.0)
    tokens = TokenVerifier(config(provider.issuer))
    await tokens.start()
    async with TenantsRig(redis_client, tmp_path, tokens) as rig:
        await rig.done("POST", "/v1/admin/tenants", json={"name": "acme"})
        provider.mode, num_requested = "slow", provider.num_requested
        good = [provider.token(sub=f"s{number}", scope="infer upload metrics admin") for number in range(2)]
        bad = [provider.token(key_id="three"), provider.token(OTHER_RSA_KEY), provider.token(more="x" * 9000)]
        bad += [provider.token(tenant="unknown"), provider.token(exp=1)]
        answers = []
        async with asyncio.timeout(PATIENCE_S):
            for token in [*bad, *good, *bad]:
                for path in ("/v1/models", "/v1/keys", "/v1/adapters", "/v1/adapters/none", "/v1/admin/audit"):
                    answers.append(await rig.ask("GET", path, token))
                    is_good = token in good and "admin" not in path
                    assert (answers[-1].status_code == 401) == (not is_good), (path, answers[-1].text)
            await eventually_in_loop(lambda: provider.num_requested == num_requested + 1)  # one key was unknown
        reported = "".join(f"{one.text} {one.headers}" for one in answers)
        reported += "".join(
            f"{one.getMessage()} {one.__dict__}" for one in caplog.records if one.name.startswith("motet")
        )
        assert all(part not in reported for token in good + bad for part in token.split(".")[1:])
    provider.mode = "well"
    await tokens.stop()


async def test_unknown_keys_do_not_flood_the_provider(
    provider: Provider, tokens: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_verifier_module, "REQUESTED_GAP_S", 3600.0)
    (issuer,) = tokens.issuers.values()
    before = issuer.num_fetches
    for number in range(200):
        assert tokens.verify(provider.token(EC_KEY, f"made up {number}", "ES256")) is None
        await asyncio.sleep(0)
    await eventually_in_loop(lambda: issuer.num_fetches == before + 1)
    for number in range(50):
        tokens.verify(provider.token(EC_KEY, f"again {number}", "ES256"))
        await asyncio.sleep(0.01)
    assert issuer.num_fetches == before + 1


@pytest.mark.parametrize("mode", ["away", "slow", "giant", "no json", "of another", "astray"])
async def test_the_last_good_keys_stay(mode: str, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = IssuerKeys(provider.issuer)
    await issuer.fetch()
    keys = issuer.keys
    assert keys is not None and set(keys) == {"one", "two"}
    monkeypatch.setattr(token_verifier_module, "FETCH_S", 0.5)
    provider.mode, provider.keys = mode, []
    with pytest.raises((IssuerError, OSError, TimeoutError, httpx.HTTPError)):
        await issuer.fetch()
    assert issuer.keys is keys


@pytest.mark.parametrize("mode", ["away", "slow", "giant", "no json"])
async def test_without_keys_a_good_token_is_not_called_wrong(
    mode: str, provider: Provider, redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a provider that hangs holds up neither a request nor the start."""
    monkeypatch.setattr(token_verifier, "_FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(token_verifier_module, "_FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(token_verifier_module, "_MAX_BACKOFF_S", 0.2)
    monkeypatch.setattr(token_verifier_module, "FETCH_S", 1.0)
    provider.mode = mode
    tokens = TokenVerifier(config(provider.issuer))
    await tokens.start()
    with pytest.raises(TokensUnavailable):
        tokens.verify(provider.token())
    async with TenantsRig(redis_client, tmp_path, tokens) as rig:
        await rig.done("POST", "/v1/admin/tenants", json={"name": "acme"})
        assert await rig.refused("GET", "/v1/models", provider.token()) == (503, "issuer_unavailable")
        assert await rig.refused("GET", "/v1/models", "no token") == (401, "invalid_api_key")
        key = await rig.make_key("acme")
        assert (await rig.ask("GET", "/v1/models", key)).status_code == 200
        provider.mode = "well"
        token = provider.token()

        def is_known() -> bool:
            try:
                return tokens.verify(token) is not None
            except TokensUnavailable:
                return False

        await eventually_in_loop(is_known)
    await tokens.stop()


def test_keys_that_cannot_be_used_take_no_other_with_them() -> None:
    shared = {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"}
    odd: list[Any] = [shared, {"kty": "RSA", "kid": "broken"}, {"kty": "EC"}, 7, jwk(RSA_KEY, "enc", use="enc")]
    assert set(public_keys({"keys": [*odd, jwk(EC_KEY, "good")]})) == {"good"}
    wrong: list[Any] = [{}, {"keys": {}}, {"keys": odd}, {"keys": [jwk(EC_KEY, str(n)) for n in range(101)]}]
    for document in wrong:
        with pytest.raises(IssuerError):
            public_keys(document)


def test_only_what_cannot_be_changed_on_its_way_is_an_issuer() -> None:
    good = ["https://id.example/realm", "http://127.0.0.1:80", "http://[::1]:80/x", "http://localhost"]
    bad = [
        "http://id.example",
        "ftp://id.example",
        "https://",
        "id.example",
        "file:///etc/passwd",
        "http://127.0.0.1.evil",
    ]
    assert [url for url in good + bad if is_safe(url)] == good
    with pytest.raises(ValueError, match="oidc_audience"):
        config("https://id.example", oidc_audience="")
