"""/openapi.json: what this router serves, for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..route import RouteSpec, route, routes_of
from .document import openapi_document


class OpenApi:
    """Describes all routes, itself included. The document is made once."""

    def __init__(self, routes: Sequence[RouteSpec]) -> None:
        self.all_routes = (*routes, *routes_of(self))
        self._body = msgspec.json.encode(openapi_document(self.all_routes))

    @route(
        "GET",
        "/openapi.json",
        scope="public",
        summary="Describe this API by OpenAPI 3.1.",
        answers={200: dict[str, Any]},
    )
    async def show(self, request: Request) -> Response:
        """This document."""
        return Response(self._body, media_type="application/json", headers={"Cache-Control": "max-age=300"})
