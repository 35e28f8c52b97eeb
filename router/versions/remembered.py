"""Things of tenants' versions that are remembered, so many of each tenant."""

from __future__ import annotations

from typing import Generic, TypeVar

Place = tuple[str, str, int]  # tenant, name, version
_Value = TypeVar("_Value")


class Remembered(Generic[_Value]):
    """By version, the oldest first. A tenant that has too many loses its own oldest; all together lose theirs."""

    def __init__(self, most_of_tenant: int, most: int) -> None:
        self._most_of_tenant, self._most = most_of_tenant, most
        self.values: dict[Place, _Value] = {}
        self._of_tenant: dict[str, dict[Place, None]] = {}

    def put(self, place: Place, value: _Value) -> None:
        """It is the newest now, in place of what was remembered of this version."""
        self.drop(place)
        own = self._of_tenant.setdefault(place[0], {})
        self.values[place], own[place] = value, None
        if len(own) > self._most_of_tenant:
            self.drop(next(iter(own)))
        elif len(self.values) > self._most:
            self.drop(next(iter(self.values)))

    def drop(self, place: Place) -> None:
        """No-op if nothing is remembered of it."""
        if self.values.pop(place, self) is self:
            return
        own = self._of_tenant[place[0]]
        del own[place]
        if not own:
            del self._of_tenant[place[0]]
