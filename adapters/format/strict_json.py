"""Parses JSON that comes from uploads, and refuses what two parsers could read differently."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ..errors import AdapterInvalid, shown


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises AdapterInvalid, which names `what`, for anything else, double keys and NaN."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise AdapterInvalid(f"{what} has the key {shown(key)} twice: each key may be there once")
            found[key] = value
        return found

    def constant(text: str) -> NoReturn:
        raise AdapterInvalid(f"{what} holds {text}, which is not JSON: numbers must be finite")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise AdapterInvalid(f"{what} is not UTF-8 text (byte {error.start}): a JSON object is needed") from error
    except RecursionError as error:
        raise AdapterInvalid(f"{what} is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise AdapterInvalid(f"{what} is not JSON ({error}): a JSON object is needed") from error
    if not isinstance(value, dict):
        raise AdapterInvalid(f"{what} holds {shown(value)}: a JSON object is needed")
    return value
