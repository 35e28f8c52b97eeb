"""Definitions of tools as clients write them, drawn at random."""

from __future__ import annotations

import json
import random
from typing import Any

_LEAVES: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 99},
    {"type": "boolean"},
    {"type": "number"},
    {"enum": ["kelvin", "celsius", 'a "quoted" one']},
]
_TEXTS: list[dict[str, Any]] = [{"type": "string", "maxLength": 12}, {"type": "string", "pattern": "^[a-z]{1,5}$"}]


def random_tools(
    rng: random.Random, *, is_flat: bool = False, is_ascii: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Names and schemas of the arguments. `is_flat`: without nested objects, and texts are any texts.

    `is_ascii`: so are the names of arguments.
    """
    names = [f"tool_{number}" for number in range(rng.randint(1, 4))]
    tools = [(name, _object(rng, 0 if is_flat else 2, is_flat=is_flat)) for name in names]
    return json.loads(json.dumps(tools, ensure_ascii=False).replace("Größe", "size")) if is_ascii else tools


def _object(rng: random.Random, depth: int, *, is_flat: bool) -> dict[str, Any]:
    keys = rng.sample(["city", "n", "unit", "when_at", "Größe", "is-on"][: 4 if is_flat else None], rng.randint(0, 4))
    properties = {key: _value(rng, depth, is_flat=is_flat) for key in keys}
    required = [key for key in keys if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int, *, is_flat: bool) -> dict[str, Any]:
    choice = rng.random()
    if is_flat:
        return {"type": "string"} if choice < 0.2 else rng.choice(_LEAVES)
    if depth and choice < 0.2:
        return _object(rng, depth - 1, is_flat=False)
    if depth and choice < 0.4:
        return {"type": "array", "items": _value(rng, depth - 1, is_flat=False), "maxItems": 3}
    if choice < 0.5:
        return {"anyOf": [{"type": "null"}, rng.choice(_LEAVES)]}
    return rng.choice([*_LEAVES, *_TEXTS])
