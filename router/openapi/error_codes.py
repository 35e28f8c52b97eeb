"""Every error that motet answers, by its code: its status, what it means, and which of them every route may give."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ..route import RouteSpec

ERRORS: Final[Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "invalid_value": (400, "a field has a value that is not accepted; the message names both"),
        "missing_required_parameter": (400, "a field, or a part of a form, is missing"),
        "unsupported_parameter": (400, "a field that would change the answer is not supported"),
        "invalid_json": (400, "the body is not JSON"),
        "invalid_messages": (400, "the model's chat template does not take these messages"),
        "invalid_header": (
            400,
            "bytes other than printable ASCII in a header that is read as text, or such a header twice",
        ),
        "context_length_exceeded": (400, "it is too long for the model"),
        "invalid_request": (400, "it could not fit into the pool even alone"),
        "answer_too_large": (400, "a line of a batch whose answer grew beyond 32 MiB; the other lines go on"),
        "invalid_adapter": (
            400,
            "it cannot be served; the message says what is wrong and what is accepted; nothing is stored",
        ),
        "invalid_form": (400, "the body is not such a form; the message says what is wrong with it"),
        "bad_http": (400, "it is not valid HTTP, or its headers have more than 31 KiB"),
        "invalid_api_key": (401, "there is no such key, or the route is the operators' and the key is not"),
        "missing_scope": (403, "the key is good, and may not do this; the message says why"),
        "tenant_suspended": (403, "the key is good, and the operators have suspended its tenant"),
        "model_not_found": (404, "there is no such model, or it is another tenant's"),
        "adapter_not_found": (404, "there is no such adapter, or it is another tenant's"),
        "version_not_found": (404, "the adapter has no such version or alias"),
        "tenant_not_found": (404, "there is no such tenant"),
        "user_not_found": (404, "there is no such user, or none who has a key or a private adapter"),
        "key_not_found": (404, "there is no such key, or it is another tenant's"),
        "file_not_found": (404, "there is no such file, or it is another tenant's or user's"),
        "batch_not_found": (404, "there is no such batch, or it is another tenant's or user's"),
        "response_not_found": (404, "no such response is stored, or it is another tenant's or user's"),
        "not_found": (404, "there is no such route"),
        "method_not_allowed": (405, "the route is not for this method"),
        "request_timeout": (408, "the headers, or the first 30 KiB of the body, took longer than 10 s"),
        "body_timeout": (
            408,
            "the body came too slowly: 10 s, and after that at least 32 KiB a second, at most 120 s",
        ),
        "upload_timeout": (
            408,
            "nothing of the upload came for a minute (`--upload-idle`), or it came too slowly "
            "(`--upload-bytes-per-s`, `--upload-deadline`)",
        ),
        "timeout": (408, "the request's `timeout` has passed before a token was sent"),
        "taken_over": (409, "the stream was resumed on another connection"),
        "version_refused": (409, "the adapter's versions are not so that this could be done; the message says why"),
        "tenant_exists": (409, "the name is taken"),
        "tenant_ending": (409, "the tenant's deletion was cut off and has to be repeated"),
        "file_in_use": (409, "a batch that has not ended reads the file: cancel it first"),
        "batch_ended": (409, "the batch has ended, and cannot be cancelled"),
        "too_many_keys": (409, "a tenant has at most 1,000 keys"),
        "request_too_large": (413, "the body is over the limit, or takes too long to decode"),
        "too_large": (413, "a part of the form is over its limit (`--max-upload-bytes`, `--max-file-bytes`)"),
        "unsupported_encoding": (415, "the body is compressed"),
        "adapter_overflow": (422, "the adapter's weights are so large that the next token has no finite number"),
        "overloaded": (429, "the answer would come too late, or the queue is full; with `Retry-After`"),
        "bodies_full": (
            429,
            "your requests that are arriving, or everybody's, take the memory that is for them "
            "(`--max-held-body-bytes`)",
        ),
        "rate_limit_exceeded": (429, "a quota of the tenant or of the key is used up; with `Retry-After`"),
        "insufficient_quota": (429, "more would be stored or pinned than the tenant or the key may have"),
        "uploads_full": (
            429,
            "64 uploads of yours are under way or wait for a turn, of which you have two (`--max-tenant-uploads`)",
        ),
        "too_many_requests": (429, "more requests of the key, or of the address, are under way than one may have"),
        "headers_too_large": (431, "the headers have more than 16 KiB together"),
        "adapter_failed": (500, "the adapter's files are damaged; upload it again"),
        "internal_error": (500, "motet's own fault; the cause is in its log"),
        "router_lost": (502, "the router that had the request is gone"),
        "no_router": (503, "no router could take the request"),
        "not_ready": (503, "no token can be served now; the message says why"),
        "gang_lost": (503, "no gang came in time, or gangs died of the request; with `Retry-After`"),
        "store_unavailable": (
            503,
            "the adapter could not be read from the data folder, at no gang and several times; with `Retry-After`",
        ),
        "registry_unavailable": (
            503,
            "Redis is away, and the router does not keep what it says of this; with `Retry-After`",
        ),
        "upload_unchecked": (
            503,
            "the upload could not be checked, because the machine is too busy; with `Retry-After`",
        ),
        "issuer_unavailable": (
            503,
            "a token of an identity provider whose keys this router has never had; with `Retry-After`",
        ),
        "ledger_full": (503, "there is no room to write down what the answer costs; with `Retry-After`"),
        "router_timeout": (504, "the router that had the request did not answer"),
        "insufficient_storage": (
            507,
            "the server's disk is too full for it; nothing is registered, and it may be sent again once there is room",
        ),
        "registry_full": (
            507,
            "the memory of Redis is full; nothing was changed, and it may be sent again once there is room",
        ),
    }
)
EVERYWHERE: Final = (
    "invalid_header",
    "bad_http",
    "request_timeout",
    "too_many_requests",
    "headers_too_large",
    "internal_error",
    "router_lost",
    "no_router",
    "router_timeout",
)
OF_NO_ROUTE: Final = ("not_found", "method_not_allowed")  # for paths and methods without a route
_WITH_OPERATORS_KEY: Final = ("invalid_api_key",)
_WITH_KEY: Final = ("invalid_api_key", "missing_scope", "tenant_suspended", "issuer_unavailable")
_WITH_QUERY: Final = ("invalid_value",)
_WITH_BODY: Final = ("invalid_json", "invalid_value", "missing_required_parameter", "body_timeout", "request_too_large")
_WITH_FORM: Final = ("invalid_form", "missing_required_parameter", "too_large", "upload_timeout")


def codes_of(route: RouteSpec) -> tuple[str, ...]:
    """The codes of all errors that the route can give, in the order of `ERRORS`. Raises KeyError for an unknown one."""
    codes = {*EVERYWHERE, *route.errors}
    if route.scope != "public":
        codes.update(_WITH_KEY if route.needs_tenant else _WITH_OPERATORS_KEY)
    for has, more in ((route.query, _WITH_QUERY), (route.body, _WITH_BODY), (route.form, _WITH_FORM)):
        codes.update(more if has else ())
    if "registry_unavailable" in route.errors and route.method != "GET" and not route.reads_body:
        codes.add("registry_full")
    if "{" in route.path:
        codes.add("not_found")  # where a name has a slash that was not sent as %2F
    if unknown := codes - ERRORS.keys():
        raise KeyError(f"{route.method} {route.path}: {sorted(unknown)} must be explained in openapi/error_codes.py")
    return tuple(code for code in ERRORS if code in codes)


def by_status(codes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Codes by status, in ascending order."""
    statuses = sorted({ERRORS[code][0] for code in codes})
    return {status: tuple(code for code in codes if ERRORS[code][0] == status) for status in statuses}
