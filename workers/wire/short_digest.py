"""An adapter's digest in few bytes, for lists of many."""

from __future__ import annotations

from hashlib import blake2b


def short_digest(digest: str) -> int:
    """64 bits of it: enough to say which adapters are somewhere, and too few to load one by."""
    return int.from_bytes(blake2b(digest.encode(), digest_size=8).digest(), "big")
