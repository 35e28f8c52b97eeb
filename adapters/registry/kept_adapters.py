"""The registry's adapters that a router keeps: all of them if there are few, else those that are most used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..adapter import AdapterVersion
from .versions.rollout import rollout_of

Name = tuple[str, str]  # tenant, name
Order = tuple[int, int]  # of the records of a name
MAX_USES = 7  # what is remembered of an adapter's uses
MAX_LOOKS = 64  # adapters that are examined to make room for one
_MAX_ABSENT = 16_384
_MAX_SHARED_RANKS = 1_024


@dataclass(slots=True)
class _Kept:
    adapter: AdapterVersion
    uses: int = 0  # since it was last examined for eviction, at most MAX_USES


class KeptAdapters:
    """At most `capacity` adapters, and names of which it is known that there is no adapter.

    Once it is `whole`, a name that is not here does not exist. Until then it may be `filling`: all adapters are added
    page by page, and since a page may be older than an event, every event is kept. Both end when there are more
    adapters than `capacity`. Eviction is the clock algorithm with counts (GCLOCK): each use, up to MAX_USES, lets an
    adapter be passed over once. A name never goes back to an older record.
    """

    def __init__(self, capacity: int, *, filling: bool = False) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: at least one adapter is kept")
        self.capacity = capacity
        self.filling = filling
        self.whole = False
        self._entries: OrderedDict[Name, _Kept] = OrderedDict()  # in the order in which room is looked for
        self._absent: OrderedDict[Name, Order] = OrderedDict()  # name -> a record that is over; the newest last
        # Names that were looked up and had no version. Clients choose them, so their number is bounded; forgetting one
        # costs a lookup.
        self._unknown: OrderedDict[Name, None] = OrderedDict()
        self._shared_ranks: dict[tuple[tuple[str, int], ...], Mapping[str, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: Name) -> tuple[bool, AdapterVersion | None]:
        """Whether it is known what the name means, and its adapter; None: there is none. This is a use."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.uses = min(entry.uses + 1, MAX_USES)
            return True, entry.adapter
        return self.whole or self._is_absent(name), None

    def keep(self, name: Name, adapter: AdapterVersion | None) -> None:
        """What a lookup has found under a name; None: nothing."""
        if adapter is None:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._note_absent(name, entry.adapter.order)
            elif name not in self._absent:
                self._note_unknown(name)
        else:
            self._set(name, adapter)

    def add_page(self, adapters: Sequence[AdapterVersion]) -> bool:
        """Some of all adapters; whether it is still filling."""
        for adapter in adapters:
            if self.filling:
                self._set((adapter.tenant, adapter.name), adapter)
        return self.filling

    def end_filling(self) -> None:
        """All pages were added."""
        self.whole, self.filling = self.filling, False

    def set(self, adapter: AdapterVersion) -> str | None:
        """A name has a new record. It matters where the name is known. The digest that it has ceased to point to."""
        name = (adapter.tenant, adapter.name)
        before = self._entries.get(name)
        digest = None if before is None else before.adapter.digest
        if self.whole or self.filling or before is not None or self._is_absent(name):
            self._set(name, adapter)
        now = self._entries.get(name)
        if digest is None or now is None or digest == now.adapter.digest:
            return None
        return None if digest in rollout_of(now.adapter).digests_in_use() else digest

    def delete(self, name: Name, order: Order) -> str | None:
        """A name is gone, with its records up to this one. The digest that it has ceased to point to, if known."""
        entry = self._entries.get(name)
        if entry is None and not (self.whole or self.filling or self._is_absent(name)):
            return None
        if entry is not None and entry.adapter.order > order:
            return None  # an event that came late
        self._entries.pop(name, None)
        self._note_absent(name, order)
        return None if entry is None else entry.adapter.digest

    def names(self) -> list[Name]:
        return list(self._entries)

    def of(self, tenant: str) -> list[AdapterVersion]:
        """The tenant's adapters that are kept, sorted by name."""
        mine = [entry.adapter for (owner, _), entry in self._entries.items() if owner == tenant]
        return sorted(mine, key=lambda adapter: adapter.name)

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert len(self._entries) <= self.capacity
        assert max(len(self._absent), len(self._unknown)) <= _MAX_ABSENT
        for name, entry in self._entries.items():
            assert name == (entry.adapter.tenant, entry.adapter.name) and 0 <= entry.uses <= MAX_USES
            assert not self._is_absent(name), f"{name} is kept, and known to be absent"

    def _set(self, name: Name, adapter: AdapterVersion) -> None:
        entry = self._entries.get(name)
        if adapter.order <= self._absent.get(name, (0, 0)) or (entry and adapter.order < entry.adapter.order):
            return  # an event that came late
        self._absent.pop(name, None)
        self._unknown.pop(name, None)
        if entry is not None:
            entry.adapter = self._compact(adapter)
            return
        if len(self._entries) >= self.capacity:
            self._make_room()
        self._entries[name] = _Kept(self._compact(adapter))

    def _make_room(self) -> None:
        self.whole = self.filling = False
        for _ in range(MAX_LOOKS):
            name, entry = next(iter(self._entries.items()))
            if entry.uses == 0:
                break
            entry.uses -= 1
            self._entries.move_to_end(name)
        self._entries.popitem(last=False)

    def _is_absent(self, name: Name) -> bool:
        return name in self._absent or name in self._unknown

    def _note_unknown(self, name: Name) -> None:
        self._unknown[name] = None
        self._unknown.move_to_end(name)
        if len(self._unknown) > _MAX_ABSENT:
            self._unknown.popitem(last=False)

    def _note_absent(self, name: Name, order: Order) -> None:
        self._unknown.pop(name, None)
        self._absent[name] = max(order, self._absent.get(name, (0, 0)))
        self._absent.move_to_end(name)
        if len(self._absent) > _MAX_ABSENT:
            self._absent.popitem(last=False)
            self.filling = False  # a page that is yet to come may hold this very name

    def _compact(self, adapter: AdapterVersion) -> AdapterVersion:
        """The same facts, with the ranks that many adapters have alike as one object."""
        ranks = tuple(adapter.module_ranks.items())
        if ranks not in self._shared_ranks and len(self._shared_ranks) >= _MAX_SHARED_RANKS:
            self._shared_ranks.clear()
        adapter_ranks = self._shared_ranks.setdefault(ranks, adapter.module_ranks)
        return adapter if adapter_ranks is adapter.module_ranks else replace(adapter, module_ranks=adapter_ranks)
