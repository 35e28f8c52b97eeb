"""/v1/models: the base and the caller's adapters."""

from __future__ import annotations

import time
from functools import partial
from operator import attrgetter

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from ..adapters.adapter import AdapterVersion
from ..adapters.registry.registry_view import RegistryView
from .access.request_record import record_of
from .base_model import BaseModel, resolved
from .openai_api.answer_schema import Model
from .openai_api.errors import model_not_found
from .openai_api.list_page import PAGE_QUERY, ListPage, PageRequest, list_answer, page_request, read_page
from .route import route
from .tenants.identity import Identity

OWNER_OF_BASE = "motet"
_name = attrgetter("name")


class ModelsApi:
    def __init__(self, base: BaseModel, view: RegistryView) -> None:
        self._base, self._view = base, view
        self._created_at = int(time.time())

    @route(
        "GET",
        "/v1/models",
        scope="infer",
        summary="List the models that you may ask.",
        needs_registry=False,
        query=PAGE_QUERY,
        answers={200: ListPage[Model]},
        errors=("registry_unavailable",),
    )
    async def list(self, request: Request, identity: Identity) -> Response:
        """The base first, then the adapters that the key may see, by name."""
        wanted = page_request(request)
        models: list[Model] = []
        if wanted.after is None:
            models.append(self._base_model())
            wanted = PageRequest(wanted.limit - 1)
        elif wanted.after == self._base.name:
            wanted = PageRequest(wanted.limit)
        adapters, more = await read_page(
            partial(self._view.list_adapters, identity.name, sight=identity.sight), _name, wanted
        )
        models += map(self._adapter_model, adapters)
        return await list_answer(models, [model.id for model in models], more)

    @route(
        "GET",
        "/v1/models/{model:path}",  # the name of a base may have slashes
        scope="infer",
        summary="Show a model.",
        needs_registry=False,
        errors=("model_not_found", "registry_unavailable"),
    )
    async def show(self, request: Request, identity: Identity) -> Model:
        """The base, or an adapter that the key may see."""
        name = request.path_params["model"].removesuffix("/")
        if name == self._base.name:
            model = self._base_model()
        else:
            version = await resolved(self._view, identity, name)
            if version is None:
                raise model_not_found(name)
            model = structs.replace(self._adapter_model(version), id=name)
        record_of(request.scope).model = model.id
        return model

    def _base_model(self) -> Model:
        return Model(self._base.name, self._created_at, OWNER_OF_BASE, self._base.name, None, self._max_model_len())

    def _adapter_model(self, adapter: AdapterVersion) -> Model:
        base = self._base.name
        return Model(adapter.name, int(adapter.created_at), adapter.tenant, base, base, self._max_model_len())

    def _max_model_len(self) -> int | None:
        gang = self._base.known_gang()
        return gang.max_model_len if gang is not None else None
