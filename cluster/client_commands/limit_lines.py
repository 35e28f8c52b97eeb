"""What `motet limits` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..byte_size import format_byte_size

_ROWS: Final = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "concurrent_streams": "answers at once",
    "adapters": "adapters",
    "stored_bytes": "stored",
}


def limit_lines(found: Mapping[str, Any]) -> list[str]:
    """What the server tells of quotas, for a person."""
    lines = []
    for owner in ("tenant", "key"):
        for name, words in _ROWS.items():
            limit = found[owner][name]
            if limit["limit"] is not None:
                left, most = (_shown(name, limit[part]) for part in ("remaining", "limit"))
                lines.append(f"{owner:7} {words:18} {left} of {most} left")
        if found[owner]["pinned_bytes"] is not None:
            lines.append(f"{owner:7} {'pinned':18} {_shown('pinned_bytes', found[owner]['pinned_bytes'])} at most")
    if not found["is_fleet_wide"]:
        lines.append("Redis is away: this is what the router that answered knew last.")
    return lines or ["no quotas"]


def _shown(name: str, count: int) -> str:
    return format_byte_size(count) if name.endswith("bytes") else str(count)
