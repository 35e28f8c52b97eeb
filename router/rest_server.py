"""The HTTP app of one router, with all its routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..adapters.registry.registry_view import RegistryView
from ..adapters.upload import UploadService
from .base_model import BaseModel
from .completions_api import CompletionsApi
from .config import RouterConfig
from .endpoint import Endpoint, Handler
from .exposition.targets import MetricsTarget
from .fleet.dispatch import Dispatcher
from .metrics import Metrics
from .models_api import ModelsApi
from .openai_api.errors import ApiError, internal_error
from .operations_api import OperationsApi
from .readiness import Readiness
from .text.text import TextService
from .uploads.adapters_api import AdaptersApi

UNKNOWN_ROUTE: Final = "unknown"  # in the metrics: what clients ask for must not make labels


def create_app(
    *,
    config: RouterConfig,
    dispatcher: Dispatcher,
    view: RegistryView,  # must be started
    uploads: UploadService,
    text: TextService,
    operator_key: str,
    metrics: Metrics | None = None,
    labels: Mapping[str, str] | None = None,
    targets: Callable[[], Sequence[MetricsTarget]] = tuple,
) -> FastAPI:
    """The app. The caller starts and stops the collaborators that it passes in.

    `operator_key`: what /status and the routes of metrics ask for, since they tell of all tenants. `metrics`: where
    somebody else writes into them too. `labels`: of all that /metrics shows. `targets`: processes with metrics of their
    own.
    """
    metrics = metrics or Metrics()
    base = BaseModel(config.model_name, dispatcher, view, scales_from_zero=config.scales_from_zero)
    readiness = Readiness(config, dispatcher, metrics)
    operations = OperationsApi(base, dispatcher, view, metrics, readiness, operator_key, labels or {}, targets)
    models = ModelsApi(base, view)
    completions = CompletionsApi(config, base, dispatcher, view, text, metrics)
    adapters = AdaptersApi(config, view, uploads, metrics)
    routes: tuple[tuple[str, str, Handler], ...] = (
        ("POST", "/v1/chat/completions", completions.chat),
        ("POST", "/v1/completions", completions.complete),
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/", models.list),
        ("GET", "/v1/models/{model:path}", models.show),  # the name of a base may have slashes
        ("POST", "/v1/adapters", adapters.upload),
        ("GET", "/v1/adapters", adapters.list),
        ("GET", "/v1/adapters/{name}", adapters.show),
        ("DELETE", "/v1/adapters/{name}", adapters.delete),
        ("GET", "/health", operations.health),
        ("GET", "/ready", operations.ready),
        ("GET", "/metrics", operations.metrics),
        ("GET", "/metrics/targets", operations.metrics_targets),
        ("GET", "/status", operations.status),
    )
    app = FastAPI(title="motet", openapi_url=None, docs_url=None, redoc_url=None)
    for method, path, handler in routes:
        app.router.routes.append(Route(path, Endpoint(f"{method} {path}", handler, metrics), methods=[method]))
    app.add_exception_handler(HTTPException, partial(_no_route, metrics))
    app.add_exception_handler(Exception, partial(_internal, metrics))
    return app


async def _no_route(metrics: Metrics, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    metrics.requests[UNKNOWN_ROUTE, error.status_code] += 1
    message = f"{error.detail}: {request.method} {request.url.path}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return _counted(metrics, ApiError(error.status_code, message, code=code, headers=error.headers))


async def _internal(metrics: Metrics, request: Request, error: Exception) -> Response:
    return _counted(metrics, internal_error())


def _counted(metrics: Metrics, error: ApiError) -> Response:
    metrics.count_error(error)
    return error.response()
