"""`motet adapters upload | list | delete`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from .byte_size import format_byte_size
from .client import MotetClient
from .client_options import with_client
from .progress import ProgressDisplay


@click.group()
def adapters() -> None:
    """Upload, list and delete the adapters of a tenant."""


@adapters.command()
@click.argument("name")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@with_client
def upload(client: MotetClient, name: str, folder: Path) -> None:
    """Upload the adapter in FOLDER (as PEFT saves it) under NAME. New content makes a new version."""
    with ProgressDisplay(Console(stderr=True)) as progress:
        adapter, created = client.upload_adapter(
            name, folder, lambda sent, total: progress(f"uploading {name}", sent, total)
        )
    done = "uploaded" if created else "already there:"
    click.echo(f"{done} {adapter.name} version {adapter.version}, rank {adapter.rank}, digest {adapter.digest[:12]}")


@adapters.command(name="list")
@with_client
def list_adapters(client: MotetClient) -> None:
    """List the tenant's adapters."""
    table = Table("name", "version", "rank", "targets", "size", "digest", box=None, pad_edge=False)
    for adapter in client.adapters():
        table.add_row(
            adapter.name,
            str(adapter.version),
            str(adapter.rank),
            " ".join(adapter.targets),
            format_byte_size(adapter.num_bytes),
            adapter.digest[:12],
        )
    Console(highlight=False, markup=False).print(table)


@adapters.command()
@click.argument("name")
@with_client
def delete(client: MotetClient, name: str) -> None:
    """Delete the adapter NAME."""
    client.delete_adapter(name)
    click.echo(f"deleted {name}")
