"""What `/status` says, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .byte_size import format_byte_size


def status_lines(status: Mapping[str, Any], indent: int = 0) -> Iterator[str]:
    """One line a fact, sections indented under their name. A key that ends in `_bytes` is shown as a size."""
    margin = "  " * indent
    for key, value in status.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            yield f"{margin}{name}"
            yield from status_lines(value, indent + 1)
        elif isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Mapping) for v in value):
            for number, item in enumerate(value, start=1):
                yield f"{margin}{name} {number} of {len(value)}"
                yield from status_lines(item, indent + 1)
        else:
            yield f"{margin}{name}: {_shown(key, value)}"


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
