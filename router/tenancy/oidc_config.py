"""Settings of tokens that identity providers issue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class OidcConfig:
    """Lists have commas between their parts. Defaults and bounds stand with motet's settings."""

    oidc_issuers: str  # whose tokens are accepted, as in `iss`; empty: no tokens are
    oidc_audience: str  # that a token must be for
    oidc_algorithms: str
    oidc_tenant_claim: str  # that names the tenant
    oidc_user_claim: str  # that names the tenant's user
    oidc_scopes_claim: str  # that names scopes, as a list or with spaces between them

    def __post_init__(self) -> None:
        if self.oidc_issuers and not self.oidc_audience:
            raise ValueError("oidc_issuers needs oidc_audience: else tokens for others would be accepted")


def is_safe(url: str) -> bool:
    """Whether its answers cannot be changed on the way: https, or on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in LOOPBACK))
