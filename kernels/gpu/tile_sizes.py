"""Sizes of tiles in plain integers: Triton's own functions for these take the host microseconds each."""

from __future__ import annotations


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


def keys_of_tile(narrow: int, head_bytes: int) -> int:
    """`narrow` for heads of up to 256 bytes, half of it for up to 512, and so on: tiles of about the same bytes."""
    return max(narrow // next_power_of_2(-(-head_bytes // 256)), 16)
