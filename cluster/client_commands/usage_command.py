"""`motet usage`."""

from __future__ import annotations

import json
from typing import Any, Final

import click
from rich.table import Column

from ..client.client import MotetClient
from ..client.client_options import with_client
from .output import json_option, print_table

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


def _print_usage(found: dict[str, Any]) -> None:
    rows = [*found["data"], {**found["total"], "start": "total"}]
    fields = ["start", "tenant", "adapter", "version", "key_id", "user"]
    shown = [name for name in fields if name == "start" or any(row.get(name) is not None for row in rows)]
    always = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
    numbers = [name for name in _NUMBERS if name in always or found["total"].get(name) not in (None, 0, "0")]
    if found["currency"] is not None:
        numbers.append("amount")
    headings = {"start": "time", "key_id": "key", "amount": f"amount {found['currency']}"}
    columns = [
        Column(headings.get(name, name).replace("_", " "), justify="right" if name in numbers else "left")
        for name in (*shown, *numbers)
    ]
    print_table(columns, [[row.get(name) for name in (*shown, *numbers)] for row in rows])
    if found["has_more"]:
        click.echo("There are more rows: ask for a shorter time.")
