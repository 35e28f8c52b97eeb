"""`motet preload` and `motet residency`: where an adapter's versions are, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from .caller import Caller, path_of, print_json, print_table


def residency_commands(with_client: Callable[[Any], Any]) -> Sequence[click.Command]:
    """The commands. `with_client`: see `version_commands`."""
    return _preload(with_client), _residency(with_client)


def _preload(with_client: Callable[[Any], Any]) -> click.Command:
    @click.command()
    @click.argument("model")
    @click.option("--gangs", type=click.IntRange(1, 16), default=1, show_default=True, help="At so many of them.")
    @with_client
    def preload(client: Caller, model: str, gangs: int) -> None:
        """Bring MODEL to gangs before anybody asks for it: NAME, or NAME@VERSION, a number or an alias."""
        name, _, version = model.partition("@")
        body = {"gangs": gangs, **({"version": version} if version else {})}
        begun = client.call("POST", f"{path_of(name)}/preload", body)
        gangs_told = "1 gang" if begun["gangs"] == 1 else f"{begun['gangs']} gangs"
        click.echo(f"version {begun['version']} of {name} comes to {gangs_told}: see motet residency {name}")

    return preload


def _residency(with_client: Callable[[Any], Any]) -> click.Command:
    @click.command()
    @click.argument("name")
    @click.option("--json", "as_json", is_flag=True, help="As the server tells it.")
    @with_client
    def residency(client: Caller, name: str, as_json: bool) -> None:
        """Show which gangs have the versions of the adapter NAME, in which tier, and why one could not get them."""
        found = client.call("GET", f"{path_of(name)}/residency")
        if as_json:
            print_json(found)
            return
        rows = [
            (one["version"], one["tier"], one["state"], _where(one["gangs"]), one["reason"] or "")
            for one in found["data"]
        ]
        print_table(("version", "tier", "state", "gangs", "reason"), rows)

    return residency


def _where(gangs: Sequence[dict[str, Any]]) -> str:
    return " ".join(f"{one['gang']}:{one['tier' if one['state'] == 'ready' else 'state']}" for one in gangs) or "-"
