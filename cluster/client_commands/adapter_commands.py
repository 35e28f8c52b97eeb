"""`motet adapters`, `preload`, `residency`, `pin`, `unpin`, `versions`, `aliases` and `canary`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.table import Column

from ...adapters.format.own_tokenizer import tokenizer_files
from ...adapters.names import split_selector
from ..client.client import ADAPTER_FILES, AdapterInfo, MotetClient
from ..client.client_options import json_option, print_json, print_table, with_client
from ..progress import ProgressDisplay
from ..settings.setting_field import format_byte_size

SILENT_BYTES = 64 << 20  # smaller uploads end before a line of progress is useful


def path_of(name: str) -> str:
    """The path of an adapter.

    >>> path_of("~ann/org/pirate")
    '/v1/adapters/~ann%2Forg%2Fpirate'
    """
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
    if files := tokenizer_files(folder):
        click.echo(f"of {', '.join(files)} added tokens, the chat template and eos_token are served", err=True)
    tensors_path = folder / ADAPTER_FILES[1]
    silent = not console.is_terminal and tensors_path.is_file() and tensors_path.stat().st_size < SILENT_BYTES
    with ProgressDisplay(console) as progress:
        adapter, created = client.upload_adapter(
            name,
            folder,
            None if silent else lambda num_sent, total: progress(f"uploading {name}", num_sent, total),
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
    records = client.adapters()
    if as_json:
        print_json([adapter.fields for adapter in records])
    else:
        _print_adapters(records)
        _print_warnings(records)


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


def _print_warnings(adapters: list[AdapterInfo]) -> None:
    for adapter in adapters:
        for warning in adapter.warnings:
            click.echo(f"warning: {adapter.name}: {warning}", err=True)


def _print_adapters(adapters: list[AdapterInfo]) -> None:
    columns = (Column("name", overflow="fold"), "version", "rank", "targets", "size", "digest")
    rows = [
        (
            adapter.name,
            adapter.version,
            adapter.rank,
            " ".join(adapter.targets),
            format_byte_size(adapter.num_bytes),
            adapter.digest[:12],
        )
        for adapter in adapters
    ]
    print_table(columns, rows)


# `motet preload`, `motet residency`, `motet pin` and `motet unpin`: which gangs hold an adapter.


@click.command()
@click.argument("model")
@click.option("--gangs", type=click.IntRange(1, 16), default=1, show_default=True, help="Number of gangs.")
@with_client
def preload(client: MotetClient, model: str, gangs: int) -> None:
    """Load MODEL at gangs before it is requested: NAME, or NAME@VERSION with a number or an alias."""
    name, version = split_selector(model)
    body = {"gangs": gangs, **({"version": version} if version else {})}
    answer = client.call("POST", f"{path_of(name)}/preload", body)
    click.echo(
        f"loading version {answer['version']} of {name} at {_gangs(answer['gangs'])}: see motet residency {name}"
    )


@click.command()
@click.argument("name")
@json_option
@with_client
def residency(client: MotetClient, name: str, as_json: bool) -> None:
    """Show which gangs have the versions of the adapter NAME, in which tier, and why one could not get them."""
    answer = client.call("GET", f"{path_of(name)}/residency")
    if as_json:
        print_json(answer)
        return
    rows = [(row["version"], row["tier"], row["state"], _where(row["gangs"]), row["reason"]) for row in answer["data"]]
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
    return " ".join(f"{gang['gang']}:{gang['tier' if gang['state'] == 'ready' else 'state']}" for gang in gangs) or "-"


# `motet versions`, `motet aliases` and `motet canary`.

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


@versions.command(name="show")
@click.argument("name")
@click.argument("version")
@with_client
def show_version(client: MotetClient, name: str, version: str) -> None:
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


@aliases.command(name="delete")
@click.argument("name")
@click.argument("alias")
@with_client
def delete_alias(client: MotetClient, name: str, alias: str) -> None:
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
