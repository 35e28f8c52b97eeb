"""Who has had how much of a gang: virtual token counters of all its tenants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from .least_first import Key, LeastFirst
from .standing import Standing

Scheduling = Literal["fair", "fifo"]

_SLACK_STEPS = 4  # so many full steps of prompts
_AHEAD_NEWS = 4  # a tenant is put back by no more than others serve it in so many times that they tell of it
_BURST_STEPS = 16  # what a tenant may be behind when it comes back
_MAX_IDLE = 16_384  # tenants that are remembered though they have nothing here; some 200 bytes each


class Standings:
    """Virtual token counters (Sheng et al., arXiv 2401.00588 §4): whoever was served least goes first.

    A tenant's counter grows by the price of what the gang does for it, divided by its weight. One that has had nothing
    here, and comes back, is lifted nearly to whoever is furthest behind of those that are here: what it did not use is
    gone, or it would stop all others until it has caught up. Nearly, since it may be a few steps behind: a tenant that
    uses less than its share finds the gang as if it were alone.

    Background work has counters of its own: it has what is left over, so it costs a tenant nothing of its share.
    """

    def __init__(self, max_tokens_per_step: int, scheduling: Scheduling = "fair") -> None:
        """`scheduling`: "fifo" serves all as they come, as if they were one tenant's, of one class and priority."""
        self.is_fair = scheduling == "fair"
        self.slack, self.burst = float(_SLACK_STEPS * max_tokens_per_step), float(_BURST_STEPS * max_tokens_per_step)
        self._known: dict[tuple[str, bool], Standing] = {}
        self._here = {is_background: LeastFirst(_key_here) for is_background in (False, True)}
        self._last_left = {False: 0.0, True: 0.0}  # counter of the tenant that last had nothing left here, by class
        self._num_here = 0
        self._everybody = Standing()
        self._elsewhere: dict[str, float] = {}  # what tenants were served by other gangs, as far as it was charged
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        """Tenants that are remembered, each class for itself."""
        return len(self._known)

    def join(self, tenant: str, weight: float = 1.0, is_background: bool = False) -> Standing:
        """A sequence of the tenant comes: under which standing it waits and runs. `leave` must follow."""
        if not self.is_fair:
            return self._everybody
        standing = self._standing(tenant, is_background)
        standing.weight = weight
        if not standing.num_sequences:
            standing.counter = max(standing.counter, self._floor(standing))
            self._num_here += 1
        standing.num_sequences += 1
        self._here[is_background].put(standing)
        self._changed[tenant] = None
        return standing

    def leave(self, standing: Standing) -> None:
        """One of its sequences has ended."""
        if self.is_fair:
            standing.num_sequences -= 1
            self._changed[standing.tenant] = None
            if not standing.num_sequences:
                if not standing.is_background:
                    self._elsewhere.pop(standing.tenant, None)
                self._last_left[standing.is_background] = standing.counter
                self._num_here -= 1
                self._forget_some()

    def charge(self, standing: Standing, price: float) -> None:
        """The gang does something for the tenant, of this price in tokens' worth."""
        worth = price / standing.weight
        standing.counter += worth
        standing.served += worth
        self._changed[standing.tenant] = None

    def charge_elsewhere(self, totals: Iterable[tuple[str, float]]) -> None:
        """What tenants have had of all other gangs since these were first told of, divided by their weights.

        Of several that tell the same the largest counts. A tenant is charged for what it has elsewhere while it has
        something here: not for what was before, and never so far that it could not be one of those who have only this
        gang soon after it has no other. As long as it has others, it is charged with each news.
        """
        if not self.is_fair:
            return
        for tenant, total in totals:
            standing, before = self._standing(tenant, False), self._elsewhere.get(tenant, total)
            self._elsewhere[tenant] = max(before, total)
            if standing.num_sequences:
                growth, first = max(total - before, 0.0), self._here[False].first() or standing
                most = first.counter + max(self.burst, _AHEAD_NEWS * growth)
                standing.counter = max(standing.counter, min(standing.counter + growth, most))
        self._forget_some()

    def take_changed(self, most: int) -> list[Standing]:
        """Standings that have changed since they were last taken; the others come with later calls."""
        tenants = [*self._changed][:most]
        for tenant in tenants:
            del self._changed[tenant]
        return [standing for tenant in tenants if (standing := self._known.get((tenant, False))) is not None]

    def check_integrity(self, sequences: Iterable[Standing]) -> None:
        """Raises AssertionError if somebody is miscounted. `sequences`: the standing of each that waits or runs."""
        if not self.is_fair:
            return
        counted: dict[Standing, int] = {}
        for standing in sequences:
            counted[standing] = counted.get(standing, 0) + 1
        here = {standing for standing in self._known.values() if standing.num_sequences}
        assert counted == {standing: standing.num_sequences for standing in here}, "a tenant's sequences are miscounted"
        assert len(here) == self._num_here

    def _standing(self, tenant: str, is_background: bool) -> Standing:
        key = (tenant, is_background)
        standing = self._known.pop(key, None) or Standing(tenant, is_background, self.slack)
        self._known[key] = standing  # last: who was not here for longest is forgotten first
        return standing

    def _floor(self, standing: Standing) -> float:
        """Whoever comes back is at least so far.

        One that this gang has never served, and that nobody is before, has nothing to be behind for: else a new
        tenant's flood would go before a quiet one that was here all day, and is just between two requests.
        """
        first = self._here[standing.is_background].first()
        least = self._last_left[standing.is_background] if first is None else first.counter
        return least if first is None and not standing.served else least - self.burst

    def _forget_some(self) -> None:
        """Forgets tenants that have nothing here, once there are many: half of them, so that it seldom comes to it."""
        if len(self._known) - self._num_here <= _MAX_IDLE:
            return
        idle = [key for key, standing in self._known.items() if not standing.num_sequences]
        for key in idle[: _MAX_IDLE // 2]:
            del self._known[key]
            if not key[1]:
                self._elsewhere.pop(key[0], None)


def _key_here(standing: Standing) -> Key | None:
    return (False, standing.counter, 0) if standing.num_sequences else None
