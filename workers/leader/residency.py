"""What lies in a gang's pool, and which adapters lie in its host memory, as routers are informed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Final

from ..wire.messages import ResidencyChange

_MAX_COUNTED: Final = 128  # adapters whose loads and evictions are counted
_NO_CHANGE: Final = ResidencyChange()


class Residency:
    """Adapters by digest and full pages of KV by short key, those on their way into the pool included.

    Adapters in host memory, and pins that failed, by short digest.
    """

    def __init__(self) -> None:
        self.adapters: set[str] = set()
        self.pages: set[int] = set()
        self.hosted: set[int] = set()
        self.failed_pins: dict[int, str] = {}  # reasons
        self.num_loads: Counter[str] = Counter()  # by digest; beyond _MAX_COUNTED the least loaded are forgotten
        self.num_evictions: Counter[str] = Counter()  # of the digests in `num_loads`

    def apply(self, change: ResidencyChange) -> None:
        self.adapters.difference_update(change.went)
        self.adapters.update(change.came)
        self.num_loads.update(change.came)
        self.num_evictions.update(digest for digest in change.went if digest in self.num_loads)
        if len(self.num_loads) > _MAX_COUNTED:
            self.num_loads = Counter(dict(self.num_loads.most_common(_MAX_COUNTED // 2)))
            self.num_evictions = Counter({one: self.num_evictions[one] for one in self.num_loads})
        self.pages.difference_update(change.pages_went)
        self.pages.update(change.pages_came)
        self.hosted.difference_update(change.hosted_went)
        self.hosted.update(change.hosted_came)
        for short, reason in change.pin_news.items():
            if reason:
                self.failed_pins[short] = reason
            else:
                self.failed_pins.pop(short, None)

    def change_of(
        self,
        adapters: AbstractSet[str],
        pages: AbstractSet[int],
        hosted: AbstractSet[int] = frozenset(),
        pins: AbstractSet[int] = frozenset(),
    ) -> ResidencyChange:
        """Which of these are there now, and which are not; of `pins`, why they failed if they have."""
        if not (adapters or pages or hosted or pins):  # as after most steps
            return _NO_CHANGE
        return ResidencyChange(
            sorted(adapters & self.adapters),
            sorted(adapters - self.adapters),
            [*(pages & self.pages)],
            [*(pages - self.pages)],
            [*(hosted & self.hosted)],
            [*(hosted - self.hosted)],
            {short: self.failed_pins.get(short, "") for short in pins},
        )
