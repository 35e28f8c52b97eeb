"""Which requests get a canary: a pure function, so that every router decides alike, at any time."""

from __future__ import annotations

from hashlib import blake2b


def canary_place(sticky_key: str, canary_id: str) -> bytes:
    """The key's place among all keys, 8 bytes: each canary gives all keys other places."""
    return blake2b(f"{canary_id}:{sticky_key}".encode(), digest_size=8).digest()


def is_below(place: bytes, share: float) -> bool:
    """Whether a place is within the first `share` of all, 0 to 1: a larger share only adds keys."""
    return int.from_bytes(place) < share * 2.0**64


def gets_canary(share: float, sticky_key: str, canary_id: str) -> bool:
    """Whether requests with this key go to the canary, which gets this share of all keys."""
    return is_below(canary_place(sticky_key, canary_id), share)
