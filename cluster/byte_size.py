"""Counts of bytes as people write them: 512MiB, 2GiB, 1073741824."""

from __future__ import annotations

import re

import click

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_byte_size(text: str) -> int:
    """The number of bytes, at least 1. Raises ValueError that says what is accepted."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{text!r} is no size: an integer of bytes, or a number with KiB, MiB, GiB or TiB, is accepted"
        )
    num_bytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if num_bytes < 1:
        raise ValueError(f"{text!r} is no size: at least one byte is needed")
    return num_bytes


def format_byte_size(num_bytes: int) -> str:
    """Three digits and a binary unit: 1.50 MiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.3g} {unit}"


def byte_size_value(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A click option's callback: the option as a number of bytes."""
    try:
        return parse_byte_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def byte_size_or_none_value(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """The same, and 0 for nothing at all."""
    return 0 if value.strip() == "0" else byte_size_value(context, parameter, value)
