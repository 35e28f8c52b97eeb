"""Parses JSON that comes from uploads, and refuses what two parsers could read differently."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ..errors import AdapterInvalid, quote


def parse_object(data: bytes, label: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises AdapterInvalid, which names `label`, for anything else, double keys and NaN."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in items:
            if key in fields:
                raise AdapterInvalid(f"{label} has the key {quote(key)} twice: each key may be there once")
            fields[key] = value
        return fields

    def constant(text: str) -> NoReturn:
        raise AdapterInvalid(f"{label} holds {text}, which is not JSON: numbers must be finite")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise AdapterInvalid(f"{label} is not UTF-8 text (byte {error.start}): a JSON object is needed") from error
    except RecursionError as error:
        raise AdapterInvalid(f"{label} is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise AdapterInvalid(f"{label} is not JSON ({error}): a JSON object is needed") from error
    if not isinstance(value, dict):
        raise AdapterInvalid(f"{label} holds {quote(value)}: a JSON object is needed")
    return value
