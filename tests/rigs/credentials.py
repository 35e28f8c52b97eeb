"""Credentials that a request may carry, and what each route must answer: one pure table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from motet.router.http.route import RouteSpec
from motet.tests.rigs.real_front import (
    ASKER_KEY,
    EXPIRED_KEY,
    OPERATOR_KEY,
    SCOPES,
    SUSPENDED_KEY,
    key_without,
)

CREDENTIALS: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "no key": None,
        "no bearer": f"Basic {ASKER_KEY}",
        "an empty key": "Bearer ",
        "only a key": ASKER_KEY,
        "an unknown key": "Bearer unknown-key",
        "an expired key": f"Bearer {EXPIRED_KEY}",
        "a suspended tenant": f"Bearer {SUSPENDED_KEY}",
        "a tenant's key": f"Bearer {ASKER_KEY}",
        "the operators' key": f"Bearer {OPERATOR_KEY}",
        **{f"a key without {scope}": f"Bearer {key_without(scope)}" for scope in sorted(SCOPES)},
    }
)
Refusal = tuple[int, str]  # status and code
UNKNOWN_KEY: Final[Refusal] = (401, "invalid_api_key")


def refusal(route: RouteSpec, credentials: str) -> Refusal | None:
    """How the route must refuse such credentials; None: whatever it answers, it does not refuse them."""
    if route.scope == "public":
        return None
    if route.scope == "operator":
        return None if credentials == "the operators' key" else UNKNOWN_KEY
    match credentials:
        case "a tenant's key":
            return None
        case "a suspended tenant":
            return 403, "tenant_suspended"
        case _ if credentials.startswith("a key without "):
            return (403, "missing_scope") if credentials == f"a key without {route.scope}" else None
        case _:
            return UNKNOWN_KEY


@dataclass(frozen=True)
class Thing:
    """What stands for a name in a path or a body: a thing of the owner's, and one that does not exist."""

    owners: str
    unowned: str  # as long as the owner's, so that answers have the same length

    def __post_init__(self) -> None:
        assert len(self.owners) == len(self.unowned)


def headers_of(credentials: str | None) -> dict[str, Any]:
    return {} if credentials is None else {"Authorization": credentials}
