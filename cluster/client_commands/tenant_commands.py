"""Commands of operators: `motet tenants`, `motet users` and `motet keys`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args
from urllib.parse import quote

import click

from ...adapters.registry.tenants.records import Quota, Scope
from ..client.client import MotetClient
from ..client.client_options import json_option, print_json, print_table, time_text, with_operator_client
from ..settings.setting_field import format_byte_size, parse_byte_size

# Parses options of tenants and keys: lifetimes and quotas.

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LIFETIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)")
_NO_BOUND: Final = "none"


def lifetime_s(text: str) -> float:
    """A time in seconds, typed as 45s, 30m, 12h, 90d, or as a plain number of seconds. Raises BadParameter.

    >>> lifetime_s("90m")
    5400.0
    >>> lifetime_s("2.5")
    2.5
    """
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time: give one such as 45s, 30m, 12h or 90d")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def bound(text: str) -> tuple[str, int | None]:
    """NAME=NUMBER, one limit of a quota; NAME=none removes it. Raises BadParameter.

    >>> bound("stored-bytes=2GiB")
    ('stored_bytes', 2147483648)
    >>> bound("requests-per-minute=none")
    ('requests_per_minute', None)
    """
    typed, _, value = text.partition("=")
    name = typed.replace("-", "_")
    if name not in Quota.__struct_fields__:
        names = ", ".join(field.replace("_", "-") for field in Quota.__struct_fields__)
        raise click.BadParameter(f"{text!r}: the limits of a quota are {names}")
    if value == _NO_BOUND:
        return name, None
    try:
        number = parse_byte_size(value) if name.endswith("_bytes") else int(value)
    except ValueError:
        number = -1
    if number < 0:
        raise click.BadParameter(f"{text!r}: a whole number of at least 0, or none for no limit, is accepted")
    return name, number


quota_option = click.option(
    "--quota",
    "bounds",
    type=bound,
    metavar="NAME=NUMBER",
    multiple=True,
    help="A limit such as requests-per-minute=600 or stored-bytes=10GiB; none removes it. May be repeated.",
)


user_quota_option = click.option(
    "--user-quota",
    "user_bounds",
    type=bound,
    metavar="NAME=NUMBER",
    multiple=True,
    help="The same for each of its users, except pinned-bytes. May be repeated.",
)


def quota_text(quota: Mapping[str, int | None]) -> str:
    """A quota's limits as options on a command line.

    >>> quota_text({"requests_per_minute": 60, "stored_bytes": None})
    'requests-per-minute=60'
    """
    return " ".join(f"{name.replace('_', '-')}={bound}" for name, bound in quota.items() if bound is not None)


PATH = "/v1/admin/tenants"
label = click.option("--label", metavar="TEXT", help="A description.")
weight = click.option(
    "--weight", type=click.FloatRange(0.001, 1000), metavar="NUMBER", help="Its share relative to other tenants."
)


def path_of(tenant: str) -> str:
    # Old tenants may be named "." or "..", which would change the path.
    """The path of a tenant.

    >>> path_of("..")
    '/v1/admin/tenants/%2E%2E'
    """
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
    records = client.listed(PATH)
    if as_json:
        print_json(records)
    else:
        _print_tenants(records)


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
    answer = client.call("DELETE", path_of(name))
    click.echo(f"deleted {name}, and {answer['num_adapters']} adapters")


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


# `motet users list | cancel-batches | delete`.


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


@users.command(name="delete")
@click.argument("tenant")
@click.argument("user")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_operator_client
def delete_user(client: MotetClient, tenant: str, user: str, yes: bool) -> None:
    """Delete USER of TENANT with its keys and private adapters. If interrupted, run it again."""
    if not yes:
        click.confirm(f"Delete {user} with all its keys and private adapters? They cannot be brought back", abort=True)
    answer = client.call("DELETE", f"{path_of(tenant)}/users/{quote(user, safe='')}")
    click.echo(f"deleted {user}, {answer['num_keys']} keys and {answer['num_adapters']} adapters")


# `motet keys create | list | rotate | delete`. Standard output is the new key alone, so that it can be piped.

KEYS_PATH = "/v1/admin/keys"


@click.group()
def keys() -> None:
    """Make, list, rotate and delete API keys of tenants; for operators."""


@keys.command(name="create")
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
def create_key(
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
    _print_new_key(client.call("POST", f"{KEYS_PATH}/{quote(key_id, safe='')}/rotate", {"overlap_s": overlap}), as_json)


@keys.command(name="delete")
@click.argument("key_id")
@with_operator_client
def delete_key(client: MotetClient, key_id: str) -> None:
    """Delete the key KEY_ID. It is invalid from now on."""
    client.call("DELETE", f"{KEYS_PATH}/{quote(key_id, safe='')}")
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
