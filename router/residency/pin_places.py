"""Which gangs keep a pinned adapter: a function of the adapter and the gangs, so that all routers agree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from hashlib import blake2b


def places_of(digest: str, gangs: Iterable[str], num: int) -> list[str]:
    """`num` of these gangs, or all if there are fewer: those of the highest weights, in descending order.

    Highest random weight (Thaler and Ravishankar 1998): when a gang leaves, only its adapters move; when one joins,
    only those that it gets.
    """
    return [gang for _, gang in _heaviest(digest, gangs, num)]


def _weight(digest: str, gang: str) -> tuple[int, str]:
    return int.from_bytes(blake2b(f"{digest} {gang}".encode(), digest_size=8).digest()), gang


def _heaviest(digest: str, gangs: Iterable[str], num: int) -> list[tuple[int, str]]:
    return sorted([_weight(digest, gang) for gang in gangs], reverse=True)[:num]


class PinPlaces:
    """The places of all pins, updated as pins and gangs change. A new gang costs one weight for each pin."""

    def __init__(self) -> None:
        self._nums: dict[str, int] = {}  # gangs that must keep each digest
        self._places: dict[str, list[tuple[int, str]]] = {}  # by digest, the highest weight first
        self._at: dict[str, set[str]] = {}  # digests, by gang
        self._changes: dict[str, dict[str, bool]] = {}  # not taken yet, by gang: digest -> whether to keep it

    @property
    def gangs(self) -> Set[str]:
        return self._at.keys()

    def pin(self, digest: str, num_gangs: int) -> None:
        """Pins the adapter at `num_gangs`; 0: it is not pinned any more."""
        if num_gangs:
            self._nums[digest] = num_gangs
            self._place(digest, _heaviest(digest, self._at, num_gangs))
        elif self._nums.pop(digest, None) is not None:
            self._place(digest, [])
            del self._places[digest]

    def set_gangs(self, gangs: Collection[str]) -> None:
        """Sets the gangs that there are, and moves the pins of gangs that have gone."""
        gone, new = self._at.keys() - set(gangs), sorted(set(gangs) - self._at.keys())
        moved = {digest for gang in gone for digest in self._at[gang]}
        for gang in gone:
            del self._at[gang]
            self._changes.pop(gang, None)
        for gang in new:
            self._at[gang] = set()
        for digest, num in self._nums.items():
            if digest in moved:
                self._place(digest, _heaviest(digest, self._at, num))
            elif new:
                places, weights = self._places[digest], _heaviest(digest, new, num)
                if len(places) < num or weights[0] > places[-1]:
                    self._place(digest, sorted([*places, *weights], reverse=True)[:num])

    def at(self, gang: str) -> Set[str]:
        """Digests of the pins that the gang must keep."""
        return self._at.get(gang, set())

    def of(self, digest: str) -> list[str]:
        """The gangs that must keep the adapter."""
        return [gang for _, gang in self._places.get(digest, ())]

    def take_changes(self, gang: str) -> dict[str, bool]:
        """Digests that the gang must keep (True) or may drop (False) since the last call."""
        return self._changes.pop(gang, {})

    def _place(self, digest: str, places: list[tuple[int, str]]) -> None:
        before, now = set(self.of(digest)), {gang for _, gang in places}
        self._places[digest] = places
        for gang in before - now:
            if gang in self._at:
                self._at[gang].discard(digest)
                self._changes.setdefault(gang, {})[digest] = False
        for gang in now - before:
            self._at[gang].add(digest)
            self._changes.setdefault(gang, {})[digest] = True

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for digest, num in self._nums.items():
            assert self.of(digest) == places_of(digest, self._at, num)
        assert self._places.keys() == self._nums.keys()
        for gang, digests in self._at.items():
            assert digests == {digest for digest in self._nums if gang in self.of(digest)}
