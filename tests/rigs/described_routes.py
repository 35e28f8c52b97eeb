"""The OpenAPI document of a router's routes, made once in a process for all routers that have the same routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any

from motet.router.http.route import RouteSpec
from motet.router.openapi_document import openapi_document


def described_routes(routes: Sequence[RouteSpec]) -> dict[str, Any]:
    """What `openapi_document` makes of them. It must not be changed."""
    rows = [replace(route, handler=_function(route.handler)) for route in routes]
    for known, made in _described():
        if known == rows:
            return made
    _described().append((rows, openapi_document(routes)))
    return _described()[-1][1]


@cache
def _described() -> list[tuple[list[RouteSpec], dict[str, Any]]]:
    return []


def _function(handler: Callable[..., Any]) -> Callable[..., Any]:
    return handler.__func__ if isinstance(handler, MethodType) else handler
