"""`motet audit`, `motet limits` and `motet usage`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import click
from rich.table import Column

from ..client.client import MotetClient
from ..client.client_options import json_option, print_json, print_table, time_text, with_client, with_operator_client
from ..settings.setting_field import format_byte_size

# `motet audit`.

PATH = "/v1/admin/audit"


@click.command()
@click.option("--tenant", help="Only changes of this tenant, its keys and its adapters.")
@click.option("--user", help="Only what this user of the tenant did.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number of entries.")
@json_option
@with_operator_client
def audit(client: MotetClient, tenant: str | None, user: str | None, limit: int, as_json: bool) -> None:
    """Show who changed which tenant, key or adapter, the newest change first; for operators."""
    entries: list[dict[str, Any]] = []
    more, after = True, ""
    while more and len(entries) < limit:
        query = {"limit": min(limit - len(entries), 1000), "after": after, "tenant": tenant or "", "user": user or ""}
        page = client.call("GET", f"{PATH}?{urlencode({name: value for name, value in query.items() if value})}")
        entries += page["data"]
        more, after = page["has_more"], page["last_id"]
    if as_json:
        print_json(entries)
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
        for entry in entries
    ]
    print_table(("when", "who", "did", "tenant", "to", "what", "request"), rows)


# `motet limits`.

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
    quotas = client.call("GET", "/v1/limits")
    if as_json:
        print_json(quotas)
    else:
        click.echo("\n".join(limit_lines(quotas)))


def limit_lines(quotas: Mapping[str, Any]) -> list[str]:
    """A line for each quota."""
    lines = []
    for owner in ("tenant", "user", "key"):
        if quotas[owner] is None:
            continue
        for name, words in _ROWS.items():
            limit = quotas[owner][name]
            if limit["limit"] is not None:
                remainder, maximum = (_amount(name, limit[part]) for part in ("remaining", "limit"))
                lines.append(f"{owner:7} {words:18} {remainder} of {maximum} left")
        if quotas[owner]["pinned_bytes"] is not None:
            lines.append(f"{owner:7} {'pinned':18} {_amount('pinned_bytes', quotas[owner]['pinned_bytes'])} at most")
    if not quotas["is_fleet_wide"]:
        lines.append("Redis does not answer: the numbers are those of the router that answered.")
    return lines or ["no quotas"]


def _amount(name: str, count: int) -> str:
    return format_byte_size(count) if name.endswith("bytes") else str(count)


# `motet usage`.

_NUMBERS: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "recomputed_tokens",
    "kv_device_page_seconds",
    "adapter_device_page_seconds",
)


@click.command()
@click.option(
    "--by",
    default="day",
    show_default=True,
    metavar="WHAT",
    help="day, hour, adapter, key or user, or several with commas between them; with --all also tenant.",
)
@click.option("--from", "start", metavar="TIME", help="A day (2026-11-22) or a full hour (2026-11-22T13:00), UTC.")
@click.option("--to", "end", metavar="TIME", help="The first time that is left out.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the server's CSV.")
@json_option
@click.option("--all", "of_all", is_flag=True, help="Of all tenants; it needs the operators' key.")
@with_client
def usage(
    client: MotetClient, by: str, start: str | None, end: str | None, as_csv: bool, as_json: bool, of_all: bool
) -> None:
    """Show what a tenant has used."""
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other.")
    query = {"by": by, "from": start, "to": end, "format": "csv" if as_csv else None}
    answer = client.usage({name: value for name, value in query.items() if value is not None}, of_all=of_all)
    if as_csv or as_json:
        click.echo(answer, nl=not answer.endswith("\n"))
    else:
        _print_usage(json.loads(answer))


def _print_usage(usage: dict[str, Any]) -> None:
    rows = [*usage["data"], {**usage["total"], "start": "total"}]
    fields = ["start", "tenant", "adapter", "version", "key_id", "user"]
    group_columns = [name for name in fields if name == "start" or any(row.get(name) is not None for row in rows)]
    always = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
    numbers = [name for name in _NUMBERS if name in always or usage["total"].get(name) not in (None, 0, "0")]
    if usage["currency"] is not None:
        numbers.append("amount")
    headings = {"start": "time", "key_id": "key", "amount": f"amount {usage['currency']}"}
    columns = [
        Column(headings.get(name, name).replace("_", " "), justify="right" if name in numbers else "left")
        for name in (*group_columns, *numbers)
    ]
    print_table(columns, [[row.get(name) for name in (*group_columns, *numbers)] for row in rows])
    if usage["has_more"]:
        click.echo("There are more rows: ask for a shorter time.")
