"""The routes of the REST API: what a route's row says, and the decorator that is the row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Literal, Protocol, TypeVar, get_type_hints

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from ...adapters.registry.tenants.records import Scope
from .errors import ApiError

NeededScope = Scope | Literal["operator", "public"]


class Answer(Protocol):
    """A response of Starlette, or a `GenerationResponse`. `status_code` is final once the call returned."""

    status_code: int
    raw_headers: list[tuple[bytes, bytes]]

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None: ...


Handler = Callable[..., Awaitable[Answer | msgspec.Struct]]
_Handler = TypeVar("_Handler", bound=Handler)


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """One route. Its types are such that msgspec can describe them; the handler's docstring is the description.

    The endpoint calls the handler with the request; with the caller's `Identity` where a tenant's key is needed; and
    with the decoded body where there is one. A struct that the handler returns is sent as JSON, with the first status
    of `answers`.
    """

    method: str
    path: str
    handler: Handler
    scope: NeededScope  # that a tenant's key must have; "operator": the operators' key is needed; "public": none is
    summary: str = ""
    body: Any = None  # of JSON; None: it takes none
    reads_body: bool = False  # the handler reads the body itself
    form: Any = None  # a struct with the parts of a multipart form
    answers: dict[int, Any] = field(default_factory=dict)  # JSON by status, without errors; None: an empty body
    no_store: bool = False  # its answers may hold a key: no cache may keep them
    texts: dict[str, str] = field(default_factory=dict)  # what else a 200 may be, by media type
    events: Any = None  # each event's data where the answer is a stream of events
    query: dict[str, Any] = field(default_factory=dict)  # types of its query parameters, by name
    headers: dict[str, Any] = field(default_factory=dict)  # types of the request's headers that it obeys
    needs_registry: bool = True  # False: it also works with what the router keeps of the registry
    refusal: Callable[[ApiError], Response] = ApiError.response  # the shape of its errors
    names: Mapping[str, str] = field(default_factory=dict)  # the client's own of fields in them: see `renamed`
    errors: tuple[str, ...] = ()  # their codes, but for those that follow from the above; see openapi/document.py

    @property
    def needs_tenant(self) -> bool:
        """Whether only a tenant's key, or token, is accepted."""
        return self.scope not in ("operator", "public")


def route(
    method: str, path: str, *, scope: NeededScope, status: int = 200, **row: Any
) -> Callable[[_Handler], _Handler]:
    """Makes a method the handler of a route. `row`: the other fields of `RouteSpec`.

        @route("PATCH", "/v1/things/{name}", scope="upload", summary="Change a thing.")
        async def change(self, request: Request, identity: Identity, body: ThingChanges) -> Thing: ...

    `body` and `answers` follow from the method's annotations, unless `row` has them: the type of its argument `body`,
    and the struct that it returns, which is sent with `status`. A method with several decorators serves several routes.
    """

    def mark(handler: _Handler) -> _Handler:
        types = get_type_hints(handler)
        fields = {"body": types.get("body"), **row}
        if "answers" not in row and issubclass(types["return"], msgspec.Struct):
            fields["answers"] = {status: types["return"]}
        spec = RouteSpec(method=method, path=path, scope=scope, handler=handler, **fields)
        handler.__dict__["routes"] = (spec, *handler.__dict__.get("routes", ()))
        return handler

    return mark


def routes_of(*apis: object) -> Sequence[RouteSpec]:
    """The routes of these objects' methods, in the order in which they are defined."""
    return [
        replace(spec, handler=MethodType(spec.handler, api))
        for api in apis
        for method in vars(type(api)).values()
        for spec in getattr(method, "routes", ())
    ]
