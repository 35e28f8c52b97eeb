"""How commands print what a running motet answers: JSON for machines, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Column, Table

_UNLIMITED_WIDTH: Final = 10_000  # columns, where no terminal limits them

json_option = click.option("--json", "as_json", is_flag=True, help="Print the server's JSON.")


def print_json(body: Any) -> None:
    click.echo(json.dumps(body, indent=2))


def print_table(columns: Sequence[str | Column], rows: Iterable[Sequence[object]]) -> None:
    """One row a line, cut to the terminal's width if there is one. None is an empty cell."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    Console(highlight=False, markup=False, width=width).print(table)


def time_text(seconds: float | None) -> str:
    """A time as UTC; empty for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
