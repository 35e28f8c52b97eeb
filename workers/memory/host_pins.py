"""Adapters that are never evicted from host memory, and which of them find room there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

FULL = "host memory of gangs is full of pins"


def kept_pins(free_bytes: int, waiting: Mapping[str, int]) -> list[str]:
    """Which pinned adapters that wait for room get it, in the order of digests; `waiting`: bytes by digest.

    Adapters that have room keep it.
    """
    kept = []
    for digest in sorted(waiting):
        if waiting[digest] <= free_bytes:
            free_bytes -= waiting[digest]
            kept.append(digest)
    return kept


class HostPins:
    """At most `max_bytes` of pinned adapters. Its owner locks it, and evicts nothing that is here."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._wanted: set[str] = set()
        self._kept: dict[str, torch.Tensor] = {}
        self._lacking: dict[str, None] = {}  # to be read from the store, in order of arrival
        self._without_room: dict[str, int] = {}  # bytes
        self._failed: dict[str, str] = {}  # reasons
        self._news: dict[str, str] = {}  # reasons that changed since the last report; empty: recovered
        self.num_bytes = 0

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def __contains__(self, digest: str) -> bool:
        return digest in self._wanted

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: str) -> torch.Tensor | None:
        return self._kept.get(digest)

    def add(self, digest: str) -> None:
        """Pins the adapter, which is to be read until `keep` gets it."""
        if digest not in self._wanted:
            self._wanted.add(digest)
            self._lacking[digest] = None

    def remove(self, digest: str) -> torch.Tensor | None:
        """Unpins the adapter, and returns what was kept of it. Others that had no room may now be read."""
        self._wanted.discard(digest)
        self._lacking.pop(digest, None)
        self._without_room.pop(digest, None)
        self._note_recovered(digest)
        packed = self._kept.pop(digest, None)
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
        self._kept[digest] = packed
        self.num_bytes += packed.nbytes
        self._note_recovered(digest)
        return True

    def lack_room(self, digest: str, num_bytes: int) -> None:
        """There is no room for a pinned adapter of `num_bytes`, which is to be read once there may be."""
        if digest in self._wanted:
            self._without_room[digest] = num_bytes
            self._note_failed(digest, FULL)

    def fail(self, digest: str, reason: str, *, again: bool) -> None:
        """A pinned adapter could not be read. `again`: retry after all others; else when a sequence loads it."""
        if digest in self._wanted and digest not in self._kept and digest not in self._without_room:
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
        assert self.num_bytes == sum(packed.nbytes for packed in self._kept.values()) <= self._max_bytes
        states = [*self._kept, *self._lacking, *self._without_room]
        assert len(states) == len(set(states)) and set(states) <= self._wanted
