"""What is remembered of versions that failed lately."""

from __future__ import annotations

from typing import Generic, TypeVar

VersionKey = tuple[str, str, int]  # tenant, name, version
_Value = TypeVar("_Value")


class RecentFailures(Generic[_Value]):
    """Values by version, the oldest first. Beyond its bound, a tenant, or all together, lose their oldest."""

    def __init__(self, max_of_tenant: int, max_in_all: int) -> None:
        self._max_of_tenant = max_of_tenant
        self._max_in_all = max_in_all
        self.values: dict[VersionKey, _Value] = {}
        self._of_tenant: dict[str, dict[VersionKey, None]] = {}

    def put(self, key: VersionKey, value: _Value) -> None:
        """Replaces the version's value, and makes it the newest."""
        self.drop(key)
        own = self._of_tenant.setdefault(key[0], {})
        self.values[key], own[key] = value, None
        if len(own) > self._max_of_tenant:
            self.drop(next(iter(own)))
        elif len(self.values) > self._max_in_all:
            self.drop(next(iter(self.values)))

    def drop(self, key: VersionKey) -> None:
        """No-op for an unknown version."""
        if self.values.pop(key, self) is self:
            return
        own = self._of_tenant[key[0]]
        del own[key]
        if not own:
            del self._of_tenant[key[0]]
