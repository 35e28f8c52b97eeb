"""`motet tenants create | list | show | set | suspend | resume | delete`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from ..client.client import MotetClient
from ..client.client_options import with_operator_client
from .given import quota_of, with_quota
from .shown import show_json, show_tenants

PATH = "/v1/admin/tenants"
as_json = click.option("--json", "as_json", is_flag=True, help="As the server tells it.")
label = click.option("--label", metavar="TEXT", help="What it is, in your own words.")
weight = click.option(
    "--weight", type=click.FloatRange(0.001, 1000), metavar="NUMBER", help="Its share, beside those of others."
)


def path_of(tenant: str) -> str:
    return f"{PATH}/{quote(tenant, safe='')}"


@click.group()
def tenants() -> None:
    """Create, change, suspend and delete tenants; for operators."""


@tenants.command()
@click.argument("name")
@weight
@click.option("--background", is_flag=True, help="All that it asks for yields to everybody else's.")
@label
@with_quota
@as_json
@with_operator_client
def create(
    client: MotetClient,
    name: str,
    weight: float | None,
    background: bool,
    label: str | None,
    bounds: tuple[tuple[str, int | None], ...],
    as_json: bool,
) -> None:
    """Create the tenant NAME, which has no keys yet."""
    body: dict[str, Any] = {"name": name, "weight": weight, "background": background, "label": label}
    body = {field: value for field, value in body.items() if value is not None}
    _show(client.call("POST", PATH, {**body, "quota": quota_of(bounds)}), as_json)


@tenants.command(name="list")
@as_json
@with_operator_client
def list_tenants(client: MotetClient, as_json: bool) -> None:
    """List all tenants."""
    found = client.listed(PATH)
    if as_json:
        show_json(found)
    else:
        show_tenants(found)


@tenants.command()
@click.argument("name")
@as_json
@with_operator_client
def show(client: MotetClient, name: str, as_json: bool) -> None:
    """Show the tenant NAME."""
    _show(client.call("GET", path_of(name)), as_json)


@tenants.command(name="set")
@click.argument("name")
@weight
@click.option("--background/--no-background", default=None, help="Whether all that it asks for yields to others.")
@label
@with_quota
@as_json
@with_operator_client
def change(
    client: MotetClient,
    name: str,
    weight: float | None,
    background: bool | None,
    label: str | None,
    bounds: tuple[tuple[str, int | None], ...],
    as_json: bool,
) -> None:
    """Change the tenant NAME. What is not given stays as it is."""
    body: dict[str, Any] = {"weight": weight, "background": background, "label": label}
    body = {field: value for field, value in body.items() if value is not None}
    if bounds:
        body["quota"] = quota_of(bounds)
    if not body:
        raise click.UsageError("nothing was given that is to be changed")
    _show(client.call("PATCH", path_of(name), body), as_json)


@tenants.command()
@click.argument("name")
@as_json
@with_operator_client
def suspend(client: MotetClient, name: str, as_json: bool) -> None:
    """Refuse all that the tenant NAME asks from now on. What runs goes on to its end."""
    _show(client.call("POST", f"{path_of(name)}/suspend"), as_json)


@tenants.command()
@click.argument("name")
@as_json
@with_operator_client
def resume(client: MotetClient, name: str, as_json: bool) -> None:
    """Accept the requests of the tenant NAME again."""
    _show(client.call("POST", f"{path_of(name)}/resume"), as_json)


@tenants.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_operator_client
def delete(client: MotetClient, name: str, yes: bool) -> None:
    """Delete the tenant NAME with its keys, its adapters and all else that is its. If it is cut off, repeat it."""
    if not yes:
        click.confirm(f"Delete {name} with all its keys and adapters? They cannot be brought back", abort=True)
    gone = client.call("DELETE", path_of(name))
    click.echo(f"deleted {name}, and {gone['num_adapters']} adapters")


def _show(tenant: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(tenant)
    else:
        show_tenants([tenant])
