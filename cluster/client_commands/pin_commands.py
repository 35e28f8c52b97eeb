"""`motet pin` and `motet unpin`: an adapter is kept in the host memory of gangs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from .caller import Caller, path_of


def pin_commands(with_client: Callable[[Any], Any]) -> Sequence[click.Command]:
    """The commands. `with_client`: see `version_commands`."""
    return _pin(with_client), _unpin(with_client)


def _pin(with_client: Callable[[Any], Any]) -> click.Command:
    @click.command()
    @click.argument("name")
    @click.option("--gangs", type=click.IntRange(1, 16), default=1, show_default=True, help="In so many of them.")
    @with_client
    def pin(client: Caller, name: str, gangs: int) -> None:
        """Keep the current version of the adapter NAME in the host memory of gangs."""
        pinned = client.call("PUT", f"{path_of(name)}/pin", {"gangs": gangs})
        gangs_told = "1 gang" if gangs == 1 else f"{gangs} gangs"
        click.echo(
            f"{name}, now version {pinned['version']}, is pinned to {gangs_told}, which counts as {pinned['bytes']} "
            f"bytes: see motet residency {name}"
        )

    return pin


def _unpin(with_client: Callable[[Any], Any]) -> click.Command:
    @click.command()
    @click.argument("name")
    @with_client
    def unpin(client: Caller, name: str) -> None:
        """Pin the adapter NAME no more."""
        client.call("DELETE", f"{path_of(name)}/pin")
        click.echo(f"{name} is not pinned any more")

    return unpin
