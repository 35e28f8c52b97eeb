"""`motet limits`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from ..byte_size import format_byte_size
from ..client.client import MotetClient
from ..client.client_options import with_client
from .output import json_option, print_json

_ROWS: Final = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "concurrent_streams": "answers at once",
    "uploads_per_minute": "uploads a minute",
    "adapters": "adapters",
    "stored_bytes": "stored",
}


@click.command()
@json_option
@with_client
def limits(client: MotetClient, as_json: bool) -> None:
    """Show the quotas of the tenant, of its user and of its key, and what is left of them."""
    found = client.call("GET", "/v1/limits")
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(limit_lines(found)))


def limit_lines(found: Mapping[str, Any]) -> list[str]:
    """A line for each quota."""
    lines = []
    for owner in ("tenant", "user", "key"):
        if found[owner] is None:
            continue
        for name, words in _ROWS.items():
            limit = found[owner][name]
            if limit["limit"] is not None:
                left, most = (_shown(name, limit[part]) for part in ("remaining", "limit"))
                lines.append(f"{owner:7} {words:18} {left} of {most} left")
        if found[owner]["pinned_bytes"] is not None:
            lines.append(f"{owner:7} {'pinned':18} {_shown('pinned_bytes', found[owner]['pinned_bytes'])} at most")
    if not found["is_fleet_wide"]:
        lines.append("Redis does not answer: the numbers are those of the router that answered.")
    return lines or ["no quotas"]


def _shown(name: str, count: int) -> str:
    return format_byte_size(count) if name.endswith("bytes") else str(count)
