"""`motet keys create | list | rotate | delete`. Standard output is the new key alone, so that it can be piped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args
from urllib.parse import quote

import click

from ...adapters.registry.tenants.records import Scope
from ..client.client import MotetClient
from ..client.client_options import with_operator_client
from .output import json_option, print_json, print_table, time_text
from .tenant_commands import label, lifetime_s, path_of, quota_option, quota_text

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
    help="What the key allows; may be repeated. Default: infer, upload and metrics.",
)
@label
@click.option(
    "--expires-in", type=lifetime_s, metavar="TIME", help="How long it is valid, for example 90d. Default: forever."
)
@click.option("--user", metavar="NAME", help="The tenant's user who owns the key. Default: none.")
@quota_option
@json_option
@with_operator_client
def create(
    client: MotetClient,
    tenant: str,
    scopes: tuple[str, ...],
    label: str | None,
    expires_in: float | None,
    user: str | None,
    bounds: tuple[tuple[str, int | None], ...],
    as_json: bool,
) -> None:
    """Make a key for TENANT. It is shown only once."""
    body: dict[str, Any] = {
        "scopes": list(scopes) or None,
        "expires_in_s": expires_in,
        "quota": dict(bounds),
        "user": user,
    }
    _print_new_key(
        client.call("POST", f"{path_of(tenant)}/keys", body if label is None else {**body, "label": label}), as_json
    )


@keys.command(name="list")
@click.argument("tenant")
@json_option
@with_operator_client
def list_keys(client: MotetClient, tenant: str, as_json: bool) -> None:
    """List the keys of TENANT, without the keys themselves."""
    records = client.listed(f"{path_of(tenant)}/keys")
    if as_json:
        print_json(records)
    else:
        _print_keys(records)


@keys.command()
@click.argument("key_id")
@click.option(
    "--overlap",
    type=lifetime_s,
    metavar="TIME",
    default="24h",
    show_default=True,
    help="How long the old key stays valid.",
)
@json_option
@with_operator_client
def rotate(client: MotetClient, key_id: str, overlap: float, as_json: bool) -> None:
    """Replace KEY_ID by a new key with the same scopes and quota. The old key expires after the overlap."""
    _print_new_key(client.call("POST", f"{PATH}/{quote(key_id, safe='')}/rotate", {"overlap_s": overlap}), as_json)


@keys.command()
@click.argument("key_id")
@with_operator_client
def delete(client: MotetClient, key_id: str) -> None:
    """Delete the key KEY_ID. It is invalid from now on."""
    client.call("DELETE", f"{PATH}/{quote(key_id, safe='')}")
    click.echo(f"deleted {key_id}")


def _print_new_key(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    click.echo(record["key"])
    click.echo(
        f"{record['id']} of {record['tenant']} may {', '.join(record['scopes'])}; it is not shown again", err=True
    )


def _print_keys(keys: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            key["id"],
            key["tenant"],
            key["user"],
            " ".join(key["scopes"]),
            time_text(key["expires_at"]) or "never",
            quota_text(key["quota"]),
            time_text(key["created_at"]),
            key["label"],
        )
        for key in keys
    ]
    print_table(("id", "tenant", "user", "scopes", "expires", "quota", "created", "label"), rows)
