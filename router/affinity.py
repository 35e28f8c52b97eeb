"""Which gang a new sequence goes to: a pure policy of what a router knows at that moment.

A gang that has the sequence's adapter, or is getting it, is preferred to one that would have to load it, as long as the
longer queue there costs no more than the load would elsewhere. So an adapter that is asked for more than its gangs can
serve comes to further gangs, and a rare one stays where it is. Among gangs that are about equally good, every router
takes the same one without talking to the others: the adapter's first in rendezvous order. That keeps a new adapter's
first requests together, and lets copies that a busy hour made fall idle and be evicted once it is over.

Shared prefixes are no criterion: gangs keep no prefix of one sequence for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True)
class RoutingConfig:
    """How gangs are judged. The costs are those believed of a gang that has not shown its own yet."""

    s_per_queued_token: float = 1e-4
    s_per_page: float = 1e-3  # of a cold load
    tolerance: float = 0.25  # of a cold load: waits that differ by less are equally good

    def __post_init__(self) -> None:
        for key in ("s_per_queued_token", "s_per_page"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} = {getattr(self, key)!r}: a positive number of seconds is needed")
        if not 0 <= self.tolerance <= 1:
            raise ValueError(f"tolerance = {self.tolerance!r}: 0 to 1 is accepted, a fraction of a cold load")


@dataclass(frozen=True)
class RoutingRequest:
    """What the choice needs to know of a sequence."""

    digest: str | None  # of its adapter; None: the base
    num_tokens: int  # to compute before its next token comes
    num_adapter_pages: int  # 0: the base


@dataclass(frozen=True)
class GangView:
    """What is known of a connected gang at the time of a choice, for one request."""

    key: str
    has_adapter: bool  # or is getting it
    num_queued_tokens: int  # to compute before a new sequence's turn
    num_sequences: int
    s_per_queued_token: float
    s_per_page: float  # of a cold load

    @property
    def wait_s(self) -> float:
        """Until a new sequence's turn, if its adapter is there."""
        return self.num_queued_tokens * self.s_per_queued_token


def choose_gang(
    request: RoutingRequest, gangs: Sequence[GangView], config: RoutingConfig = RoutingConfig()
) -> str | None:
    """Key of the gang to send the request to; None only if there are no gangs.

    The wait there is never longer than the shortest wait by more than a cold load of the request's adapter takes, and for
    the base it is the shortest. The order of `gangs` does not matter.
    """
    if not gangs:
        return None
    if request.digest is None:
        return min(gangs, key=lambda gang: (gang.wait_s, gang.num_sequences, gang.key)).key
    cold_load_s = request.num_adapter_pages * min(gang.s_per_page for gang in gangs)
    longest_s = min(gang.wait_s for gang in gangs) + cold_load_s
    holders = [gang for gang in gangs if gang.has_adapter and gang.wait_s <= longest_s]
    candidates = holders or gangs
    limit_s = min(longest_s, min(gang.wait_s for gang in candidates) + config.tolerance * cold_load_s)
    near = [gang for gang in candidates if gang.wait_s <= limit_s]
    return max(near, key=lambda gang: (_affinity(request.digest, gang.key), gang.key)).key


def _affinity(digest: str, key: str) -> bytes:
    """Rendezvous hashing: each adapter has its own order of gangs, and a gang that leaves changes no other's place."""
    return blake2b(f"{digest} {key}".encode(), digest_size=8).digest()
