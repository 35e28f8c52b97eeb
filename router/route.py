"""A route of the REST API: what serves it, who may ask it, and what its OpenAPI description is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..adapters.registry.tenants.records import Scope
from .endpoint import Handler

OperatorsAlone = Literal["operator"]


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """Types are such that msgspec can describe them. The handler's docstring becomes the description."""

    method: str
    path: str
    handler: Handler
    scope: Scope | OperatorsAlone | None  # that a key needs, or the operators' key; None: anybody may ask
    summary: str = ""
    body: Any = None  # of JSON; None: it takes none
    form: Any = None  # a struct with the parts of a multipart form
    answers: dict[int, Any] = field(default_factory=dict)  # JSON by status, without errors; None: an empty body
    texts: dict[str, str] = field(default_factory=dict)  # what else a 200 may be, by media type
    events: Any = None  # each event's data where the answer is a stream of events
    query: dict[str, Any] = field(default_factory=dict)  # types of its query parameters, by name
    headers: dict[str, Any] = field(default_factory=dict)  # types of the request's headers that it obeys
    errors: tuple[str, ...] = ()  # their codes, but for those that follow from the above; see openapi/error_codes.py
