"""What a gang has served each tenant: virtual token counters, by which tenants take turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .priority_queues import Key, MinQueue

# Prices of a gang's work in tokens' worth: the work of computing one prompt token.

# An output token takes a whole step of its sequence: the price in the paper on virtual token counters (arXiv 2401.00588
# §5.1), and about what providers charge.
OUTPUT_TOKEN = 2.0
# A prompt token whose log-probability is computed also goes through the model's head; others do not.
SCORED_TOKEN = 0.5
# A token whose KV was cached: nothing is computed, but its page is held and read.
CACHED_TOKEN = 0.1


def prompt_price(num_computed: int, num_cached: int = 0) -> float:
    return num_computed + CACHED_TOKEN * num_cached


def load_price(num_pages: int, block_size: int) -> int:
    """Price of loading an adapter. Each of its pages evicts a page of KV, with `block_size` tokens.

    If loads were free, a tenant that uses another adapter in every request would evict the adapters of all others
    while its counter hardly grows.
    """
    return num_pages * block_size


Scheduling = Literal["fair", "fifo"]

_SLACK_STEPS = 4  # how far a tenant may be behind without being clearly behind, in full steps of its prompts
_BURST_STEPS = 16  # how far a tenant that comes back may be behind the others, in full steps of its prompts
_MAX_REPORTS = 4  # cap on one correction: this many times the service last reported by other gangs
_MAX_IDLE = 16_384  # remembered tenants without sequences here; some 200 bytes each


@dataclass(eq=False, slots=True)
class TenantCounter:
    """One tenant's virtual token counter, in one class of service. `TenantCounters` owns what is written here."""

    tenant: str = ""
    is_background: bool = False
    slack: float = float("inf")  # the tenant is clearly behind another whose `value` is larger by more than this
    weight: float = 1.0  # in units of the gang's first tenant's, so that only ratios of weights matter
    given_weight: float = 1.0
    value: float = 0.0  # service in tokens' worth, divided by `weight`; raised when the tenant comes back
    served: float = 0.0  # what this gang has served in tokens' worth, divided by `given_weight`
    num_sequences: int = 0  # of the tenant that wait or run


class TenantCounters:
    """Virtual token counters (Sheng et al., arXiv 2401.00588 §4): the tenant that was served least goes first.

    A tenant's counter grows by the price of its work, divided by its weight. When an idle tenant comes back, its
    counter is raised nearly to the smallest one of the active tenants: unused service expires, or the tenant would
    block all others until it has caught up. It may stay a few steps behind, so that a tenant that uses less than its
    fair part sees no queue.

    Background work has counters of its own: it gets what is left over, which costs its tenant nothing.
    """

    def __init__(self, max_tokens_per_step: int, scheduling: Scheduling = "fair") -> None:
        """`scheduling`: "fifo" treats all sequences as one tenant's, of one class and priority."""
        self.is_fair = scheduling == "fair"
        self.slack, self.burst = float(_SLACK_STEPS * max_tokens_per_step), float(_BURST_STEPS * max_tokens_per_step)
        self._counters: dict[tuple[str, bool], TenantCounter] = {}
        self._active_queues = {is_background: MinQueue(_key_here) for is_background in (False, True)}
        # By class: the smallest counter of active tenants when it was last looked at, or that of the tenant that left
        # last. It never shrinks, so tenants that come back together are not put back behind one another.
        self._level = {False: 0.0, True: 0.0}
        self._unit: float | None = None  # weight of the first tenant
        self._num_here = 0
        self._shared = TenantCounter()
        self._elsewhere: dict[str, float] = {}  # service by other gangs that is charged already, by tenant
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        """Remembered tenants, each class counted separately."""
        return len(self._counters)

    def join(self, tenant: str, weight: float = 1.0, is_background: bool = False) -> TenantCounter:
        """A sequence of the tenant arrives: the counter that it waits and runs under. `leave` must follow."""
        if not self.is_fair:
            return self._shared
        counter = self._counter(tenant, is_background)
        self._unit = self._unit or weight
        # Rounded, so that a common factor of all weights changes no bit of a counter.
        counter.given_weight, counter.weight = weight, float(f"{weight / self._unit:.9g}")
        counter.slack = self.slack / counter.weight
        if not counter.num_sequences:
            counter.value = max(counter.value, self._floor(counter))
            self._num_here += 1
        counter.num_sequences += 1
        self._active_queues[is_background].put(counter)
        self._changed[tenant] = None
        return counter

    def leave(self, counter: TenantCounter) -> None:
        """One of the tenant's sequences has ended."""
        if self.is_fair:
            counter.num_sequences -= 1
            self._changed[counter.tenant] = None
            if not counter.num_sequences:
                if not counter.is_background:
                    self._elsewhere.pop(counter.tenant, None)
                if self._active_queues[counter.is_background].first() is None:
                    self._level[counter.is_background] = max(self._level[counter.is_background], counter.value)
                self._num_here -= 1
                self._forget_some()

    def charge(self, counter: TenantCounter, price: float) -> None:
        """Adds the price of work for the tenant, in tokens' worth."""
        counter.value += price / counter.weight
        counter.served += price / counter.given_weight
        self._changed[counter.tenant] = None

    def charge_elsewhere(self, totals: Iterable[tuple[str, float]]) -> None:
        """Charges tenants for service at all other gangs: running totals, divided by the tenants' weights.

        Several routers may report the same tenant; the largest total counts. A tenant is charged only for what is
        added while it has sequences here, and at each report at most so much that it is not far behind the others
        here if it loses its other gangs.
        """
        if not self.is_fair:
            return
        for tenant, total in totals:
            counter, before = self._counter(tenant, False), self._elsewhere.get(tenant, total)
            self._elsewhere[tenant] = max(before, total)
            if counter.num_sequences:
                growth = max(total - before, 0.0) * (self._unit or 1.0)
                first = self._active_queues[False].first() or counter
                max_value = first.value + max(self.burst / counter.weight, _MAX_REPORTS * growth)
                counter.value = max(counter.value, min(counter.value + growth, max_value))
        self._forget_some()

    def take_changed(self, max_tenants: int) -> list[TenantCounter]:
        """TenantCounters that have changed since they were last taken; the others come with later calls."""
        tenants = [*self._changed][:max_tenants]
        for tenant in tenants:
            del self._changed[tenant]
        return [counter for tenant in tenants if (counter := self._counters.get((tenant, False))) is not None]

    def check_integrity(self, sequences: Iterable[TenantCounter]) -> None:
        """Raises AssertionError if a count is wrong. `sequences`: the counter of each sequence that waits or runs."""
        if not self.is_fair:
            return
        counted: dict[TenantCounter, int] = {}
        for counter in sequences:
            counted[counter] = counted.get(counter, 0) + 1
        active = {counter for counter in self._counters.values() if counter.num_sequences}
        assert counted == {counter: counter.num_sequences for counter in active}, "a tenant's sequences are miscounted"
        assert len(active) == self._num_here

    def _counter(self, tenant: str, is_background: bool) -> TenantCounter:
        key = (tenant, is_background)
        counter = self._counters.pop(key, None) or TenantCounter(tenant, is_background)
        self._counters[key] = counter  # moved to the end: tenants that were idle longest are forgotten first
        return counter

    def _floor(self, counter: TenantCounter) -> float:
        """The least counter of a tenant that comes back.

        A tenant that this gang has never served starts even with the tenant that left last, if no other is here.
        Otherwise the flood of a new tenant would go before a tenant that was here all day and is between two requests.
        """
        first, level = self._active_queues[counter.is_background].first(), self._level[counter.is_background]
        if first is not None:
            level = self._level[counter.is_background] = max(level, first.value)
        return level if first is None and not counter.served else level - self.burst / counter.weight

    def _forget_some(self) -> None:
        """Forgets half of the idle tenants once there are too many, so this runs rarely."""
        if len(self._counters) - self._num_here <= _MAX_IDLE:
            return
        idle = [key for key, counter in self._counters.items() if not counter.num_sequences]
        for key in idle[: _MAX_IDLE // 2]:
            del self._counters[key]
            if not key[1]:
                self._elsewhere.pop(key[0], None)


def _key_here(counter: TenantCounter) -> Key | None:
    return (False, counter.value, 0) if counter.num_sequences else None
