"""What proves that an event id was sent by a router of this motet: a MAC, with a key that all of its routers share.

An id says how many tokens of each choice its client has had. A sequence that has delivered tokens is served on however
many others wait, so the numbers must not be a client's to choose. A seal holds for one tenant.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

_SEAL_BYTES: Final = 12
NUM_SEAL_CHARS: Final = 2 * _SEAL_BYTES  # hex
_PURPOSE: Final = b"motet event id"


class EventSealer:
    """Seals the ids of one answer's events: all of an id but its end is hashed once."""

    def __init__(self, key: bytes, tenant: str, response_id: str) -> None:
        self._begun = blake2b(key=key, digest_size=_SEAL_BYTES, person=_PURPOSE)
        self._begun.update(f"{len(tenant)}:{tenant}{response_id}:".encode())

    def seal(self, position: str) -> str:
        """`NUM_SEAL_CHARS` characters. `position`: the part of the id that is the position."""
        ended = self._begun.copy()
        ended.update(position.encode())
        return ended.hexdigest()


def is_sealed(seal: str, keys: Sequence[bytes], tenant: str, response_id: str, position: str) -> bool:
    """Whether a router with any of these keys made the seal."""
    own = [EventSealer(key, tenant, response_id).seal(position) for key in keys]
    return any(hmac.compare_digest(one, seal) for one in own)
