"""`motet users list | cancel-batches | delete`."""

from __future__ import annotations

from urllib.parse import quote

import click

from ..byte_size import format_byte_size
from ..client.client import MotetClient
from ..client.client_options import with_operator_client
from .output import json_option, print_json, print_table
from .tenant_commands import path_of


@click.group()
def users() -> None:
    """List and delete users of tenants, cancel their batches; for operators.

    Keys and tokens make users: see `motet keys create --user`.
    """


@users.command(name="list")
@click.argument("tenant")
@json_option
@with_operator_client
def list_users(client: MotetClient, tenant: str, as_json: bool) -> None:
    """List the users of TENANT who have a key or a private adapter."""
    records = client.listed(f"{path_of(tenant)}/users")
    if as_json:
        print_json(records)
        return
    rows = [
        (record["name"], record["num_keys"], record["adapters"], format_byte_size(record["stored_bytes"]))
        for record in records
    ]
    print_table(("name", "keys", "adapters", "stored"), rows)


@users.command()
@click.argument("tenant")
@click.argument("user")
@with_operator_client
def cancel_batches(client: MotetClient, tenant: str, user: str) -> None:
    """Cancel all batches of USER of TENANT, those made with a token, too."""
    cancelled = client.call("POST", f"{path_of(tenant)}/users/{quote(user, safe='')}/batches/cancel")
    click.echo(f"cancelled {cancelled['num_batches']} batches of {user}")


@users.command()
@click.argument("tenant")
@click.argument("user")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_operator_client
def delete(client: MotetClient, tenant: str, user: str, yes: bool) -> None:
    """Delete USER of TENANT with its keys and private adapters. If interrupted, run it again."""
    if not yes:
        click.confirm(f"Delete {user} with all its keys and private adapters? They cannot be brought back", abort=True)
    answer = client.call("DELETE", f"{path_of(tenant)}/users/{quote(user, safe='')}")
    click.echo(f"deleted {user}, {answer['num_keys']} keys and {answer['num_adapters']} adapters")
