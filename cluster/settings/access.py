"""Settings: addresses, limits of connections, logs, keys, identity providers, metrics and the registry."""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_tenant
from ...router.tenancy.oidc_config import is_safe
from ..process_log import LogFormat, LogLevel
from .setting_field import Bytes, CountOrNone, Pairs, Refusal, Setting, SettingGroup, Texts, Unit

REDIS_SCHEMES = ("redis", "rediss", "unix")
# Those with a public key: with a shared key, every verifier could also issue tokens.
SIGNATURES = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
OF_SERVE = "Serve listens for all applications: http_options of its configuration say where"
OF_THE_EDGE = (
    "the edge is in front of all applications: it is set on each node, for the program that Serve runs for HAProxy"
)
_A_SECRET = "arguments show in Ray's state: the file {} in the folder of secrets says it, or the environment"


def check_host(host: str | None) -> Refusal | None:
    return (host, "an address of this machine is needed; 0.0.0.0 is all of them") if host == "" else None


def check_keys(keys: tuple[tuple[str, str], ...]) -> Refusal | None:
    """Keys are secrets, so messages do not contain them."""
    seen: dict[str, str] = {}
    for tenant, key in keys:
        try:
            check_tenant(tenant)
        except AdapterInvalid as error:
            return tenant, str(error)
        if not is_sendable(key):
            return f"{tenant}=…", "a key is printable ASCII without spaces, and not empty"
        if seen.setdefault(key, tenant) != tenant:
            return f"{tenant}=…", f"the same key was given to {seen[key]}; each needs its own"
    return None


def check_operator_key(key: str | None) -> Refusal | None:
    return None if key is None or is_sendable(key) else ("…", "a key is printable ASCII without spaces, and not empty")


def is_sendable(key: str) -> bool:
    """Whether a key can stand in a header."""
    return bool(key) and key.isascii() and key.isprintable() and " " not in key


def check_redis_url(url: str | None) -> Refusal | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in REDIS_SCHEMES:
        return _without_password(url), f"{', '.join(f'{scheme}://' for scheme in REDIS_SCHEMES)} are accepted"
    if _is_cut_in_password(parts):
        return "…", "percent-encode the password (/ is %2F, # is %23, ? is %3F, @ is %40); a port is a number to 65535"
    return None


def _is_cut_in_password(parts: SplitResult) -> bool:
    """Whether the host's part ends too early, as at a "/" in a password, which messages would then show as a port."""
    if parts.scheme == "unix":
        return ":" in parts.netloc and "@" not in parts.netloc
    try:
        is_whole = parts.port is None or parts.hostname is not None
    except ValueError:
        return True
    return not is_whole or "@" in parts.path + parts.query + parts.fragment


def check_networks(networks: str) -> Refusal | None:
    for network in networks.split(",") if networks else ():
        try:
            ip_network(network)
        except ValueError:
            return network, "addresses or networks with commas between them are accepted, like 10.0.0.0/8,fd00::/8"
    return None


def check_origins(origins: str) -> Refusal | None:
    for origin in origins.split(",") if origins not in ("", "*") else ():
        try:
            parts = urlsplit(origin)
            is_origin = f"{parts.scheme}://{parts.netloc}" == origin.lower() == origin and bool(parts.hostname)
        except ValueError:
            is_origin = False
        if not is_origin or parts.scheme not in ("http", "https") or "@" in origin:
            return (
                origin,
                "origins as browsers send them, with commas between them, like https://chat.example.com, or *",
            )
    return None


def check_issuers(issuers: str) -> Refusal | None:
    for issuer in issuers.split(",") if issuers else ():
        if not is_safe(issuer) or "?" in issuer or "#" in issuer:
            return issuer, "https URLs with commas between them are accepted, as `iss` says them in the tokens"
    return None


def check_algorithms(algorithms: str) -> Refusal | None:
    for algorithm in algorithms.split(","):
        if algorithm not in SIGNATURES:
            return algorithm, f"algorithms with commas between them are accepted: {', '.join(SIGNATURES)}"
    return None


def _without_password(url: str) -> str:
    """The part after the last "@", up to a query, since passwords are before it or in the query."""
    before, at, after = url.rpartition("@")
    if "?" in before:
        return "…"
    return ("…@" if at else "") + re.split("[?#]", after)[0]


class Access(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Access."""

    host: Annotated[
        str | None,
        Unit("ADDRESS", "an address of this machine"),
        Setting(
            "Address to listen at; 0.0.0.0: all addresses of this machine.",
            unset="127.0.0.1, and with --address 0.0.0.0",
            check=check_host,
            not_in_args=OF_SERVE,
        ),
    ] = None
    port: Annotated[int, Meta(ge=1, le=65535), Unit("NUMBER"), Setting("Port to listen at.", not_in_args=OF_SERVE)] = (
        8000
    )
    max_connections: Annotated[
        int,
        Meta(ge=16, le=1_000_000),
        Unit("NUMBER"),
        Setting(
            "The most connections at once, at each front; fewer if the limit of open files is too low.",
            env="MOTET_MAX_CONNECTIONS",
            not_in_args=OF_THE_EDGE,
        ),
    ] = 16_384
    max_connections_per_source: Annotated[
        CountOrNone,
        Setting(
            "The most running requests from one address, and connections once half of all are in use; 0: no limit.",
            env="MOTET_MAX_CONNECTIONS_PER_SOURCE",
            not_in_args=OF_THE_EDGE,
        ),
    ] = 1024
    max_requests_per_key: Annotated[
        CountOrNone,
        Setting(
            "The most running requests with one key, at each front; 0: no limit.",
            env="MOTET_MAX_REQUESTS_PER_KEY",
            not_in_args=OF_THE_EDGE,
        ),
    ] = 1024
    max_keyless_per_second: Annotated[
        CountOrNone,
        Setting(
            "The most requests a second from one address without a key, with unknown keys, and to routes that need "
            "none, each counted separately; 0: no limit.",
            env="MOTET_MAX_KEYLESS_PER_SECOND",
            not_in_args=OF_THE_EDGE,
        ),
    ] = 50
    trusted_proxies: Annotated[
        str,
        Texts("NETWORKS", "addresses or networks with commas between them"),
        Setting(
            "Proxies in front of motet, whose X-Forwarded-For holds the client's address.",
            unset="none",
            env="MOTET_TRUSTED_PROXIES",
            check=check_networks,
            not_in_args=OF_THE_EDGE,
        ),
    ] = ""
    cors_origins: Annotated[
        str,
        Texts("ORIGINS", "origins with commas between them, or *"),
        Setting(
            "Origins of web pages whose scripts may send requests to motet; *: all origins.",
            "live",
            live_in="router",
            unset="none",
            env="MOTET_CORS_ORIGINS",
            check=check_origins,
        ),
    ] = ""
    access_log: Annotated[
        bool,
        Setting(
            "Whether routers log a line for each request, without its content.",
            "live",
            live_in="router",
        ),
    ] = True
    log_format: Annotated[
        LogFormat, Setting("How routers, gangs and workers write their logs: text for humans, json for machines.")
    ] = "text"
    log_level: Annotated[LogLevel, Setting("Lowest level of the lines in their logs.")] = "info"
    keys: Annotated[
        tuple[tuple[str, str], ...],
        Pairs("TENANT=KEY", example="acme=a-long-secret"),
        Setting(
            "An API key of a tenant.",
            flags=("key",),
            unset="a new one of the tenant default, which is printed",
            env="MOTET_KEYS",
            secret=True,
            check=check_keys,
            not_in_args=_A_SECRET.format("keys"),
        ),
    ] = ()
    operator_key: Annotated[
        str | None,
        Unit("KEY", "printable ASCII without spaces"),
        Setting(
            "The key for /status, /metrics and each node's metrics.",
            unset="the one in the file operator_key of the data folder, made at the first start",
            env="MOTET_OPERATOR_KEY",
            secret=True,
            check=check_operator_key,
            not_in_args=_A_SECRET.format("operator-key"),
        ),
    ] = None
    oidc_issuers: Annotated[
        str,
        Texts("URLS", "https URLs with commas between them"),
        Setting(
            "Identity providers whose tokens are accepted instead of API keys.",
            unset="none",
            env="MOTET_OIDC_ISSUERS",
            check=check_issuers,
        ),
    ] = ""
    oidc_audience: Annotated[
        str, Unit("NAME"), Setting("What a token's `aud` must name.", unset="none", env="MOTET_OIDC_AUDIENCE")
    ] = ""
    oidc_algorithms: Annotated[
        str,
        Texts("NAMES", "algorithms with commas between them"),
        Setting("Accepted signature algorithms of tokens.", check=check_algorithms),
    ] = "RS256,ES256"
    oidc_tenant_claim: Annotated[
        str, Meta(min_length=1), Unit("NAME"), Setting("The claim of a token that names its tenant.")
    ] = "tenant"
    oidc_user_claim: Annotated[
        str, Meta(min_length=1), Unit("NAME"), Setting("The claim of a token that names its tenant's user.")
    ] = "sub"
    oidc_scopes_claim: Annotated[
        str, Meta(min_length=1), Unit("NAME"), Setting("The claim of a token that lists its scopes.")
    ] = "scope"
    metrics_port: Annotated[
        int,
        Meta(ge=0, le=65535),
        Unit("NUMBER"),
        Setting(
            "Port of each node for the metrics of its routers and gangs; 0: none. Other machines reach it only on a "
            "running cluster."
        ),
    ] = 9400
    metrics_access: Annotated[
        Literal["operators", "all"],
        Setting(
            "Access to these: with the operators' key, or for all, if collectors cannot send a key; then the network "
            "must keep others out."
        ),
    ] = "operators"
    redis_url: Annotated[
        str | None,
        Unit("URL", "a URL that begins with redis://, rediss:// or unix://"),
        Setting(
            "The Redis that holds the registry.",
            unset="its own server in the data folder",
            env="REDIS_URL",
            secret=True,
            check=check_redis_url,
            not_in_args=_A_SECRET.format("redis-url"),
        ),
    ] = None
    redis_max_bytes: Annotated[
        Bytes,
        Setting(
            "Memory of motet's own Redis (another one has its own `maxmemory`). When it is full, uploads are refused; "
            "completions work until the ledger's disk is full, too (docs/size.md).",
            not_in_args="applications use a Redis of their own, whose maxmemory bounds it",
        ),
    ] = 1 << 30
