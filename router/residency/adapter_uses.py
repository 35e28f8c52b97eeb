"""Which tenants' sequences use an adapter at one gang, or have done so lately.

Adapters are kept by content, and several tenants may have the same. What a tenant is told of where its adapter is must
follow from its own sequences: else it could upload somebody's bytes and watch whether they are in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LATELY_S: Final = 300.0  # for so long others' use of the same content may prolong what a tenant sees


@dataclass(slots=True)
class _Use:
    num_open: int = 0
    ended_at: float = 0.0  # the last one, by the clock


class AdapterUses:
    """Its owner says which adapters are at the gang no more, so that there are never more digests here than there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, dict[str, _Use]] = {}  # by digest and tenant

    def __len__(self) -> int:
        return len(self._uses)

    def begun(self, digest: str, tenant: str) -> None:
        """A sequence of the tenant with this adapter is on its way there."""
        self._uses.setdefault(digest, {}).setdefault(tenant, _Use()).num_open += 1

    def ended(self, digest: str, tenant: str) -> None:
        """Such a sequence has ended."""
        use = self._uses[digest][tenant]
        use.num_open -= 1
        use.ended_at = self._clock()

    def is_lately_by(self, digest: str, tenant: str) -> bool:
        """Whether a sequence of the tenant uses it, or did so within LATELY_S."""
        use = self._uses.get(digest, {}).get(tenant)
        return use is not None and (use.num_open > 0 or self._clock() - use.ended_at < LATELY_S)

    def forget(self, digest: str) -> None:
        """It is there no more, and nobody has it open: if it comes again, somebody else may have asked for it."""
        self._uses.pop(digest, None)
