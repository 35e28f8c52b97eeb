"""What commands about versions ask a motet with, and how they print what it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import quote

import click
from rich.console import Console
from rich.table import Table

UNLIMITED_WIDTH = 10_000  # columns, where no terminal limits them


class Caller(Protocol):
    """Speaks to a motet for one tenant."""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON. Errors become messages of the program."""


def path_of(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"


def print_json(found: Any) -> None:
    click.echo(json.dumps(found, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    width = None if sys.stdout.isatty() else UNLIMITED_WIDTH
    Console(highlight=False, markup=False, width=width).print(table)
