"""`motet tenants create | list | show | set | suspend | resume | delete`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from ..client.client import MotetClient
from ..client.client_options import with_operator_client
from .given import quota_option, quota_text, user_quota_option
from .output import json_option, print_json, print_table, time_text

PATH = "/v1/admin/tenants"
label = click.option("--label", metavar="TEXT", help="A description.")
weight = click.option(
    "--weight", type=click.FloatRange(0.001, 1000), metavar="NUMBER", help="Its share relative to other tenants."
)


def path_of(tenant: str) -> str:
    # Old tenants may be named "." or "..", which would change the path.
    return f"{PATH}/{quote(tenant, safe='').replace('.', '%2E')}"


@click.group()
def tenants() -> None:
    """Create, change, suspend and delete tenants; for operators."""


@tenants.command()
@click.argument("name")
@weight
@click.option("--background", is_flag=True, help="Its requests yield to those of all other tenants.")
@label
@quota_option
@user_quota_option
@json_option
@with_operator_client
def create(
    client: MotetClient,
    name: str,
    weight: float | None,
    background: bool,
    label: str | None,
    bounds: tuple[tuple[str, int | None], ...],
    user_bounds: tuple[tuple[str, int | None], ...],
    as_json: bool,
) -> None:
    """Create the tenant NAME, which has no keys yet."""
    body: dict[str, Any] = {"name": name, "weight": weight, "background": background, "label": label}
    body = {field: value for field, value in body.items() if value is not None}
    _show(client.call("POST", PATH, {**body, "quota": dict(bounds), "user_quota": dict(user_bounds)}), as_json)


@tenants.command(name="list")
@json_option
@with_operator_client
def list_tenants(client: MotetClient, as_json: bool) -> None:
    """List all tenants."""
    found = client.listed(PATH)
    if as_json:
        print_json(found)
    else:
        _print_tenants(found)


@tenants.command()
@click.argument("name")
@json_option
@with_operator_client
def show(client: MotetClient, name: str, as_json: bool) -> None:
    """Show the tenant NAME."""
    _show(client.call("GET", path_of(name)), as_json)


@tenants.command(name="set")
@click.argument("name")
@weight
@click.option(
    "--background/--no-background", default=None, help="Whether its requests yield to those of all other tenants."
)
@label
@quota_option
@user_quota_option
@json_option
@with_operator_client
def change(
    client: MotetClient,
    name: str,
    weight: float | None,
    background: bool | None,
    label: str | None,
    bounds: tuple[tuple[str, int | None], ...],
    user_bounds: tuple[tuple[str, int | None], ...],
    as_json: bool,
) -> None:
    """Change the tenant NAME. What is not given stays as it is."""
    body: dict[str, Any] = {"weight": weight, "background": background, "label": label}
    body = {field: value for field, value in body.items() if value is not None}
    if bounds:
        body["quota"] = dict(bounds)
    if user_bounds:
        body["user_quota"] = dict(user_bounds)
    if not body:
        raise click.UsageError("give at least one option to change")
    _show(client.call("PATCH", path_of(name), body), as_json)


@tenants.command()
@click.argument("name")
@json_option
@with_operator_client
def suspend(client: MotetClient, name: str, as_json: bool) -> None:
    """Refuse new requests of the tenant NAME. Running requests are completed."""
    _show(client.call("POST", f"{path_of(name)}/suspend"), as_json)


@tenants.command()
@click.argument("name")
@json_option
@with_operator_client
def resume(client: MotetClient, name: str, as_json: bool) -> None:
    """Accept the requests of the tenant NAME again."""
    _show(client.call("POST", f"{path_of(name)}/resume"), as_json)


@tenants.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_operator_client
def delete(client: MotetClient, name: str, yes: bool) -> None:
    """Delete the tenant NAME with its keys, adapters and all other data. If interrupted, run it again."""
    if not yes:
        click.confirm(f"Delete {name} with all its keys and adapters? They cannot be restored", abort=True)
    gone = client.call("DELETE", path_of(name))
    click.echo(f"deleted {name}, and {gone['num_adapters']} adapters")


def _show(tenant: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(tenant)
    else:
        _print_tenants([tenant])


def _print_tenants(tenants: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            tenant["name"],
            tenant["state"],
            f"{tenant['weight']:g}",
            "background" if tenant["background"] else "",
            tenant["num_keys"],
            quota_text(tenant["quota"]),
            quota_text(tenant["user_quota"]),
            time_text(tenant["created_at"]),
            tenant["label"],
        )
        for tenant in tenants
    ]
    print_table(("name", "state", "weight", "class", "keys", "quota", "user quota", "created", "label"), rows)
