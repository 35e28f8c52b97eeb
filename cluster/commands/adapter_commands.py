"""`motet adapters upload | list | show | delete`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from ..byte_size import format_byte_size
from ..client.client import ADAPTER_FILES, AdapterInfo, MotetClient
from ..client.client_options import with_client
from .progress import ProgressDisplay

SILENT_BYTES = 64 << 20  # smaller uploads end too soon for lines of progress
UNLIMITED_WIDTH = 10_000  # columns, where no terminal limits them


@click.group()
def adapters() -> None:
    """Upload, list, show and delete the adapters of a tenant."""


@adapters.command()
@click.argument("name")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--activate/--no-activate", default=True, help="Whether NAME means the new version from now on.")
@click.option("--note", metavar="TEXT", default="", help="What is new, for the list of versions.")
@with_client
def upload(client: MotetClient, name: str, folder: Path, activate: bool, note: str) -> None:
    """Upload the adapter in FOLDER (as PEFT saves it) under NAME. New content makes a new version."""
    console = Console(stderr=True)
    tensors_path = folder / ADAPTER_FILES[1]
    silent = not console.is_terminal and tensors_path.is_file() and tensors_path.stat().st_size < SILENT_BYTES
    with ProgressDisplay(console) as progress:
        adapter, created = client.upload_adapter(
            name,
            folder,
            None if silent else lambda sent, total: progress(f"uploading {name}", sent, total),
            activate=activate,
            note=note,
        )
    done = "uploaded" if created else "already there:"
    click.echo(f"{done} {adapter.name} version {adapter.version}, rank {adapter.rank}, digest {adapter.digest[:12]}")


@adapters.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="As the server tells it.")
@with_client
def list_adapters(client: MotetClient, as_json: bool) -> None:
    """List the tenant's adapters."""
    found = client.adapters()
    if as_json:
        click.echo(json.dumps([adapter.fields for adapter in found], indent=2))
    else:
        _print_table(found)


@adapters.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="As the server tells it.")
@with_client
def show(client: MotetClient, name: str, as_json: bool) -> None:
    """Show the current version of the adapter NAME."""
    adapter = client.adapter(name)
    if as_json:
        click.echo(json.dumps(adapter.fields, indent=2))
    else:
        _print_table([adapter])


def _print_table(found: list[AdapterInfo]) -> None:
    table = Table(
        Column("name", overflow="fold"), "version", "rank", "targets", "size", "digest", box=None, pad_edge=False
    )
    for adapter in found:
        table.add_row(
            adapter.name,
            str(adapter.version),
            str(adapter.rank),
            " ".join(adapter.targets),
            format_byte_size(adapter.num_bytes),
            adapter.digest[:12],
        )
    width = None if sys.stdout.isatty() else UNLIMITED_WIDTH
    Console(highlight=False, markup=False, width=width).print(table)


@adapters.command()
@click.argument("name")
@with_client
def delete(client: MotetClient, name: str) -> None:
    """Delete the adapter NAME."""
    client.delete_adapter(name)
    click.echo(f"deleted {name}")
