"""What `/status` says, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..byte_size import format_byte_size
from .load_lines import load_lines


def status_lines(
    status: Mapping[str, Any], indent: int = 0, before: Mapping[str, Any] | None = None, seconds: float = 0.0
) -> Iterator[str]:
    """One line a fact, sections indented under their name. A key that ends in `_bytes` is shown as a size.

    `before`: what it said `seconds` earlier, for what is told by the second; None: counts since the start.
    """
    margin = "  " * indent
    before = before or {}
    for key, value in status.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            yield f"{margin}{name}"
            if _is_load(value):
                for line in load_lines(value, before.get(key), seconds):
                    yield f"{margin}  {line}"
            else:
                yield from status_lines(value, indent + 1, before.get(key), seconds)
        elif isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Mapping) for v in value):
            earlier = {item.get("gang_id"): item for item in before.get(key) or ()}
            for number, item in enumerate(value, start=1):
                yield f"{margin}{name} {number} of {len(value)}"
                yield from status_lines(item, indent + 1, earlier.get(item.get("gang_id")), seconds)
        else:
            yield f"{margin}{name}: {_shown(key, value)}"


def _is_load(value: Mapping[str, Any]) -> bool:
    return "num_steps" in value


def _shown(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key.endswith("_bytes"):
        return format_byte_size(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
