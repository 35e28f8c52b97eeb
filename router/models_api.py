"""/v1/models: the base and the caller's adapters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from ..adapters.adapter import AdapterVersion
from ..adapters.errors import RegistryUnavailable
from ..adapters.registry.registry_view import RegistryView
from .access.request_record import record_of
from .base_model import BaseModel, resolved
from .openai_api.answer_schema import Model
from .openai_api.errors import model_not_found, unavailable
from .openai_api.list_page import PAGE_QUERY, ListPage, PageRequest, encoded_list, page_request, read_page
from .route import RouteSpec
from .tenants.auth import Authenticator

OWNER_OF_BASE = "motet"
_name = attrgetter("name")


class ModelsApi:
    def __init__(self, base: BaseModel, view: RegistryView, authenticator: Authenticator) -> None:
        self._base, self._authenticator = base, authenticator
        self._view = view
        self._created_at = int(time.time())

    def routes(self) -> Sequence[RouteSpec]:
        listing = partial(
            RouteSpec,
            method="GET",
            handler=self.list,
            scope="infer",
            answers={200: ListPage[Model]},
            query=PAGE_QUERY,
            errors=("registry_unavailable",),
        )
        return (
            listing(path="/v1/models", summary="List the models that you may ask."),
            listing(path="/v1/models/", summary="The same as /v1/models."),
            RouteSpec(
                method="GET",
                path="/v1/models/{model:path}",  # the name of a base may have slashes
                handler=self.show,
                scope="infer",
                summary="Show a model.",
                answers={200: Model},
                errors=("model_not_found", "registry_unavailable"),
            ),
        )

    async def list(self, request: Request) -> Response:
        """The base first, then the tenant's adapters by name."""
        tenant = self._authenticator.identify(request, "infer").name
        wanted = page_request(request)
        models: list[Model] = []
        if wanted.after is None:
            models.append(self._base_model())
            wanted = PageRequest(wanted.limit - 1)
        elif wanted.after == self._base.name:
            wanted = PageRequest(wanted.limit)
        try:
            adapters, more = await read_page(partial(self._view.list_adapters, tenant), _name, wanted)
        except RegistryUnavailable as error:
            raise unavailable(f"Models cannot be listed now, try again: {error}", "registry_unavailable") from error
        models += map(self._adapter_model, adapters)
        body = await encoded_list(models, [model.id for model in models], more)
        return Response(body, media_type="application/json")

    async def show(self, request: Request) -> Response:
        """The base, or an adapter of the tenant's."""
        tenant = self._authenticator.identify(request, "infer").name
        name = request.path_params["model"]
        if name == self._base.name:
            model = self._base_model()
        else:
            version = await resolved(self._view, tenant, name)
            if version is None:
                raise model_not_found(name)
            model = structs.replace(self._adapter_model(version), id=name)
        record_of(request.scope).model = model.id
        return Response(msgspec.json.encode(model), media_type="application/json")

    def _base_model(self) -> Model:
        return Model(self._base.name, self._created_at, OWNER_OF_BASE, self._base.name, None, self._max_model_len())

    def _adapter_model(self, adapter: AdapterVersion) -> Model:
        base = self._base.name
        return Model(adapter.name, int(adapter.created_at), adapter.tenant, base, base, self._max_model_len())

    def _max_model_len(self) -> int | None:
        gang = self._base.known_gang()
        return gang.max_model_len if gang is not None else None
