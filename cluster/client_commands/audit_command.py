"""`motet audit`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import click

from ..client.client import MotetClient
from ..client.client_options import with_operator_client
from .shown import show_entries, show_json
from .tenant_commands import as_json

PATH = "/v1/admin/audit"


@click.command()
@click.option("--tenant", help="Only what was done with this one's things.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="How many entries, at most.")
@as_json
@with_operator_client
def audit(client: MotetClient, tenant: str | None, limit: int, as_json: bool) -> None:
    """Show who changed which tenant, key or adapter, the newest change first; for operators."""
    found: list[dict[str, Any]] = []
    more, after = True, ""
    while more and len(found) < limit:
        asked = {"limit": min(limit - len(found), 1000), "after": after, "tenant": tenant or ""}
        page = client.call("GET", f"{PATH}?{urlencode({name: value for name, value in asked.items() if value})}")
        found += page["data"]
        more, after = page["has_more"], page["last_id"]
    if as_json:
        show_json(found)
    else:
        show_entries(found)
