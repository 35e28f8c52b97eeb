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
from .access.access_log import AccessLog
from .access.request_record import begin_record
from .base_model import BaseModel
from .completions_api import CompletionsApi
from .config import CurrentConfig
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
    config: CurrentConfig,
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
    own. `config`: what in it can change takes effect with the next request.
    """
    metrics = metrics or Metrics()
    base = BaseModel(config.now.model_name, dispatcher, view, scales_from_zero=config.now.scales_from_zero)
    readiness = Readiness(config, dispatcher, metrics)
    operations = OperationsApi(base, dispatcher, view, metrics, readiness, operator_key, labels or {}, targets)
    models = ModelsApi(base, view)
    completions = CompletionsApi(config, base, dispatcher, view, text, metrics)
    adapters = AdaptersApi(config, view, uploads, metrics)
    access_log = AccessLog(config)
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
        endpoint = Endpoint(f"{method} {path}", handler, metrics, access_log)
        app.router.routes.append(Route(path, endpoint, methods=[method]))
    app.add_exception_handler(HTTPException, partial(_no_route, metrics, access_log))
    app.add_exception_handler(Exception, partial(_internal, metrics))
    return app


async def _no_route(metrics: Metrics, access_log: AccessLog, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    record = begin_record(request.scope, UNKNOWN_ROUTE)
    metrics.requests[UNKNOWN_ROUTE, error.status_code] += 1
    message = f"{error.detail}: {request.method} {request.url.path}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    refusal = ApiError(error.status_code, message, code=code, headers=error.headers)
    metrics.count_error(refusal)
    response = refusal.response()
    response.raw_headers.append(record.header)
    record.error, record.num_sent_bytes = code or "", len(response.body)
    access_log.write(record, error.status_code)
    return response


async def _internal(metrics: Metrics, request: Request, error: Exception) -> Response:
    refusal = internal_error()
    metrics.count_error(refusal)
    return refusal.response()
