"""Which gang a new sequence goes to: a pure policy of what a router knows at that moment.

A gang that has the sequence's adapter, or is getting it, is preferred to one that would have to load it, as long as
the longer queue there costs no more than the load would elsewhere. So an adapter that is requested more than its gangs
can serve comes to further gangs, and a rare adapter stays where it is. Among gangs that are about equally good, every
router takes the same one without talking to the others: the first in the adapter's rendezvous order. That keeps a new
adapter's first requests together, and copies that a busy hour made fall idle and are evicted once it is over.

Each page of the sequence's prefix that a gang keeps is worth the time to compute it, and it decides between gangs that
are equally good otherwise. A sequence that was begun before goes to the gang that has kept it, whatever the queue
there: all that it needs is there already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True)
class GangCosts:
    """What one gang's work costs. The defaults are what is believed of a gang before anything was observed."""

    s_per_queued_token: float = 1e-4  # of the queue before a new sequence, as far as it has to be computed
    s_per_token: float = 1e-5  # by which one more token makes a step longer
    s_per_page: float = 1e-3  # of an adapter, from the request for it until it is there
    num_evictions_per_load: float = 0.0
    s_per_step: float = 0.0
    s_per_waiting_token: float = 1e-4  # of the queue, whether the token is computed or its KV is found


@dataclass(frozen=True)
class RoutingConfig:
    """How gangs are judged."""

    belief: GangCosts = GangCosts()
    num_shared_steps: int = 50  # that a sequence is expected to share with those that are there when it comes
    tolerance: float = 0.25  # gangs that differ by less than this part of a cold load are equally good

    def __post_init__(self) -> None:
        if self.num_shared_steps < 0:
            raise ValueError(f"num_shared_steps = {self.num_shared_steps!r}: zero or a positive number is needed")
        if not 0 <= self.tolerance <= 1:
            raise ValueError(f"tolerance = {self.tolerance!r}: 0 to 1 is accepted, a fraction of a cold load")


@dataclass(frozen=True)
class RoutingRequest:
    """What the choice needs to know of a sequence."""

    digest: str | None  # of its adapter; None: the base
    num_tokens: int  # to compute before its next token comes
    num_adapter_pages: int  # 0: the base
    salt: int = 0  # different for each request, so that requests for the base spread over gangs
    tenant: str = ""  # whose it is
    weight: float = 1.0  # its tenant's
    is_background: bool = False  # it yields to all others
    owner: str = ""  # the user whose private adapter it is


@dataclass(frozen=True)
class GangView:
    """What is known of a connected gang at the time of a choice, for one request."""

    key: str
    has_adapter: bool  # the adapter is there or coming
    num_queued_tokens: int  # to compute before the turn of a new sequence of the request's tenant, in the fair order
    num_sequences: int
    costs: GangCosts
    num_cached_tokens: int = 0  # of the sequence's first tokens, those that need not be computed there
    has_sequence: bool = False  # the gang has the request's sequence, begun for another connection of its client
    num_waiting: int = 0  # sequences that wait for compute; not those that wait for their adapter

    def net_s(self, num_shared_steps: int) -> float:
        """What the other sequences cost a new one, less what it saves by the kept pages of its prefix."""
        return self.crowd_s(num_shared_steps) - self.num_cached_tokens * self.costs.s_per_queued_token

    def crowd_s(self, num_shared_steps: int) -> float:
        """What the sequences that are there cost a new one: the wait for its turn, and longer steps from then on."""
        waiting_s = self.num_queued_tokens * self.costs.s_per_queued_token
        return waiting_s + num_shared_steps * self.num_sequences * self.costs.s_per_token

    def cold_load_s(self, num_pages: int) -> float:
        """The cost of loading `num_pages` there, with the reload of the adapters that they evict."""
        return num_pages * self.costs.s_per_page * (1 + self.costs.num_evictions_per_load)


def choose_gang(request: RoutingRequest, gangs: Sequence[GangView], config: RoutingConfig) -> str | None:
    """Key of the gang to send the request to; None only if there are no gangs. The order of `gangs` does not matter.

    The crowd there, less what the kept beginning saves, never costs more than at another gang and the load of the
    adapter at that other one together. For the base, which is everywhere, it costs no more than at another gang with
    one more request like it: routers learn of loads late, and must not all choose the same gang.
    """
    if not gangs:
        return None
    resident_gangs = [gang.key for gang in gangs if gang.has_sequence]
    if resident_gangs:
        return min(resident_gangs)
    nets_s = {gang.key: gang.net_s(config.num_shared_steps) for gang in gangs}
    num_cached = {gang.key: gang.num_cached_tokens for gang in gangs}
    if request.digest is None:
        own_s = request.num_tokens * min(gang.costs.s_per_queued_token for gang in gangs)
        return _first_among_near(str(request.salt), nets_s, own_s, num_cached)
    loads_s = {gang.key: gang.cold_load_s(request.num_adapter_pages) for gang in gangs}
    without = {gang.key: nets_s[gang.key] + loads_s[gang.key] for gang in gangs if not gang.has_adapter}
    highest_s = min(without.values(), default=math.inf)
    holders = {gang.key: nets_s[gang.key] for gang in gangs if gang.has_adapter and nets_s[gang.key] <= highest_s}
    return _first_among_near(request.digest, holders or without, config.tolerance * min(loads_s.values()), num_cached)


def _first_among_near(
    name: str, costs_s: Mapping[str, float], tolerance_s: float, num_cached: Mapping[str, int]
) -> str:
    """Of the keys whose cost is near the least, one with most cached tokens: the first in the name's rendezvous order.

    Each name has its own order of all keys, in which a key that comes or goes changes no other's place.
    """
    limit_s = min(costs_s.values()) + tolerance_s
    near = [key for key, cost_s in costs_s.items() if cost_s <= limit_s]
    return max(near, key=lambda key: (num_cached[key], blake2b(f"{name} {key}".encode(), digest_size=8).digest(), key))
