"""Which pages of KV move between the pool, host memory and disk, and which slots they have there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, islice, takewhile
from typing import Literal

from ..memory.page_allocator import Item
from ..memory.paged_memory import PagedMemory
from ..plan import MoveEnd, PageMove, Tier
from ..wire.page_keys import PageKey, last_state
from .measured_costs import MeasuredCosts, is_worth_bringing

# Directory of one tier behind the pool: which pages of KV it holds, in which slots.

_WRITTEN, _USED = 1.0, 2.0  # what a page is worth then, plus the worth of the page replaced last


@dataclass(slots=True)
class _Entry:
    number: int  # pages that were written before it
    worth: float


class TierSlots:
    """The leader's directory of a tier; slot numbers are the same on every worker.

    A slot is free, being written, or holds a page. All pages of a recurrent state have one key: they come, are read and
    go together. The page of least worth that is not being read is replaced first, by GreedyDual (Young 1994): a page is
    worth 1 when it is written and 2 when it is used, plus the worth of the page that was replaced last. Of equal worth
    the newest is replaced first. So prefixes lose their ends before their beginnings, and of those that are used in
    turns as many stay whole as there is room for. The least recently used page would always be the one that is needed
    next.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.works = True  # `TierTraffic` gives up one that fails again and again
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[PageKey, tuple[int, ...]] = {}  # one, or as many as a state has pages
        self._entries: dict[PageKey, _Entry] = {}  # of the pages that the tier holds
        self._heap: list[tuple[float, int, PageKey]] = []  # worth, -number, key: worths that have grown since, too
        self._floor = 0.0  # worth of the page replaced last
        self._number = 0  # of the page written last
        self._writing: dict[PageKey, tuple[int, ...]] = {}
        self._num_writing = 0  # slots
        self._readers: Counter[PageKey] = Counter()

    def __contains__(self, key: PageKey | None) -> bool:
        """The tier holds the page, wholly written."""
        return key in self._slots

    @property
    def num_held(self) -> int:
        return self.num_slots - len(self._free) - self._num_writing

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, key: PageKey, num_pages: int = 1) -> tuple[int, ...] | None:
        """Slots for what has this key, if need be those of the pages of least worth; None: too many are in use.

        It must neither be here nor be being written. `written` or `fail` must follow.
        """
        assert key not in self._slots and key not in self._writing
        if (num_short := num_pages - len(self._free)) > 0:
            victims = self.least_worth(num_short)
            if self.num_pages_of(victims) < num_short:
                return None
            self.evict(victims)
        slots = tuple(self._free[: -num_pages - 1 : -1])
        del self._free[-num_pages:]
        self._writing[key] = slots
        self._num_writing += num_pages
        return slots

    def num_pages_of(self, keys: Iterable[PageKey]) -> int:
        """Pages of these keys, which the tier holds."""
        return sum([len(self._slots[key]) for key in keys])

    def is_coming(self, key: PageKey) -> bool:
        return key in self._writing

    def written(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._slots[key] = slots = self._writing.pop(key)
            self._num_writing -= len(slots)
            self._number += 1
            self._entries[key] = entry = _Entry(self._number, self._floor + _WRITTEN)
            heappush(self._heap, (entry.worth, -entry.number, key))
        if len(self._heap) > 2 * len(self._slots) + 64:
            self._heap = [(entry.worth, -entry.number, key) for key, entry in self._entries.items()]
            heapify(self._heap)

    def fail(self, keys: Iterable[PageKey]) -> None:
        """Frees the slots of pages that could not be written."""
        for key in keys:
            slots = self._writing.pop(key)
            self._num_writing -= len(slots)
            self._free += slots

    def begin_read(self, keys: Sequence[PageKey]) -> tuple[int, ...]:
        """Slots of pages, which are not replaced until `end_read`."""
        self._readers.update(keys)
        return tuple([slot for key in keys for slot in self._slots[key]])

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Counts a use of those of the pages that are here."""
        entries, worth = self._entries, self._floor + _USED
        for key in keys:
            if (entry := entries.get(key)) is not None:
                entry.worth = worth

    def end_read(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def drop(self, key: PageKey) -> None:
        """Forgets a page. No-op if it is not here, or is being read."""
        if key not in self._readers and key in self._slots:
            self._free += self._slots.pop(key)
            del self._entries[key]

    def evict(self, keys: Iterable[PageKey]) -> None:
        """Forgets pages of least worth that make room for others. Not those that are being read."""
        for key in keys:
            if key not in self._readers and key in self._slots:
                self._floor = max(self._floor, self._entries[key].worth)
                self.drop(key)

    def least_worth(self, num_pages: int) -> list[PageKey]:
        """Keys of `num_pages` pages that may be dropped, or of all, in the order in which they would be replaced.

        A state may be the last of them, and have more pages than are left.
        """
        keys: list[PageKey] = []
        entries: list[tuple[float, int, PageKey]] = []
        while self._heap and num_pages > 0:
            worth, number, key = heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.number != -number:
                continue  # it was dropped
            if entry.worth > worth:
                heappush(self._heap, (entry.worth, number, key))
                continue
            entries.append((worth, number, key))
            if key not in self._readers:
                keys.append(key)
                num_pages -= len(self._slots[key])
        for item in entries:
            heappush(self._heap, item)
        return keys

    def all_slots(self) -> Iterator[tuple[int, ...]]:
        """Of each key that is here or being written, for integrity checks."""
        return chain(self._slots.values(), self._writing.values())

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is lost or used twice."""
        used = [*self._free, *chain.from_iterable(self.all_slots())]
        assert self.num_held == self.num_pages_of(self._slots), "pages are miscounted"
        assert sorted(used) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert self._readers.keys() <= self._slots.keys(), "a page is read that is not there"
        assert self._entries.keys() == self._slots.keys(), "a page has no worth, or one that is not there has"
        pairs = {(key, -number) for _, number, key in self._heap}
        assert all((key, entry.number) in pairs for key, entry in self._entries.items()), "a page cannot be replaced"


_log = logging.getLogger(__name__)
_PAGES_PER_MOVE = 32
_MAX_MOVES_OUT = 2  # at once, from the pool to the tier behind it; no sequence waits for them
_LEAST_IN = 256  # pages that may be under way into the pool at once, however long they take
_LEAST_COPY_S = 1e-7  # lower bound of a page's measured time
_STEPS_AHEAD = 4  # steps' worth of copies into the pool that are under way, so that copies never pause
_MAX_FAILURES = 3  # in a row, after which a tier is given up
_LOW = 8  # host memory runs low when less than one slot in 8 is free, or fewer than a state takes


@dataclass(frozen=True)
class TierSizes:
    """Pages that each tier behind the pool has room for; 0: it is not used."""

    host: int = 0
    disk: int = 0


@dataclass
class _Move:
    kind: Literal["out", "down", "in"]  # pool to host, host to disk, a tier to the pool
    plan: PageMove
    keys: list[PageKey]
    depths: Sequence[int] = ()  # of an "in" move: pages before each
    state: PageKey | None = None  # of an "in" move: which of the keys is that of a recurrent state
    pool_pages: Sequence[int] = ()  # pages of the pool that are held until the move ends
    is_bad: bool = False  # the pages hold numbers that are not finite: what arrives is dropped


class TierTraffic:
    """Owner of the tiers' slots, and of pages of the pool that are being copied."""

    def __init__(self, memory: PagedMemory, sizes: TierSizes, costs: MeasuredCosts, num_state_pages: int = 0) -> None:
        """`num_state_pages`: of a recurrent state, which the tiers keep if it has room in them."""
        self._memory, self._costs, self._num_state_pages = memory, costs, num_state_pages
        self._tiers: dict[Tier, TierSlots] = {}  # the faster one first
        if sizes.host:
            self._tiers["host"] = TierSlots(sizes.host)
        if sizes.disk:
            self._tiers["disk"] = TierSlots(sizes.disk)
        # What waits to be copied, oldest first: a filled page, or a state. Where it lies may change until its turn.
        self._offered: dict[PageKey, None] = {}
        self._moves: dict[int, _Move] = {}  # under way
        self._targets: dict[PageKey, tuple[int, ...]] = {}  # of what is being copied into the pool
        self._planned: list[PageMove] = []  # for the next plan
        self._number = 0  # of the last move
        self._failures_in_a_row: Counter[Tier] = Counter()
        self.num_pages_out = self.num_pages_in = self.num_failures = 0

    @property
    def num_moves(self) -> int:
        return len(self._moves)

    def has_work(self) -> bool:
        """A page is being copied, or should be."""
        return bool(self._moves or self._offered)

    def num_held(self, tier: Tier) -> int:
        """Pages that a tier holds."""
        return self._tiers[tier].num_held if tier in self._tiers and self._tiers[tier].works else 0

    def holds(self, key: PageKey) -> bool:
        """The page is in a tier behind the pool."""
        return any(tier.works and key in tier for tier in self._tiers.values())

    def last_state(self, keys: Sequence[PageKey]) -> int:
        """How many of the first pages with these keys come before the last recurrent state that is in a tier behind the
        pool, or is being copied from there; 0: none is."""
        places = [self._targets.__contains__, *[tier.__contains__ for tier in self._tiers.values() if tier.works]]
        return max([last_state(keys, is_there) for is_there in places])

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Counts a use of these pages in the tiers too, as a sequence uses them in the pool."""
        for tier in self._tiers.values():
            if tier.works:
                tier.touch(keys)

    def forget(self, keys: Sequence[PageKey]) -> None:
        """These pages hold numbers that are not finite: drops them from all tiers, and what copies under way bring."""
        bad_keys = set(keys)
        for key in bad_keys:
            self._offered.pop(key, None)
        for move in self._moves.values():
            move.is_bad = move.is_bad or not bad_keys.isdisjoint(move.keys)
        for tier in self._tiers.values():
            for key in bad_keys:
                tier.drop(key)

    def offer(self, pages: tuple[int, ...], key: PageKey) -> None:
        """A page was filled, or a state written, and is kept in the pool: it is copied to the next tier when there is
        time. Not a state for which a tier is too small.
        """
        tiers = self._tiers.values()
        if not tiers or any(tier.works and (key in tier or tier.is_coming(key)) for tier in tiers):
            return
        if all(len(pages) <= tier.num_slots for tier in tiers):
            self._offered[key] = None

    def can_bring(self) -> bool:
        """More pages may begin to come into the pool now, if they are in a tier."""
        return any(tier.works and tier.num_held and self._most_in(name) > 0 for name, tier in self._tiers.items())

    def page_coming(self, key: PageKey) -> int | None:
        """The page of the pool into which this one is being copied; None: it is not."""
        pages = self._targets.get(key)
        return None if pages is None else pages[0]

    def coming_keys(self) -> AbstractSet[PageKey]:
        """Of all that is being copied into the pool."""
        return self._targets.keys()

    def bring(
        self, prefix: Sequence[int], depth: int, keys: Iterator[PageKey], keep: AbstractSet[Item], num_spared: int = 0
    ) -> list[PageKey]:
        """Starts copies into the pool of pages that follow the pages `prefix`. Returns the keys of those copied.

        `depth`: pages before the first of them, held or not. `keys`: of pages that are neither in the pool nor coming.
        `num_spared`: pages that need not be computed, beside these, if these are here. None is copied if none is in a
        tier, if computing is cheaper, or if the pool has no room. Copies under way are bounded: call again for more.
        """
        first = next(keys, None)
        source = next((name for name, tier in self._tiers.items() if first in tier and tier.works), None)
        if first is None or source is None:
            return []
        tier = self._tiers[source]
        copy_keys = list(takewhile(tier.__contains__, islice(chain((first,), keys), self._most_in(source))))
        if not is_worth_bringing(len(copy_keys), self._costs.costs(source), num_spared):
            return []
        if not self._memory.has_room(len(copy_keys), keep, prefix):
            return []
        self._begin_in(source, copy_keys, range(depth, depth + len(copy_keys)), prefix, keep)
        return copy_keys

    def bring_whole(
        self,
        prefix: Sequence[int],
        absent: Mapping[PageKey, int],
        state: PageKey,
        keep: AbstractSet[Item],
        num_spared: int,
    ) -> bool:
        """Starts copies into the pool of all that a prefix with a recurrent state lacks there, or of nothing.

        `prefix`: pages that it does not lack. `absent`: depths by key, each in a tier; `state` is one of them, unless
        that is not absent. `num_spared`: pages that need not be computed then. False if computing them is cheaper, if
        the pool has no room for all, or if as much is under way as may be.
        """
        by_tier: dict[Tier, list[PageKey]] = {}
        for key in absent:
            source = next(name for name, tier in self._tiers.items() if key in tier and tier.works)
            by_tier.setdefault(source, []).append(key)
        num_pages = {source: self._tiers[source].num_pages_of(keys) for source, keys in by_tier.items()}
        copy_s = sum([number * self._costs.costs(source).copy_s for source, number in num_pages.items()])
        costs = self._costs.costs("host")
        if copy_s + costs.step_s >= num_spared * costs.compute_s or not all(map(self._most_in, by_tier)):
            return False
        if not self._memory.has_room(sum(num_pages.values()), keep, prefix):
            return False
        for source, keys in by_tier.items():
            pages = self._begin_in(source, keys, [absent[key] for key in keys], prefix, keep, state)
            prefix = [*prefix, *pages]
        return True

    def _begin_in(
        self,
        source: Tier,
        keys: list[PageKey],
        depths: Sequence[int],
        prefix: Sequence[int],
        keep: AbstractSet[Item],
        state: PageKey | None = None,
    ) -> Sequence[int]:
        """Starts copies of what has these keys, for which there is room, and holds `prefix` until they have ended.

        Returns the pages into which it is copied.
        """
        tier = self._tiers[source]
        num_pages = tier.num_pages_of(keys)
        self._memory.prefixes.acquire(prefix)  # they must not be evicted before the copies have ended
        self._memory.make_room(num_pages, keep)
        pages = self._memory.allocator.allocate(num_pages) or ()
        tier.touch(keys)
        move = self._begin("in", source, tier.begin_read(keys), "device", pages, keys)
        move.depths, move.state, move.pool_pages = depths, state, [*prefix, *pages]
        targets = iter(pages)
        self._targets |= {key: tuple(islice(targets, tier.num_pages_of((key,)))) for key in keys}
        return pages

    def plan_moves(self) -> tuple[PageMove, ...]:
        """The moves that the next plan should begin."""
        if self._offered:
            self._begin_out()
        if "disk" in self._tiers and "host" in self._tiers and self._tiers["disk"].works:
            self._begin_down(self._tiers["host"], self._tiers["disk"])
        planned, self._planned = tuple(self._planned), []
        return planned

    def finish(self, ends: Iterable[MoveEnd]) -> Iterator[PageKey]:
        """Takes in moves that have ended. Yields the keys that sequences need not await any more."""
        for end in ends:
            move = self._moves.pop(end.number)
            is_good = end.problem is None
            self.num_failures += not is_good
            slow = move.plan.source if move.kind == "in" else move.plan.target
            self._judge(slow, is_good)
            if move.kind == "in":
                yield from self._finish_in(move, is_good, end.seconds)
                continue
            if is_good:
                self._costs.observe_copy(slow, len(move.plan.source_pages), end.seconds)
            target = self._tiers[move.plan.target]
            (target.written if is_good else target.fail)(move.keys)
            if move.kind == "down":
                host = self._tiers["host"]
                host.end_read(move.keys)
                host.evict(move.keys if is_good else ())
            else:
                self.num_pages_out += len(move.plan.source_pages) if is_good else 0
                self._memory.prefixes.release(move.pool_pages)
            if move.is_bad:
                self._drop_everywhere(move.keys)

    def holders(self) -> Iterator[Sequence[int]]:
        """Pages of the pool that moves hold, for integrity checks."""
        return (move.pool_pages for move in self._moves.values())

    def check_integrity(self) -> None:
        """Raises AssertionError if a tier's slot is lost or used twice."""
        for tier in self._tiers.values():
            tier.check_integrity()
            sizes = {1, self._num_state_pages or 1}
            assert {len(slots) for slots in tier.all_slots()} <= sizes, "a part of a state is kept, or more than one"
        moves_in = [move for move in self._moves.values() if move.kind == "in"]
        keys = [key for move in moves_in for key in move.keys]
        assert len(keys) == len(self._targets) and {*keys} == self._targets.keys(), "a page comes twice, or not at all"
        for move in moves_in:
            targets = [page for key in move.keys for page in self._targets[key]]
            assert targets == [*move.plan.target_pages] and len(targets) == len(move.plan.source_pages)
            assert len(move.depths) == len(move.keys)

    def _most_in(self, source: Tier) -> int:
        """The most pages that may be copied from this tier for one sequence now.

        The tier's copies under way are bounded by what it copies within a few steps. With fewer, copies would pause
        between steps; more would take pages from running sequences, and delay later sequences that need only a few. So
        one sequence gets half of what is left.
        """
        costs = self._costs.costs(source)
        max_pages = max(_LEAST_IN, int(_STEPS_AHEAD * costs.step_s / max(costs.copy_s, _LEAST_COPY_S)))
        moves = (move for move in self._moves.values() if move.kind == "in" and move.plan.source == source)
        num_left = max(0, max_pages - sum(len(move.plan.source_pages) for move in moves))
        return min(num_left, max(_PAGES_PER_MOVE, num_left // 2))

    def _judge(self, tier: Tier, is_good: bool) -> None:
        """Stops using a tier that failed several times in a row."""
        self._failures_in_a_row[tier] = 0 if is_good else self._failures_in_a_row[tier] + 1
        if self._failures_in_a_row[tier] == _MAX_FAILURES and self._tiers[tier].works:
            self._tiers[tier].works = False
            _log.error("the %s tier failed %d times in a row and is not used any more", tier, _MAX_FAILURES)

    def _drop_everywhere(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            for tier in self._tiers.values():
                tier.drop(key)

    def _finish_in(self, move: _Move, is_good: bool, seconds: float) -> Iterator[PageKey]:
        tier = self._tiers[move.plan.source]
        tier.end_read(move.keys)
        targets = [self._targets.pop(key) for key in move.keys]
        if is_good:
            self._costs.observe_copy(move.plan.source, len(move.plan.source_pages), seconds)
            self.num_pages_in += len(move.plan.source_pages)
        if is_good and not move.is_bad:
            for key, depth, pages in zip(move.keys, move.depths, targets, strict=True):
                if key == move.state:  # its worth is that of a copy, as long as the tier has it
                    self._memory.prefixes.insert_state(pages, key, depth, depth)
                else:
                    self._memory.prefixes.insert(pages[0], key, depth)
        elif move.is_bad:
            self._drop_everywhere(move.keys)
        else:
            for key in move.keys:
                tier.drop(key)
        self._memory.prefixes.release(move.pool_pages)
        yield from move.keys

    def _begin_out(self) -> None:
        name, tier = next(iter(self._tiers.items()))
        if not tier.works:
            self._offered.clear()
        # Pages that are being copied cannot be evicted, so a small pool copies fewer at once.
        max_pages = min(_PAGES_PER_MOVE, max(1, self._memory.allocator.num_pages // _LOW))
        while self._offered and sum(move.kind == "out" for move in self._moves.values()) < _MAX_MOVES_OUT:
            keys: list[PageKey] = []
            slots: list[int] = []
            pages: list[int] = []
            while self._offered and len(pages) < max_pages:
                key = next(iter(self._offered))
                going = self._memory.prefixes.pages_of(key)
                if going is None or key in tier or tier.is_coming(key):
                    del self._offered[key]  # the page was evicted before its turn
                    continue
                if pages and len(pages) + len(going) > max_pages:
                    break  # a state goes by itself
                reserved = tier.reserve(key, len(going))
                if reserved is None:
                    break
                del self._offered[key]
                keys.append(key)
                slots += reserved
                pages += going
            if not keys:
                return
            self._memory.prefixes.acquire(pages)
            self._begin("out", "device", tuple(pages), name, tuple(slots), keys).pool_pages = pages

    def _begin_down(self, host: TierSlots, disk: TierSlots) -> None:
        """Makes room in host memory before it is needed."""
        min_free = max(host.num_slots / _LOW, min(self._num_state_pages, host.num_slots))
        if host.num_free >= min_free or any(move.kind == "down" for move in self._moves.values()):
            return
        keys: list[PageKey] = []
        slots: list[int] = []
        for key in host.least_worth(2 * _PAGES_PER_MOVE):
            if len(slots) >= _PAGES_PER_MOVE:
                break
            if key in disk or disk.is_coming(key):
                continue
            reserved = disk.reserve(key, host.num_pages_of((key,)))
            if reserved is None:
                break
            keys.append(key)
            slots += reserved
        if keys:
            self._begin("down", "host", host.begin_read(keys), "disk", tuple(slots), keys)

    def _begin(
        self,
        kind: Literal["out", "down", "in"],
        source: Tier,
        source_pages: tuple[int, ...],
        target: Tier,
        target_pages: tuple[int, ...],
        keys: list[PageKey],
    ) -> _Move:
        self._number += 1
        plan = PageMove(self._number, source, source_pages, target, target_pages)
        self._planned.append(plan)
        self._moves[self._number] = _Move(kind, plan, keys)
        return self._moves[self._number]
