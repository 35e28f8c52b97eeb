"""Which adapters are pinned, which means kept in the host memory of a number of gangs, as a router knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...adapter import AdapterVersion
from .rollout import rollout_of

Name = tuple[str, str]  # tenant, name
Pin = tuple[str, int]  # digest of the name's current version, gangs
_MARK: Final = b'"pinned_gangs"'


def pin_of(current: AdapterVersion) -> Pin | None:
    """What the record that a current version was read from says."""
    if _MARK not in current.rollout:  # as of nearly all
        return None
    num_gangs = rollout_of(current).pinned_gangs
    return (current.digest, num_gangs) if num_gangs else None


def read_pin(field: str, text: str) -> tuple[Name, Pin]:
    """The pin that a field and a value of PINS describe."""
    tenant, name = field.split("/")
    digest, num_gangs = text.split(" ")
    return (tenant, name), (digest, int(num_gangs))


class KnownPins:
    """All pins. Several names may pin the same content: the one that asks for most gangs decides."""

    def __init__(self) -> None:
        self._pins: dict[Name, Pin] = {}
        self._names: dict[str, set[Name]] = {}  # by digest
        self._changed: set[str] = set()

    def change(self, name: Name, pin: Pin | None) -> None:
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
        """These are all."""
        for name in [name for name in self._pins if name not in pins]:
            self.change(name, None)
        for name, pin in pins.items():
            self.change(name, pin)

    def num_gangs(self, digest: str) -> int:
        """That are to keep the adapter; 0: it is not pinned."""
        return max((self._pins[name][1] for name in self._names.get(digest, ())), default=0)

    def take_changed(self) -> set[str]:
        """Digests whose pins may have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert {name for names in self._names.values() for name in names} == set(self._pins)
        assert all(self._pins[name][0] == digest for digest, names in self._names.items() for name in names)
