"""What is typed for tenants and keys: lifetimes, and bounds of a quota."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click

from ...adapters.registry.tenants.records import Quota
from ..byte_size import parse_byte_size

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LIFETIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)")
_NO_BOUND: Final = "none"
C = TypeVar("C", bound=Callable[..., Any])


def lifetime_s(text: str) -> float:
    """A time in seconds, typed as 45s, 30m, 12h, 90d, or as a plain number of seconds. Raises BadParameter."""
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no time: one like 45s, 30m, 12h or 90d is accepted")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def bound(text: str) -> tuple[str, int | None]:
    """NAME=NUMBER, one bound of a quota; NAME=none takes it away. Raises BadParameter."""
    told, _, value = text.partition("=")
    name = told.replace("-", "_")
    if name not in Quota.__struct_fields__:
        names = ", ".join(field.replace("_", "-") for field in Quota.__struct_fields__)
        raise click.BadParameter(f"{text!r}: the bounds of a quota are {names}")
    if value == _NO_BOUND:
        return name, None
    try:
        number = parse_byte_size(value) if name.endswith("_bytes") else int(value)
    except ValueError:
        number = -1
    if number < 0:
        raise click.BadParameter(f"{text!r}: a whole number from 0 on, or none for no bound, is accepted")
    return name, number


def with_quota(command: C) -> C:
    """The command with --quota, which may be repeated."""
    option = click.option(
        "--quota",
        "bounds",
        type=bound,
        metavar="NAME=NUMBER",
        multiple=True,
        help="A bound, as requests-per-minute=600 or stored-bytes=10GiB; none: there is none. May be repeated.",
    )
    return option(command)


def quota_of(bounds: Sequence[tuple[str, int | None]]) -> dict[str, int | None]:
    """As a body has it."""
    return dict(bounds)
