"""Packed adapters in host memory, between the store on disk and the pool."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch

from ...adapters.errors import AdapterError
from ...adapters.format.tensor_file import Tensor
from ...adapters.packing.layout import AdapterLayout
from ...adapters.packing.packed_file import PagesPart
from ...adapters.store.store import AdapterStore
from ...kernels.pages import write_pages
from .page_arrays import PinnedArena

# Adapters that are never evicted from host memory, and which of them find room there.

FULL = "host memory of gangs is full of pins"


def kept_pins(free_bytes: int, waiting: Mapping[str, int]) -> list[str]:
    """Which pinned adapters that wait for room get it, in the order of digests; `waiting`: bytes by digest.

    Adapters that have room keep it.
    """
    digests = []
    for digest in sorted(waiting):
        if waiting[digest] <= free_bytes:
            free_bytes -= waiting[digest]
            digests.append(digest)
    return digests


class HostPins:
    """At most `max_bytes` of pinned adapters. Its owner locks it, and evicts nothing that is here."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._digests: set[str] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        self._lacking: dict[str, None] = {}  # to be read from the store, in order of arrival
        self._without_room: dict[str, int] = {}  # bytes
        self._failed: dict[str, str] = {}  # reasons
        self._news: dict[str, str] = {}  # reasons that changed since the last report; empty: recovered
        self.num_bytes = 0

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._tensors)

    def find(self, digest: str) -> torch.Tensor | None:
        return self._tensors.get(digest)

    def add(self, digest: str) -> None:
        """Pins the adapter, which is to be read until `keep` gets it."""
        if digest not in self._digests:
            self._digests.add(digest)
            self._lacking[digest] = None

    def remove(self, digest: str) -> torch.Tensor | None:
        """Unpins the adapter, and returns what was kept of it. Others that had no room may now be read."""
        self._digests.discard(digest)
        self._lacking.pop(digest, None)
        self._without_room.pop(digest, None)
        self._note_recovered(digest)
        packed = self._tensors.pop(digest, None)
        if packed is not None:
            self.num_bytes -= packed.nbytes
            for other in kept_pins(self._max_bytes - self.num_bytes, self._without_room):
                del self._without_room[other]
                self._lacking[other] = None
                self._note_recovered(other)
        return packed

    def keep(self, digest: str, packed: torch.Tensor) -> bool:
        """Keeps a pinned adapter. False: there is no room for it among the pins."""
        self._lacking.pop(digest, None)
        if not kept_pins(self._max_bytes - self.num_bytes, {digest: packed.nbytes}):
            self.lack_room(digest, packed.nbytes)
            return False
        self._without_room.pop(digest, None)
        self._tensors[digest] = packed
        self.num_bytes += packed.nbytes
        self._note_recovered(digest)
        return True

    def lack_room(self, digest: str, num_bytes: int) -> None:
        """There is no room for a pinned adapter of `num_bytes`, which is to be read once there may be."""
        if digest in self._digests:
            self._without_room[digest] = num_bytes
            self._note_failed(digest, FULL)

    def fail(self, digest: str, reason: str, *, again: bool) -> None:
        """A pinned adapter could not be read. `again`: retry after all others; else when a sequence loads it."""
        if digest in self._digests and digest not in self._tensors and digest not in self._without_room:
            self._note_failed(digest, reason)
            if again:
                self._lacking[digest] = None

    def take_lacking(self) -> str | None:
        """Removes and returns the next adapter to read; None: there is none."""
        digest = next(iter(self._lacking), None)
        if digest is not None:
            del self._lacking[digest]
        return digest

    def take_news(self) -> dict[str, str]:
        """Reasons of pins that have failed since the last call; empty for those that have recovered."""
        news, self._news = self._news, {}
        return news

    def _note_failed(self, digest: str, reason: str) -> None:
        if self._failed.get(digest) != reason:
            self._failed[digest] = self._news[digest] = reason

    def _note_recovered(self, digest: str) -> None:
        if self._failed.pop(digest, None) is not None:
            self._news[digest] = ""

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.num_bytes == sum(packed.nbytes for packed in self._tensors.values()) <= self._max_bytes
        states = [*self._tensors, *self._lacking, *self._without_room]
        assert len(states) == len(set(states)) and set(states) <= self._digests


PART_BYTES = 16 << 20  # of an adapter that is read in parts; smaller ones are read whole


class HostAdapterCache:
    """Keeps at most `max_bytes`; evicts the least recently used first. For several threads.

    Pinned adapters are never evicted, but take at most half of it. An adapter larger than `max_bytes` is never here as
    a whole: its pages are read in parts.
    """

    def __init__(
        self, store: AdapterStore, layout: AdapterLayout, max_bytes: int, arena: PinnedArena | None = None
    ) -> None:
        """`arena`: pinned memory of this size, from which a GPU copies while it computes; None: plain memory."""
        self._store, self._layout, self._max_bytes, self._arena = store, layout, max_bytes, arena
        self._packed: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._pins = HostPins(max_bytes // 2)
        self._read_for_pin: str | None = None
        self._lock = threading.Lock()
        self._moved: dict[str, None] = {}  # digests added or removed since the last take_changes()
        self.num_bytes = 0
        self.num_reads = 0  # from the store

    def find(self, digest: str) -> torch.Tensor | None:
        """The adapter as pages, `[num_pages, num_layers, slab]`; None: it is not in host memory."""
        with self._lock:
            packed = self._packed.get(digest)
            if packed is None:
                return self._pins.find(digest)
            self._packed.move_to_end(digest)
            return packed

    def part(self, start: int, num_pages: int) -> PagesPart | None:
        """What to read of an adapter of `num_pages` from page `start` on; None: it is small enough to be read whole."""
        page_bytes = self._layout.page_bytes
        if num_pages * page_bytes <= max(self._max_bytes, PART_BYTES):
            return None
        return PagesPart(start, min(start + max(PART_BYTES // page_bytes, 1), num_pages), num_pages)

    def get_part(self, part: PagesPart, digest: str) -> torch.Tensor:
        """Some pages of an adapter, read from the store. Parts are read in order. Raises as `get`."""
        if part.start == 0:
            with self._lock:
                self.num_reads += 1
        return as_torch(self._store.load_part(digest, self._layout, part))

    def get_pinned(self, digest: str) -> torch.Tensor:
        """As `get`, but an adapter without room among the pins is not read. Raises AdapterError then."""
        num_bytes = self._store.packed_bytes(digest, self._layout)
        if num_bytes > max(self._max_bytes // 2, PART_BYTES):
            with self._lock:
                self._pins.lack_room(digest, num_bytes)
            raise AdapterError(FULL)
        return self.get(digest)

    def get(self, digest: str) -> torch.Tensor:
        """As `find`, or read from the store. Raises AdapterCorrupt if the copy there is bad, or StoreUnavailable."""
        packed = self.find(digest)
        if packed is None:
            packed = as_torch(self._store.load_packed(digest, self._layout))
            room = None if self._arena is None else self._room(self._arena, digest, packed)
            if room is not None:
                write_pages(room, range(len(packed)), packed)
                packed = room
            with self._lock:
                self.num_reads += 1
                if self._arena is None or room is not None or digest in self._pins:  # pins are kept in any memory
                    self._keep(digest, packed)
        return packed

    def forget(self, digest: str) -> None:
        """Drops the adapter, if it is here and not pinned."""
        with self._lock:
            dropped = self._packed.pop(digest, None)
            if dropped is not None:
                self.num_bytes -= dropped.nbytes
                self._moved[digest] = None

    def pin(self, changes: Mapping[str, bool]) -> None:
        """Pins (True) and unpins adapters."""
        with self._lock:
            for digest, is_pinned in changes.items():
                if is_pinned:
                    self._pins.add(digest)
                    self._pin_if_here(digest)
                elif (packed := self._pins.remove(digest)) is not None:
                    self._packed[digest] = packed

    def next_to_pin(self) -> str | None:
        """The next pinned adapter to read, once the one before has been read; None: there is none."""
        with self._lock:
            self._read_for_pin = self._pins.take_lacking()
            while self._read_for_pin is not None and self._pin_if_here(self._read_for_pin):
                self._read_for_pin = self._pins.take_lacking()
            return self._read_for_pin

    def fail_pin(self, digest: str, reason: str, *, again: bool) -> None:
        """A pinned adapter could not be read. `again`: retry it after all others."""
        with self._lock:
            self._pins.fail(digest, reason, again=again)

    @property
    def num_pinned_bytes(self) -> int:
        """Of `num_bytes`, those of pinned adapters."""
        return self._pins.num_bytes

    def take_pin_news(self) -> dict[str, str]:
        """Reasons of pins that have failed since the last call; empty for those that have recovered."""
        if not self._pins.has_news:
            return {}
        with self._lock:
            return self._pins.take_news()

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        with self._lock:
            self._pins.check_integrity()
            assert self.num_bytes == sum(packed.nbytes for packed in self._packed.values()) + self._pins.num_bytes
            assert self.num_bytes <= self._max_bytes
            assert not any(self._pins.find(digest) is not None for digest in self._packed)

    def take_changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Digests added, and digests removed, since the last call."""
        if not self._moved:  # as after nearly every step
            return (), ()
        with self._lock:
            moved, self._moved = self._moved, {}
            cached_digests = {d for d in moved if d in self._packed or self._pins.find(d) is not None}
            return tuple(d for d in moved if d in cached_digests), tuple(d for d in moved if d not in cached_digests)

    def _pin_if_here(self, digest: str) -> bool:
        """Moves a pinned adapter to the pins if it is here and fits. True: it is here."""
        packed = self._packed.get(digest)
        if packed is not None and self._pins.keep(digest, packed):
            del self._packed[digest]
        return packed is not None

    def _room(self, arena: PinnedArena, digest: str, packed: torch.Tensor) -> torch.Tensor | None:
        """A run of pages of the arena for this adapter, for which others are evicted; None: there is none.

        So for an adapter larger than the arena, and while evicted ones are still being copied. It is then copied from
        plain memory, for which only the loader's thread waits, and not kept.
        """
        while packed.nbytes <= self._max_bytes:
            room = arena.take(len(packed))
            with self._lock:
                fits_pins = self._pins.num_bytes + packed.nbytes <= self._max_bytes // 2
                if room is not None or not self._packed or (digest == self._read_for_pin and not fits_pins):
                    return room
                self._drop_oldest()
        return None

    def _keep(self, digest: str, packed: torch.Tensor) -> None:
        if digest in self._packed or self._pins.find(digest) is not None:  # another thread may have read it meanwhile
            return
        if not (digest in self._pins and self._pins.keep(digest, packed)):
            if packed.nbytes > self._max_bytes - self._pins.num_bytes or digest == self._read_for_pin:
                return  # it was read only to be pinned, and must evict nothing
            self._packed[digest] = packed
        self.num_bytes += packed.nbytes
        self._moved[digest] = None
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        digest, dropped = self._packed.popitem(last=False)
        self.num_bytes -= dropped.nbytes
        self._moved[digest] = None


def as_torch(tensor: Tensor) -> torch.Tensor:
    """The same memory for torch, which knows numpy's bfloat16 only by its bytes."""
    raw = torch.from_numpy(tensor.reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, tensor.dtype.name)).view(tensor.shape)
