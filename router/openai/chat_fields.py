"""Shared by translations into chats: makes the chat from its fields, and renames fields in errors for the client."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from ..http.errors import ApiError
from ..http.json_body import explained
from .request_schema import ChatRequest, GenerationFields

C = TypeVar("C", bound=ChatRequest)
T = TypeVar("T")


def chat_of(
    request: GenerationFields,
    chat_fields: Mapping[str, Any],
    kind: type[C],
    *,
    besides: Collection[str],
    names: Mapping[str, str],
) -> C:
    """The chat with `chat_fields` and those of every generation that the request has, as far as they are not None.

    `besides`: without these. Raises a 400 by the client's `names`: see `renamed`.
    """
    shared = {field: getattr(request, field) for field in GenerationFields.__struct_fields__ if field not in besides}
    pairs = [(field, value) for fields in (shared, chat_fields) for field, value in fields.items() if value is not None]
    try:
        return msgspec.convert(dict(pairs), kind)
    except msgspec.ValidationError as error:
        raise renamed(explained(error), names) from error


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error about a chat's field with the client's name of it.

    `names`: by patterns of the chat's. One that ends with `.*` leaves out the place within the field, which is one in
    the chat.
    """
    param = "" if error.is_as_sent else error.detail.param or ""
    client_param = client_name(param, names)
    if client_param != param:
        message = error.detail.message.replace(f"'{param}'", f"'{client_param}'")
        for other, own_name in names.items():
            if (word := other.removesuffix(".*")).isidentifier():
                message = re.sub(rf"\b{word}\b(?!')", own_name, message)
        return ApiError(error.status_code, message, param=client_param, code=error.detail.code, headers=error.headers)
    return error


def client_name(param: str, names: Mapping[str, str], places: Mapping[str, str] = MappingProxyType({})) -> str:
    """The client's name of a chat's field. `places`: exact ones, which come first."""
    place, _, field = param.rpartition(".")
    if place in places:
        return f"{places[place]}.{field}"
    for pattern, name in names.items():
        client_param, num_found = re.subn(rf"^{pattern}(?!\w)", name, param, count=1)
        if num_found:
            return client_param
    return param


def left_out_text(kind: str) -> str:
    """What the model reads in the place of something that is left out."""
    return f"[{kind[:40]} left out]"


def needed(value: T | None, param: str) -> T:
    if value is None:
        raise missing(param)
    return value


def missing(param: str) -> ApiError:
    return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
