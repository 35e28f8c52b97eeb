"""`motet preload`, `motet residency`, `motet pin` and `motet unpin`: which gangs hold an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ...adapters.names import split_selector
from ..client.client import MotetClient
from ..client.client_options import with_client
from .adapter_commands import path_of
from .output import json_option, print_json, print_table


@click.command()
@click.argument("model")
@click.option("--gangs", type=click.IntRange(1, 16), default=1, show_default=True, help="Number of gangs.")
@with_client
def preload(client: MotetClient, model: str, gangs: int) -> None:
    """Load MODEL at gangs before it is requested: NAME, or NAME@VERSION with a number or an alias."""
    name, version = split_selector(model)
    body = {"gangs": gangs, **({"version": version} if version else {})}
    begun = client.call("POST", f"{path_of(name)}/preload", body)
    click.echo(f"loading version {begun['version']} of {name} at {_gangs(begun['gangs'])}: see motet residency {name}")


@click.command()
@click.argument("name")
@json_option
@with_client
def residency(client: MotetClient, name: str, as_json: bool) -> None:
    """Show which gangs have the versions of the adapter NAME, in which tier, and why one could not get them."""
    found = client.call("GET", f"{path_of(name)}/residency")
    if as_json:
        print_json(found)
        return
    rows = [(one["version"], one["tier"], one["state"], _where(one["gangs"]), one["reason"]) for one in found["data"]]
    print_table(("version", "tier", "state", "gangs", "reason"), rows)


@click.command()
@click.argument("name")
@click.option("--gangs", type=click.IntRange(1, 16), default=1, show_default=True, help="Number of gangs.")
@with_client
def pin(client: MotetClient, name: str, gangs: int) -> None:
    """Keep the current version of the adapter NAME in the host memory of gangs."""
    pinned = client.call("PUT", f"{path_of(name)}/pin", {"gangs": gangs})
    click.echo(
        f"{name}, now version {pinned['version']}, is pinned to {_gangs(gangs)}, which counts as {pinned['bytes']} "
        f"bytes: see motet residency {name}"
    )


@click.command()
@click.argument("name")
@with_client
def unpin(client: MotetClient, name: str) -> None:
    """Unpin the adapter NAME."""
    client.call("DELETE", f"{path_of(name)}/pin")
    click.echo(f"{name} is no longer pinned")


def _gangs(number: int) -> str:
    return "1 gang" if number == 1 else f"{number} gangs"


def _where(gangs: Sequence[dict[str, Any]]) -> str:
    return " ".join(f"{one['gang']}:{one['tier' if one['state'] == 'ready' else 'state']}" for one in gangs) or "-"
