"""The pinned adapters that a router knows: each is kept in the host memory of a number of gangs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...adapter import AdapterVersion
from .rollout import rollout_of

Name = tuple[str, str]  # tenant, name
Pin = tuple[str, int]  # digest of the name's current version, gangs
_MARK: Final = b'"pinned_gangs"'


def pin_of(current: AdapterVersion) -> Pin | None:
    """The pin in the record of a name's current version; None: it is not pinned."""
    if _MARK not in current.rollout:  # nearly all records: not worth decoding
        return None
    num_gangs = rollout_of(current).pinned_gangs
    return (current.digest, num_gangs) if num_gangs else None


def read_pin(field: str, text: str) -> tuple[Name, Pin]:
    """The pin that a field and a value of PINS describe."""
    tenant, name = field.split("/", 1)
    digest, num_gangs = text.split(" ")
    return (tenant, name), (digest, int(num_gangs))


class KnownPins:
    """All pins. If several names pin the same content, the largest number of gangs counts."""

    def __init__(self) -> None:
        self._pins: dict[Name, Pin] = {}
        self._names: dict[str, set[Name]] = {}  # by digest
        self._changed: set[str] = set()

    def change(self, name: Name, pin: Pin | None) -> None:
        """Sets the name's pin; None: removes it."""
        before = self._pins.get(name)
        if before == pin:
            return
        if before is not None:
            names = self._names[before[0]]
            names.discard(name)
            if not names:
                del self._names[before[0]]
            del self._pins[name]
            self._changed.add(before[0])
        if pin is not None:
            self._pins[name] = pin
            self._names.setdefault(pin[0], set()).add(name)
            self._changed.add(pin[0])

    def replace(self, pins: Mapping[Name, Pin]) -> None:
        """Replaces all pins by these."""
        for name in [name for name in self._pins if name not in pins]:
            self.change(name, None)
        for name, pin in pins.items():
            self.change(name, pin)

    def num_gangs(self, digest: str) -> int:
        """How many gangs must keep the adapter; 0: it is not pinned."""
        return max((self._pins[name][1] for name in self._names.get(digest, ())), default=0)

    def take_changed(self) -> set[str]:
        """Digests whose pins may have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert {name for names in self._names.values() for name in names} == set(self._pins)
        assert all(self._pins[name][0] == digest for digest, names in self._names.items() for name in names)
