"""`motet versions`, `motet aliases` and `motet canary`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from ..client.client import MotetClient
from ..client.client_options import with_client
from .adapter_commands import path_of
from .output import json_option, print_json, print_table

_ARMS = ("stable", "canary")


@click.group()
def versions() -> None:
    """List, show, promote and roll back the versions of an adapter."""


@versions.command(name="list")
@click.argument("name")
@json_option
@with_client
def list_versions(client: MotetClient, name: str, as_json: bool) -> None:
    """List the versions of the adapter NAME, the newest first."""
    records = client.call("GET", f"{path_of(name)}/versions")["data"]
    if as_json:
        print_json(records)
        return
    rows = [
        (record["version"], _roles(record), record["state"], record["rank"], record["digest"][:12], record["note"])
        for record in records
    ]
    print_table(("version", "is", "state", "rank", "digest", "note"), rows)


@versions.command()
@click.argument("name")
@click.argument("version")
@with_client
def show(client: MotetClient, name: str, version: str) -> None:
    """Show VERSION, a number or an alias, of the adapter NAME."""
    print_json(client.call("GET", f"{path_of(name)}/versions/{quote(version, safe='')}"))


@versions.command()
@click.argument("name")
@click.argument("version", required=False)
@with_client
def promote(client: MotetClient, name: str, version: str | None) -> None:
    """Make VERSION the current one of the adapter NAME. Without VERSION: that of its canary."""
    now = client.call("POST", f"{path_of(name)}/promote", {} if version is None else {"version": version})
    click.echo(f"{name} is now version {now['version']}, digest {now['digest'][:12]}")


@versions.command()
@click.argument("name")
@with_client
def rollback(client: MotetClient, name: str) -> None:
    """Make the version that was current before the current one of the adapter NAME again."""
    now = client.call("POST", f"{path_of(name)}/rollback", {})
    click.echo(f"{name} is now version {now['version']}, digest {now['digest'][:12]}")


@click.group()
def aliases() -> None:
    """Names for versions: `model` may be NAME@ALIAS."""


@aliases.command(name="set")
@click.argument("name")
@click.argument("alias")
@click.argument("version")
@with_client
def set_alias(client: MotetClient, name: str, alias: str, version: str) -> None:
    """Point NAME@ALIAS to VERSION, a number or another alias."""
    now = client.call("PUT", f"{path_of(name)}/aliases/{quote(alias, safe='')}", {"version": version})
    click.echo(f"{name}@{alias} is version {now['version']}")


@aliases.command(name="list")
@click.argument("name")
@with_client
def list_aliases(client: MotetClient, name: str) -> None:
    """List the aliases of the adapter NAME."""
    records = client.call("GET", f"{path_of(name)}/aliases")["data"]
    print_table(("alias", "version"), [(record["alias"], record["version"]) for record in records])


@aliases.command()
@click.argument("name")
@click.argument("alias")
@with_client
def delete(client: MotetClient, name: str, alias: str) -> None:
    """Delete NAME@ALIAS. The version stays."""
    client.call("DELETE", f"{path_of(name)}/aliases/{quote(alias, safe='')}")
    click.echo(f"deleted {name}@{alias}")


@click.group()
def canary() -> None:
    """Send a share of an adapter's requests to another version, which goes by itself if it does worse."""


@canary.command()
@click.argument("name")
@click.argument("version")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.1, show_default=True)
@with_client
def start(client: MotetClient, name: str, version: str, share: float) -> None:
    """Put VERSION of the adapter NAME on trial, or change its share."""
    client.call("PUT", f"{path_of(name)}/canary", {"version": version, "share": share})
    click.echo(f"{share:.0%} of the requests for {name} go to version {version}")


@canary.command(name="show")
@click.argument("name")
@json_option
@with_client
def show_canary(client: MotetClient, name: str, as_json: bool) -> None:
    """Show how the canary of the adapter NAME does, or how the last one ended."""
    answer = client.call("GET", f"{path_of(name)}/canary")
    if as_json:
        print_json(answer)
        return
    click.echo(f"version {answer['version']}, share {answer['share']:.0%}: {answer['state'].replace('_', ' ')}")
    if answer["reason"]:
        click.echo(answer["reason"])
    metrics = ("answers", "errors", "refused", "thumbs_up", "thumbs_down", "first_token_p99_s", "per_token_p99_s")
    rows = [
        (arm, *("-" if answer[arm][metric] is None else answer[arm][metric] for metric in metrics)) for arm in _ARMS
    ]
    print_table(("", *(metric.replace("_", " ") for metric in metrics)), rows)


@canary.command()
@click.argument("name")
@with_client
def stop(client: MotetClient, name: str) -> None:
    """Stop the canary of the adapter NAME. The current version gets all requests again."""
    client.call("DELETE", f"{path_of(name)}/canary")
    click.echo(f"stopped the canary of {name}")


def _roles(version: dict[str, Any]) -> str:
    roles = ["current"] * version["is_current"] + ["canary"] * version["is_canary"] + ["shadow"] * version["is_shadow"]
    return " ".join([*roles, *(f"@{alias}" for alias in version["aliases"])])
