"""Errors as OpenAI's API tells them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.responses import Response

from ...workers.wire.messages import SequenceError

RETRY_AFTER_S: Final = 1
LONGEST_RETRY_AFTER_S: Final = 3600  # nobody knows more of a queue than that it is long


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """A request that gets an error for an answer."""

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

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> Response:
        return Response(self.body(), self.status_code, self.headers, "application/json")


def invalid_value(param: str, message: str) -> ApiError:
    """A field of the request that holds what it may not."""
    return ApiError(400, f"Invalid value for '{param}': {message}", param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """A field that would change the answer and that motet does not know how to obey."""
    return ApiError(400, f"Unsupported parameter: '{param}': {message}", param=param, code="unsupported_parameter")


def context_length_exceeded(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def model_not_found(model: str) -> ApiError:
    """One answer for what does not exist and for what belongs to another tenant."""
    message = f"The model `{model}` does not exist or you do not have access to it."
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, code: str) -> ApiError:
    """Not now; a client may come back at once."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def internal_error() -> ApiError:
    """Our own fault. The cause is in the log, not in the answer."""
    return ApiError(500, "The server had an error while processing the request.", code="internal_error")


def from_sequence_error(error: SequenceError) -> ApiError:
    """What a client is told when the engine gave a sequence up."""
    match error.kind:
        case "invalid_request":
            return ApiError(400, error.message, code="invalid_request")
        case "adapter_failed":
            return ApiError(500, error.message, code="adapter_failed")
        case "overloaded":
            return ApiError(429, error.message, code="overloaded", headers={"Retry-After": _retry_after(error)})
        case "timeout":
            return ApiError(408, error.message, code="timeout")
        case "gang_lost" | "handed_over":  # the latter is for routers only
            return unavailable(error.message, "gang_lost")
        case "taken_over":
            return ApiError(409, error.message, code="taken_over")
        case "internal":
            return ApiError(500, error.message, code="internal_error")


def _retry_after(error: SequenceError) -> str:
    """Whole seconds, as the header wants them."""
    return str(min(max(RETRY_AFTER_S, math.ceil(error.retry_after_s or 0.0)), LONGEST_RETRY_AFTER_S))


def _type_of(status_code: int) -> str:
    if status_code == 429:
        return "rate_limit_error"
    if status_code == 408:
        return "timeout_error"
    return "server_error" if status_code >= 500 else "invalid_request_error"
