"""`motet adapters upload | list | show | delete`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click
from rich.console import Console
from rich.table import Column

from ...adapters.format.own_tokenizer import tokenizer_files
from ..byte_size import format_byte_size
from ..client.client import ADAPTER_FILES, AdapterInfo, MotetClient
from ..client.client_options import with_client
from ..progress_display import ProgressDisplay
from .output import json_option, print_json, print_table

SILENT_BYTES = 64 << 20  # smaller uploads end before a line of progress is useful


def path_of(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"


@click.group()
def adapters() -> None:
    """Upload, list, show and delete the adapters of a tenant."""


@adapters.command()
@click.argument("name")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--activate/--no-activate", default=True, help="Whether NAME refers to the new version from now on.")
@click.option("--private", "is_private", is_flag=True, help="Only the key's user and administrators see it.")
@click.option("--note", metavar="TEXT", default="", help="What is new, for the list of versions.")
@click.option("--response-template", metavar="NAME", default="", help="The form of its calls, if not the base's.")
@with_client
def upload(
    client: MotetClient, name: str, folder: Path, activate: bool, is_private: bool, note: str, response_template: str
) -> None:
    """Upload the adapter in FOLDER (as PEFT saves it) under NAME. New content makes a new version."""
    console = Console(stderr=True)
    unserved = tokenizer_files(folder)
    if unserved:
        click.echo(f"not served: {', '.join(unserved)}. Chats use the base's tokenizer and chat template", err=True)
    tensors_path = folder / ADAPTER_FILES[1]
    silent = not console.is_terminal and tensors_path.is_file() and tensors_path.stat().st_size < SILENT_BYTES
    with ProgressDisplay(console) as progress:
        adapter, created = client.upload_adapter(
            name,
            folder,
            None if silent else lambda sent, total: progress(f"uploading {name}", sent, total),
            activate=activate,
            is_private=is_private,
            note=note,
            response_template=response_template,
        )
    done = "uploaded" if created else "already there:"
    click.echo(f"{done} {adapter.name} version {adapter.version}, rank {adapter.rank}, digest {adapter.digest[:12]}")
    _print_warnings([adapter])


@adapters.command(name="list")
@json_option
@with_client
def list_adapters(client: MotetClient, as_json: bool) -> None:
    """List the tenant's adapters."""
    found = client.adapters()
    if as_json:
        print_json([adapter.fields for adapter in found])
    else:
        _print_adapters(found)
        _print_warnings(found)


@adapters.command()
@click.argument("name")
@json_option
@with_client
def show(client: MotetClient, name: str, as_json: bool) -> None:
    """Show the current version of the adapter NAME."""
    adapter = client.adapter(name)
    if as_json:
        print_json(adapter.fields)
    else:
        _print_adapters([adapter])
        _print_warnings([adapter])


@adapters.command()
@click.argument("name")
@with_client
def delete(client: MotetClient, name: str) -> None:
    """Delete the adapter NAME."""
    client.delete_adapter(name)
    click.echo(f"deleted {name}")


def _print_warnings(found: list[AdapterInfo]) -> None:
    for adapter in found:
        for warning in adapter.warnings:
            click.echo(f"warning: {adapter.name}: {warning}", err=True)


def _print_adapters(found: list[AdapterInfo]) -> None:
    columns = (Column("name", overflow="fold"), "version", "rank", "targets", "size", "digest")
    rows = [
        (one.name, one.version, one.rank, " ".join(one.targets), format_byte_size(one.num_bytes), one.digest[:12])
        for one in found
    ]
    print_table(columns, rows)
