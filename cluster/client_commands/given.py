"""Parses options of tenants and keys: lifetimes and quotas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import click

from ...adapters.registry.tenants.records import Quota
from ..byte_size import parse_byte_size

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LIFETIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)")
_NO_BOUND: Final = "none"


def lifetime_s(text: str) -> float:
    """A time in seconds, typed as 45s, 30m, 12h, 90d, or as a plain number of seconds. Raises BadParameter."""
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time: give one such as 45s, 30m, 12h or 90d")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def bound(text: str) -> tuple[str, int | None]:
    """NAME=NUMBER, one limit of a quota; NAME=none removes it. Raises BadParameter."""
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
    """A quota's limits as options on a command line."""
    return " ".join(f"{name.replace('_', '-')}={bound}" for name, bound in quota.items() if bound is not None)
