"""Decodes JSON bodies of requests, and names the field in every error."""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from .errors import ApiError, invalid_value

T = TypeVar("T")

_AT_PATH: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(?P<field>.*)`$")


def decode(body: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded body. Raises 400 for a body that does not fit the schema."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explained(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The request's body is not JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "The request's body is nested too deeply.", code="invalid_json") from error


def explained(error: msgspec.ValidationError) -> ApiError:
    """A 400 for an error of msgspec's, such as "Expected `int`, got `str` - at `$.messages[0].role`"."""
    match = _AT_PATH.match(str(error))
    assert match is not None  # every part of the pattern is optional
    what, path = match["what"], (match["path"] or "").removesuffix("[...]")
    missing = _MISSING.match(what)
    if missing is not None:
        param = f"{path}.{missing['field']}" if path else missing["field"]
        message = f"Missing required parameter: '{param}'."
        return ApiError(400, message, param=param, code="missing_required_parameter")
    if not path:
        return ApiError(400, f"The request's body does not fit: {what}.", code="invalid_value")
    return invalid_value(path, f"{what[:1].lower()}{what[1:]}.")
