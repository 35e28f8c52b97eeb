"""Messages of gang and routers about how much service each tenant has had."""

from __future__ import annotations

import msgspec


class TenantShare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a tenant is at one gang. All but the counter is of this moment.

    `counter`: the tenant's virtual time there: the tokens' worth that the gang has served it, by its prices, divided by
    the tenant's weight, and lifted as it came back. The tenant with the least goes first.
    """

    tenant: str
    counter: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of prompts (and of answers that another gang began) of its sequences that wait
    num_running_tokens: int = 0  # still to compute of its sequences that run
    weight: float = 1.0  # that its sequences have come with, the latest
    served: float = 0.0  # of the counter, what this gang has served it: without lifts, nor what other gangs served


class ServedElsewhere(msgspec.Struct, frozen=True, tag="served"):
    """What tenants have had at all other gangs, as this router knows it: sent again as it grows.

    `totals`: a tenant and what it had, in tokens' worth divided by its weight, since those gangs were started: the same
    whichever router sends it, and it never shrinks. A leader charges what the largest total of all its routers has
    grown by, so several routers that send the same do not count it twice.
    """

    totals: list[tuple[str, float]]
