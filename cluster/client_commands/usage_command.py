"""`motet usage`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import click
from rich.console import Console
from rich.table import Column, Table

_UNLIMITED_WIDTH: Final = 10_000  # columns, where no terminal limits them
_NUMBERS: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "recomputed_tokens",
    "kv_device_page_seconds",
    "adapter_device_page_seconds",
)


class UsageClient(Protocol):
    def usage(self, query: Mapping[str, str], *, of_all: bool) -> str:
        """The server's answer to a question for usage. `of_all`: of all tenants, for the operators."""


def usage_command(with_client: Callable[[Any], Callable[..., None]]) -> click.Command:
    """The command. `with_client` gives its function a client, and the options that this needs."""

    @click.command()
    @click.option(
        "--by",
        default="day",
        show_default=True,
        metavar="WHAT",
        help="day, hour, adapter or key, or several with commas between them; with --all also tenant.",
    )
    @click.option("--from", "start", metavar="TIME", help="A day (2026-11-22) or a full hour (2026-11-22T13:00), UTC.")
    @click.option("--to", "end", metavar="TIME", help="The first time that is left out.")
    @click.option("--csv", "as_csv", is_flag=True, help="As CSV.")
    @click.option("--json", "as_json", is_flag=True, help="As the server tells it.")
    @click.option("--all", "of_all", is_flag=True, help="Of all tenants, for who has the operators' key.")
    @with_client
    def usage(
        client: UsageClient, by: str, start: str | None, end: str | None, as_csv: bool, as_json: bool, of_all: bool
    ) -> None:
        """Show what a tenant has used."""
        if as_csv and as_json:
            raise click.UsageError("--csv and --json exclude each other.")
        asked = {"by": by, "from": start, "to": end, "format": "csv" if as_csv else None}
        answer = client.usage({name: value for name, value in asked.items() if value is not None}, of_all=of_all)
        if as_csv or as_json:
            click.echo(answer, nl=not answer.endswith("\n"))
        else:
            _print_table(json.loads(answer))

    return usage


def _print_table(found: dict[str, Any]) -> None:
    rows = [*found["data"], {**found["total"], "start": "total"}]
    fields = ["start", "tenant", "adapter", "version", "key_id"]
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
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in (*shown, *numbers)))
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    console = Console(highlight=False, markup=False, width=width)
    console.print(table)
    if found["has_more"]:
        console.print("There are more rows: ask for less time at once.")


def _cell(value: object) -> str:
    return "" if value is None else str(value)
