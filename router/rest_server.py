"""The HTTP app of one router, with all its routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..adapters.registry.administration.administration import Administration
from ..adapters.registry.preloads import Preloads
from ..adapters.registry.registry_view import RegistryView
from ..adapters.upload import UploadService
from .administration.keys_api import KeysApi
from .administration.tenants_api import LimitsApi, TenantsApi, UsersApi
from .batches.batches import Batches
from .batches.schema import Endpoint as LineRoute
from .bodies.body_reader import BodyReader
from .classification import ScoreHeads
from .completions_api import CompletionsApi
from .config import CurrentConfig
from .endpoint import Cors, Endpoint, EndpointRoute, RegistryOutages
from .exposition.families import MetricsTarget
from .fleet.dispatch import Dispatcher
from .fleet.pin_keeper import PinKeeper
from .http.access_log import AccessLog, begin_record
from .http.auth import Authenticator, OperatorKey, Tokens
from .http.errors import ApiError, internal_error
from .http.route import RouteSpec, routes_of
from .metrics import Metrics
from .models_api import ModelsApi, TokenizeApi
from .openapi_document import OpenApi
from .operations_api import OperationsApi, Readiness
from .pauses import PauseApi, Pauses
from .tenancy.account import Accountant, Accounts
from .tenancy.quotas import Quotas
from .text.adapter_texts import AdapterTexts
from .text.text import TextService
from .training_api import TrainingApi
from .uploads.adapters_api import AdaptersApi
from .uploads.lora_adapters_api import LoraAdaptersApi
from .versions.canary_book import CanaryBook
from .versions.residency_api import PinApi, PreloadApi, Preloader, ResidencyApi
from .versions.shadow_sender import ShadowSender
from .versions.version_choice import BaseModel
from .versions.versions_api import TrialsApi, VersionsApi

UNKNOWN_ROUTE: Final = "unknown"  # in the metrics: what clients ask for must not make labels


def create_app(
    *,
    config: CurrentConfig,
    dispatcher: Dispatcher,
    view: RegistryView,  # must be started
    uploads: UploadService,
    text: TextService,
    operator_key: str | OperatorKey,
    base_names: Sequence[str] = (),  # beside the served one
    metrics: Metrics | None = None,
    labels: Mapping[str, str] | None = None,
    targets: Callable[[], Sequence[MetricsTarget]] = tuple,
    accountants: Sequence[Accountant] = (),
    administration: Administration | None = None,
    tokens: Tokens | None = None,
    quotas: Quotas | None = None,
    canaries: CanaryBook | None = None,
    preloads: Preloads | None = None,
    pins: PinKeeper | None = None,
    batches: Batches | None = None,
    adapter_pages: int = 1,
    more_routes: Callable[[RegistryView], Sequence[RouteSpec]] = lambda view: (),
) -> Starlette:
    """The app. The caller starts and stops the collaborators that it passes in.

    `config`: a change takes effect with the next request. `operator_key`: for /status, /metrics and the administration,
    which show all tenants. `metrics`: None: its own. `labels`: of all that /metrics shows. `targets`: processes with
    metrics of their own. `accountants`: account for each answer. `administration`: None: tenants and keys cannot be
    changed here, nor requests be paused. `tokens`: verifies tokens of identity providers; None: only keys are accepted.
    `quotas`: None: there are none. `canaries`: must be started; None: no version can be put on trial. `preloads`: None,
    or no `canaries`: no adapter can be preloaded. `pins`: must be started; None: none can be pinned. `batches`: is
    started later; None: there are no files, no batches, and no stored responses. `adapter_pages`: see `TrainingApi`.
    `more_routes`: routes of what else the caller has made.
    """
    metrics = metrics or Metrics()
    base = BaseModel(config, dispatcher, view)
    readiness = Readiness(config, dispatcher, metrics)
    if canaries is not None:
        accountants = (*accountants, canaries)
    accounts = Accounts(accountants) if quotas is None else Accounts((quotas, *accountants), quotas.precheck)
    shadows = None if canaries is None else ShadowSender(dispatcher, text, canaries, accounts)
    counts = None if canaries is None else canaries.counts
    bodies = BodyReader(config.now.max_held_body_bytes, metrics)
    texts = AdapterTexts(text, uploads.own_text)
    adapters = AdaptersApi(config, uploads, metrics, text, base_names, texts, quotas)
    responses = None if batches is None else batches.responses
    authenticator, access_log = Authenticator(view, OperatorKey.of(operator_key), tokens), AccessLog(config)
    pauses = None if administration is None else Pauses(view, dispatcher, authenticator)
    apis: list[object] = [
        CompletionsApi(
            *(config, base, dispatcher, view, text, texts, ScoreHeads(uploads.score_head)),
            *(metrics, accounts, bodies, shadows, responses, pauses),
        ),
        ModelsApi(base, view),
        TokenizeApi(config, base, bodies, text, texts),
        adapters,
        LoraAdaptersApi(config, adapters),
        VersionsApi(uploads, counts),
        ResidencyApi(uploads, dispatcher, view, counts, preloads, pins),
        LimitsApi(quotas, uploads),
        OperationsApi(base, dispatcher, view, metrics, readiness, labels or {}, targets),
        TrainingApi(base, adapter_pages),
    ]
    routes = [*routes_of(*apis), *more_routes(view)]
    if counts is not None:
        routes += routes_of(TrialsApi(uploads, counts))
    if canaries is not None and preloads is not None:
        routes += routes_of(PreloadApi(uploads, Preloader(dispatcher, preloads, canaries)))
    if pins is not None:
        routes += routes_of(PinApi(uploads, view, pins))
    if administration is not None and pauses is not None:
        routes += routes_of(
            PauseApi(pauses, administration.tenants, view),
            TenantsApi(administration, view),
            KeysApi(administration, view),
            UsersApi(administration, view, uploads, batches),
        )
    if batches is not None:
        routes += batches.routes()
    openapi = OpenApi(routes)
    cors, outages = Cors(config), RegistryOutages(lambda: view.is_unreachable)
    app = Starlette()
    app.router.redirect_slashes = False
    app.state.routes, app.state.pauses = openapi.all_routes, pauses
    for route in openapi.all_routes:
        endpoint = Endpoint(route, authenticator, metrics, access_log, cors, outages)
        app.router.routes.append(EndpointRoute(route.path, endpoint, methods=[route.method]))
    if batches is not None:
        lines = [
            replace(spec, method="BATCH") for spec in routes if spec.path in get_args(LineRoute) and spec.reads_body
        ]
        batches.answer_with(
            {spec.path: Endpoint(spec, batches.authenticator, metrics, access_log, cors, outages) for spec in lines},
            lambda: config.now.scales_from_zero or dispatcher.gang() is not None,
        )
    app.add_exception_handler(HTTPException, partial(_no_route, metrics, access_log, cors))
    app.add_exception_handler(Exception, partial(_internal, metrics))
    return app


async def _no_route(
    metrics: Metrics, access_log: AccessLog, cors: Cors, request: Request, error: Exception
) -> Response:
    assert isinstance(error, HTTPException)
    record = begin_record(request.scope, UNKNOWN_ROUTE)
    if (preflight := cors.preflight(request)) is not None:
        metrics.requests[UNKNOWN_ROUTE, preflight.status_code] += 1
        preflight.raw_headers.append(record.header)
        access_log.write(record, preflight.status_code)
        return preflight
    metrics.requests[UNKNOWN_ROUTE, error.status_code] += 1
    message = f"{error.detail}: {request.method} {request.url.path}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    refusal = ApiError(error.status_code, message, code=code, headers=error.headers)
    metrics.count_error(refusal)
    response = refusal.response()
    response.raw_headers += [record.header, *cors.headers(request.scope)]
    record.error, record.num_sent_bytes = code or "", len(response.body)
    access_log.write(record, error.status_code)
    return response


async def _internal(metrics: Metrics, request: Request, error: Exception) -> Response:
    refusal = internal_error()
    metrics.count_error(refusal)
    return refusal.response()
