"""Which requests get a canary: a pure function, so that every router decides alike, at any time."""

from __future__ import annotations

from hashlib import blake2b


def gets_canary(share: float, sticky_key: str, canary_id: str) -> bool:
    """Whether requests with this key go to the canary. `share`: of all keys, 0 to 1.

    Each key has a place between 0 and 1, and those below the share get the canary: a larger share only adds keys.
    Another canary gives all keys other places.
    """
    digest = blake2b(f"{canary_id}:{sticky_key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2.0**64
