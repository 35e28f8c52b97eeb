"""What a JSON schema accepts, in a few words for a table."""

from __future__ import annotations

import json
import re
from typing import Any

Schema = dict[str, Any]
_NUMBERS = {"integer": "integer", "number": "number"}
_PLAIN = {"boolean": "boolean", "null": "`null`", "object": "object"}


def words_of(schema: Schema, *, with_null: bool = True) -> str:
    """`with_null`: say that null is accepted, where it is."""
    if "$ref" in schema:
        return f"`{shown_name(name_of(schema))}`"
    if "anyOf" in schema:
        parts = [words_of(one) for one in schema["anyOf"] if with_null or one != {"type": "null"}]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema or "const" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return ", ".join(f"`{json.dumps(value)}`" for value in values if with_null or value is not None)
    kind = schema.get("type")
    if kind in _NUMBERS:
        return _number(schema)
    if kind == "string":
        return _text(schema)
    if kind == "array":
        return _array(schema)
    if kind == "object" and schema.get("additionalProperties"):
        each = words_of(schema["additionalProperties"])
        return f"object, to each name: {each}" + _extent(schema, "Properties", "names")
    return _PLAIN.get(kind or "", "anything")


def name_of(reference: Schema) -> str:
    """Of the component that it refers to."""
    return str(reference["$ref"]).rpartition("/")[2]


def shown_name(component: str) -> str:
    """A component's name as Python writes it: JSON's references take no brackets, so `List_Key_` is `List[Key]`."""
    return re.sub(r"^(\w+?)_(\w+)_$", r"\1[\2]", component)


def _number(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    words = _NUMBERS[schema["type"]]
    if "exclusiveMinimum" in schema:
        words += f" over {schema['exclusiveMinimum']}"
    if low is not None and high is not None:
        return f"{words}, {_shown(low)} to {_shown(high)}"
    if low is not None:
        words += f", at least {_shown(low)}"
    return words + ("" if high is None else f", at most {_shown(high)}")


def _shown(value: float) -> str:
    """Powers of two as such: nineteen digits are hard to read."""
    for exponent, less in ((31, 1), (63, 1), (63, 0)):
        if abs(value) == 2**exponent - less:
            power = f"2^{exponent}" + ("-1" if less else "")
            return f"-{power}" if value < 0 else power
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _text(schema: Schema) -> str:
    if schema.get("contentMediaType"):
        return "file"
    words = "text" + _extent(schema, "Length", "characters")
    return f"{words}, `{schema['pattern']}`" if "pattern" in schema else words


def _array(schema: Schema) -> str:
    extent = _extent(schema, "Items", "of").removesuffix(" of") or ""
    return f"list{extent} of {words_of(schema['items'])}" if schema.get("items") else f"list{extent}"


def _extent(schema: Schema, what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if least and most is not None:
        return f" of {least:,} to {most:,} {unit}"
    if most is not None:
        return f" of at most {most:,} {unit}"
    return f" of at least {least:,} {unit}" if least else ""
