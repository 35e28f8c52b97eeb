"""A route of the REST API: what serves it, who may ask it, and what its OpenAPI description is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..adapters.tenants.records import Scope
from .endpoint import Handler


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """`body` and `answers`: types that msgspec can describe; None: no JSON."""

    method: str
    path: str
    handler: Handler
    scope: Scope | Literal["operator"] | None  # that a key needs; "operator": the operators'; None: anybody may ask
    summary: str = ""
    body: Any = None
    answers: dict[int, Any] = field(default_factory=dict)  # by status; the errors that all routes share are left out
    query: dict[str, Any] = field(default_factory=dict)  # types of its query parameters, by name
