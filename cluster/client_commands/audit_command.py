"""`motet audit`."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import click

from ..client.client import MotetClient
from ..client.client_options import with_operator_client
from .output import json_option, print_json, print_table, time_text

PATH = "/v1/admin/audit"


@click.command()
@click.option("--tenant", help="Only changes of this tenant, its keys and its adapters.")
@click.option("--user", help="Only what this user of the tenant did.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number of entries.")
@json_option
@with_operator_client
def audit(client: MotetClient, tenant: str | None, user: str | None, limit: int, as_json: bool) -> None:
    """Show who changed which tenant, key or adapter, the newest change first; for operators."""
    found: list[dict[str, Any]] = []
    more, after = True, ""
    while more and len(found) < limit:
        query = {"limit": min(limit - len(found), 1000), "after": after, "tenant": tenant or "", "user": user or ""}
        page = client.call("GET", f"{PATH}?{urlencode({name: value for name, value in query.items() if value})}")
        found += page["data"]
        more, after = page["has_more"], page["last_id"]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            time_text(entry["at"]),
            " ".join(filter(None, (entry["actor"]["kind"], entry["actor"]["id"], entry["actor"]["user"]))),
            entry["action"],
            entry["tenant"],
            entry["target"],
            json.dumps(entry["changed"]) if entry["changed"] else entry["result"],
            entry["request_id"],
        )
        for entry in found
    ]
    print_table(("when", "who", "did", "tenant", "to", "what", "request"), rows)
