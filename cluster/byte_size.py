"""Counts of bytes as people write them: 512MiB, 2GiB, 1073741824."""

from __future__ import annotations

import re

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_byte_size(text: str) -> int:
    """The number of bytes. Raises ValueError that says what is accepted."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{text!r} is not a size: an integer of bytes, or a number with KiB, MiB, GiB or TiB, is accepted"
        )
    num_bytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if num_bytes < 1 and "." in match[1]:
        raise ValueError(f"{text!r} is not a size: it must be 0, or at least one byte")
    return num_bytes


def format_byte_size(num_bytes: int) -> str:
    """Three digits and a binary unit: 1.50 MiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.3g} {unit}"


def shortest_byte_size(num_bytes: int) -> str:
    """The same number as a person writes it, exactly: 1GiB, 1536MiB, 17."""
    unit = next(
        (unit for unit in ("TiB", "GiB", "MiB", "KiB") if num_bytes and not num_bytes % UNITS[unit.lower()]), ""
    )
    return f"{num_bytes // UNITS[unit.lower()]}{unit}"
