"""Which tenants' sequences use an adapter at one gang, or have done so lately.

Adapters are kept by content, and several tenants may have the same. What a tenant learns about the residency of its
adapter must follow from its own sequences: otherwise it could upload another tenant's bytes and see whether they are in
use. For the same reason uses of a user's private adapter are counted separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from ...workers.wire.page_keys import short_digest

LATELY_S: Final = 300.0  # after a tenant's last use, in which other tenants' uses of the same content may show


def asker_of(tenant: str, owner: str) -> str:
    """The tenant and user for whom an adapter is used. `owner`: of a private adapter; empty: it is the tenant's."""
    return f"{tenant}~{owner}" if owner else tenant


@dataclass(slots=True)
class _Use:
    num_open: int = 0
    ended_at: float = 0.0  # the last one, by the clock
    has_left_pool: bool = False  # since the last one began


class AdapterUses:
    """Its owner calls `forget` for adapters that have left the gang, so that this never holds more than the gang."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, dict[str, _Use]] = {}  # by digest and asker
        self._digests: dict[int, str] = {}  # the same ones, by short digest

    def __len__(self) -> int:
        return len(self._uses)

    def begin(self, digest: str, asker: str) -> None:
        """A sequence of the asker with this adapter is on its way there."""
        if digest not in self._uses:
            self._uses[digest] = {}
            self._digests[short_digest(digest)] = digest
        use = self._uses[digest].setdefault(asker, _Use())
        use.num_open += 1
        use.has_left_pool = False

    def ended(self, digest: str, asker: str) -> None:
        """Such a sequence has ended."""
        use = self._uses[digest][asker]
        use.num_open -= 1
        use.ended_at = self._clock()

    def is_lately_by(self, digest: str, asker: str, *, has_left_pool: bool = False) -> bool:
        """Whether a sequence of the asker uses it, or did so within LATELY_S.

        If it has left the pool since that one began, it counts only where the caller says that this is so.
        """
        use = self._uses.get(digest, {}).get(asker)
        if use is None or (use.has_left_pool and not has_left_pool):
            return False
        return use.num_open > 0 or self._clock() - use.ended_at < LATELY_S

    def leave_pool(self, digest: str) -> None:
        """The adapter is at most in host memory now."""
        for use in self._uses.get(digest, {}).values():
            use.has_left_pool = True

    def used(self, short_digests: Iterable[int]) -> list[str]:
        """Digests of those of these adapters that were used."""
        return [self._digests[short] for short in short_digests if short in self._digests]

    def forget(self, digest: str) -> None:
        """The adapter has left the gang and is not in use. If it returns, that may be for another tenant."""
        if self._uses.pop(digest, None) is not None:
            del self._digests[short_digest(digest)]
