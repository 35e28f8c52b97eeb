"""Errors in the format of OpenAI's API: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec
from starlette.responses import Response

from ...adapters.errors import (
    AdapterError,
    AdapterInvalid,
    CallerGone,
    FileInUse,
    NameTaken,
    NoSuchFile,
    NoSuchKey,
    NoSuchName,
    NoSuchTenant,
    NoSuchUser,
    NoSuchVersion,
    QuotaExceeded,
    RegistryFull,
    RegistryUnavailable,
    TenantEnding,
    TenantExists,
    TooManyKeys,
    UploadTooLarge,
    UploadUnchecked,
    VersionRefused,
)
from ...workers.wire.messages import SequenceError

RETRY_AFTER_S: Final = 1
LONGEST_RETRY_AFTER_S: Final = 3600  # longer estimates are too uncertain to report
BEARER_CHALLENGE: Final[Mapping[str, str]] = MappingProxyType({"WWW-Authenticate": "Bearer"})
DO_NOT_RETRY: Final[Mapping[str, str]] = MappingProxyType({"x-should-retry": "false"})  # read by OpenAI's clients


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """An error that is sent to the client in place of an answer."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.detail = ErrorDetail(message, _type_of(status_code), param, code)
        self.headers = dict(headers or {})
        self.is_as_sent = False  # `param` is already the name that the client's API uses

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> Response:
        return Response(self.body(), self.status_code, self.headers, "application/json")


class NoSuchResponse(ApiError):  # noqa: N818
    """404: the same for a response that is not stored and for one of another tenant or user."""

    def __init__(self, param: str = "response_id", response_ids: Iterable[str] = ()) -> None:
        """`response_ids`: that the request refers to, if they have not been looked for."""
        super().__init__(404, "There is no such response.", param=param, code="response_not_found")
        self.response_ids = list(response_ids)


def invalid_value(param: str, message: str) -> ApiError:
    """400: a field of the request has a value that is not accepted."""
    return ApiError(400, f"Invalid value for '{param}': {message}", param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """400: a field of the request would change the answer, and motet does not support it."""
    return ApiError(400, f"Unsupported parameter: '{param}': {message}", param=param, code="unsupported_parameter")


def context_length_exceeded(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def answer_too_large(max_bytes: int) -> ApiError:
    message = (
        f"The answer has more than {max_bytes >> 20} MiB, the limit of a line of a batch: ask for fewer tokens "
        "(max_tokens), choices (n) or log-probabilities (logprobs) in a line."
    )
    return ApiError(400, message, code="answer_too_large")


def model_not_found(model: str) -> ApiError:
    """404: the same for a model that does not exist and for a model of another tenant."""
    message = f"The model `{model}` does not exist or you do not have access to it."
    return ApiError(404, message, param="model", code="model_not_found")


def unknown_key() -> ApiError:
    """401: the same for keys that never existed, that were revoked, and whose tenant or user was deleted."""
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=BEARER_CHALLENGE)


def unavailable(message: str, code: str) -> ApiError:
    """503: the request cannot be served now; the client may try again in a second."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def insufficient_quota(message: str) -> ApiError:
    """429: the tenant or its key has reached a quota that waiting does not restore."""
    return ApiError(429, message, code="insufficient_quota", headers=DO_NOT_RETRY)


def internal_error() -> ApiError:
    """500: a fault of motet. The cause is in the log and not in the answer."""
    return ApiError(500, "The server had an error while processing the request.", code="internal_error")


def from_adapter_error(error: AdapterError) -> ApiError | None:
    """The client's error for an error of the registry or of an upload; None: a fault of motet."""
    message = str(error)
    sentence = f"{message[:1].upper()}{message[1:].removesuffix('.')}."
    match error:
        case AdapterInvalid():
            return ApiError(400, message, code="invalid_value")
        case CallerGone():
            return unknown_key()
        case NoSuchName():
            return ApiError(404, message, param="name", code="adapter_not_found")
        case NoSuchVersion():
            return ApiError(404, message, param="version", code="version_not_found")
        case NoSuchTenant():
            return ApiError(404, sentence, param="tenant", code="tenant_not_found")
        case NoSuchUser():  # the same for a user of another tenant
            return ApiError(404, "There is no such user.", param="user", code="user_not_found")
        case NoSuchKey():  # the same for a key that does not exist and for a key of another tenant
            return ApiError(404, "There is no such API key.", param="key_id", code="key_not_found")
        case NoSuchFile():  # the same for a file of another tenant or user
            return ApiError(404, "There is no such file.", param="file_id", code="file_not_found")
        case FileInUse():
            return ApiError(409, sentence, code="file_in_use")
        case VersionRefused() | NameTaken():
            return ApiError(409, message, code="version_refused")
        case TenantExists():
            return ApiError(409, sentence, param="name", code="tenant_exists")
        case TenantEnding():
            return ApiError(409, sentence, code="tenant_ending")
        case TooManyKeys():
            return ApiError(409, sentence, code="too_many_keys")
        case UploadTooLarge():
            return ApiError(413, message, code="too_large")
        case UploadUnchecked():
            return unavailable(sentence, "upload_unchecked")
        case QuotaExceeded():
            return insufficient_quota(message)
        case RegistryFull():
            return ApiError(507, sentence, code="registry_full")
        case RegistryUnavailable():
            return unavailable(f"The registry cannot be read now: {message}", "registry_unavailable")
    return None


def from_sequence_error(error: SequenceError) -> ApiError:
    """The client's error for a sequence that has failed."""
    match error.kind:
        case "invalid_request":
            return ApiError(400, error.message, code="invalid_request")
        case "adapter_failed":
            return ApiError(500, error.message, code="adapter_failed")
        case "adapter_overflow":  # 4xx: the tenant must act, and operators' alerts must not fire
            return ApiError(422, error.message, code="adapter_overflow")
        case "store_unavailable":
            return unavailable(error.message, "store_unavailable")
        case "overloaded":
            # A timeout that is too short even without a queue will be too short on a retry.
            is_hopeless = error.reason == "timeout" and error.retry_after_s is None
            headers = DO_NOT_RETRY if is_hopeless else {"Retry-After": _retry_after(error)}
            return ApiError(429, error.message, code="overloaded", headers=headers)
        case "timeout":  # its client has given up, and a retry would compute it all again
            return ApiError(408, error.message, code="timeout", headers=DO_NOT_RETRY)
        # Clients see only the first of these: routers handle the others.
        case "gang_lost" | "handed_over" | "given_back" | "withdrawn" | "cancelled":
            return unavailable(error.message, "gang_lost")
        case "taken_over":
            return ApiError(409, error.message, code="taken_over")
        case "internal":
            return ApiError(500, error.message, code="internal_error")


def _retry_after(error: SequenceError) -> str:
    """The value of the header: whole seconds."""
    return str(min(max(RETRY_AFTER_S, math.ceil(error.retry_after_s or 0.0)), LONGEST_RETRY_AFTER_S))


def _type_of(status_code: int) -> str:
    if status_code == 429:
        return "rate_limit_error"
    if status_code == 408:
        return "timeout_error"
    return "server_error" if status_code >= 500 else "invalid_request_error"
