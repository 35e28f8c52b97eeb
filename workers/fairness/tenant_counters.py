"""What a gang has served each tenant: virtual token counters, by which tenants take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, Literal, TypeVar

# A priority queue of items whose keys grow while they are in it.

Key = tuple[bool, float, int]
_Item = TypeVar("_Item")

_LEAST_PRUNED = 64


class MinQueue(Generic[_Item]):
    """Items in the order of their keys, which never decrease, but for ties.

    An entry's stored key is a lower bound of its item's key, so it need only be compared when the entry is on top:
    charging a tenant costs nothing here, and the first few items cost no more with ten thousand behind them.
    """

    def __init__(self, key: Callable[[_Item], Key | None]) -> None:
        """`key`: None if the item has left; it is dropped when it reaches the top."""
        self._key = key
        self._heap: list[tuple[Key, int, _Item]] = []
        self._items: set[_Item] = set()
        self._walked: list[_Item] = []  # items that the last walk has yielded
        self._num_puts = self._num_walks = 0
        self._prune_size = _LEAST_PRUNED

    def put(self, item: _Item) -> None:
        """No-op if the item is here."""
        if item not in self._items and (key := self._key(item)) is not None:
            self._items.add(item)
            self._push(key, item)
            if len(self._heap) > self._prune_size:
                self._prune()

    def first(self) -> _Item | None:
        """The item with the least key."""
        return next(self.walk(), None)

    def walk(self) -> Iterator[_Item]:
        """All items, least first. Invalid once another walk begins; items may be put meanwhile, and come later."""
        for item in self._walked:
            if (key := self._key(item)) is None:
                self._items.discard(item)
            else:
                self._push(key, item)
        self._walked.clear()
        self._num_walks = number = self._num_walks + 1
        while self._heap:
            assert number == self._num_walks, "another walk has begun"
            old_key, _, item = heappop(self._heap)
            key = self._key(item)
            if key is None:
                self._items.discard(item)
            elif key > old_key:
                self._push(key, item)
            else:
                self._walked.append(item)
                yield item

    def _push(self, key: Key, item: _Item) -> None:
        self._num_puts += 1
        heappush(self._heap, (key, self._num_puts, item))

    def _prune(self) -> None:
        """Drops items that have left and that no walk has reached."""
        keys = [(self._key(item), number, item) for _, number, item in self._heap]
        self._items -= {item for key, _, item in keys if key is None}
        self._heap = [(key, number, item) for key, number, item in keys if key is not None]
        heapify(self._heap)
        self._prune_size = max(_LEAST_PRUNED, 2 * len(self._heap))


# Finds the tenant with the largest value without scanning all tenants.

_SPARE_ENTRIES: Final = 64


class MaxQueue:
    """A priority queue whose values change: a heap with outdated entries.

    A tenant whose value increases gets a new entry; one whose value decreased is corrected when it reaches the top. So
    a change takes logarithmic time, and `largest` at most one step for each earlier change.
    """

    def __init__(self, value_of: Callable[[str], float]) -> None:
        """`value_of`: a tenant's value now; 0: it is not in the queue."""
        self._value_of = value_of
        self._entered: dict[str, float] = {}  # never less than a tenant's value
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries, outdated ones included: at most two for each tenant, and a few more."""
        return len(self._heap)

    def increased(self, tenant: str) -> None:
        """The tenant's value may have increased. Must be called after every change except a decrease."""
        value = self._value_of(tenant)
        if value <= self._entered.get(tenant, 0.0):
            return
        self._entered[tenant] = value
        heappush(self._heap, (-value, tenant))
        self._compact()

    def remove(self, tenant: str) -> None:
        """The tenant's value is 0."""
        if self._entered.pop(tenant, None) is not None:
            self._compact()

    def largest(self) -> float:
        """The largest value; 0: the queue is empty."""
        while self._heap:
            key, tenant = self._heap[0]
            if self._entered.get(tenant) != -key:
                heappop(self._heap)
            elif (value := self._value_of(tenant)) == -key:
                return value
            elif value:
                self._entered[tenant] = value
                heapreplace(self._heap, (-value, tenant))
            else:
                self.pop()
        return 0.0

    def pop(self) -> str:
        """Removes and returns the tenant whose value `largest` just returned; `increased` adds it again."""
        _, tenant = heappop(self._heap)
        del self._entered[tenant]
        return tenant

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entered) + _SPARE_ENTRIES:
            self._heap = [(-value, tenant) for tenant, value in self._entered.items()]
            heapify(self._heap)


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
