"""`motet keys create | list | rotate | delete`. A new key is all of the standard output, so that it can be piped."""

from __future__ import annotations

from typing import Any, get_args
from urllib.parse import quote

import click

from ...adapters.registry.tenants.records import Scope
from ..client.client import MotetClient
from ..client.client_options import with_operator_client
from .given import lifetime_s, quota_of, with_quota
from .shown import show_json, show_keys
from .tenant_commands import as_json, label, path_of

PATH = "/v1/admin/keys"


@click.group()
def keys() -> None:
    """Make, list, rotate and delete API keys of tenants; for operators."""


@keys.command()
@click.argument("tenant")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(get_args(Scope)),
    multiple=True,
    help="What it may do; may be repeated. Without: infer, upload and metrics.",
)
@label
@click.option(
    "--expires-in", type=lifetime_s, metavar="TIME", help="For how long it is good, as 90d. Without: for ever."
)
@with_quota
@as_json
@with_operator_client
def create(
    client: MotetClient,
    tenant: str,
    scopes: tuple[str, ...],
    label: str | None,
    expires_in: float | None,
    bounds: tuple[tuple[str, int | None], ...],
    as_json: bool,
) -> None:
    """Make a key of TENANT. It is shown now and never again."""
    body: dict[str, Any] = {"scopes": list(scopes) or None, "expires_in_s": expires_in, "quota": quota_of(bounds)}
    _tell(client.call("POST", f"{path_of(tenant)}/keys", body if label is None else {**body, "label": label}), as_json)


@keys.command(name="list")
@click.argument("tenant")
@as_json
@with_operator_client
def list_keys(client: MotetClient, tenant: str, as_json: bool) -> None:
    """List the keys of TENANT, without the keys themselves."""
    found = client.listed(f"{path_of(tenant)}/keys")
    if as_json:
        show_json(found)
    else:
        show_keys(found)


@keys.command()
@click.argument("key_id")
@click.option(
    "--overlap",
    type=lifetime_s,
    metavar="TIME",
    default="24h",
    show_default=True,
    help="How long the old key is good yet.",
)
@as_json
@with_operator_client
def rotate(client: MotetClient, key_id: str, overlap: float, as_json: bool) -> None:
    """Make a key that may do what KEY_ID may, which ends after the overlap."""
    _tell(client.call("POST", f"{PATH}/{quote(key_id, safe='')}/rotate", {"overlap_s": overlap}), as_json)


@keys.command()
@click.argument("key_id")
@with_operator_client
def delete(client: MotetClient, key_id: str) -> None:
    """Delete the key KEY_ID: it is nobody's from now on."""
    client.call("DELETE", f"{PATH}/{quote(key_id, safe='')}")
    click.echo(f"deleted {key_id}")


def _tell(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(made)
        return
    click.echo(made["key"])
    click.echo(f"{made['id']} of {made['tenant']} may {', '.join(made['scopes'])}; it is not shown again", err=True)
