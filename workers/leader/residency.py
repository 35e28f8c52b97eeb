"""What lies in a gang's pool, and which adapters lie in its host memory, as routers are informed."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from ..wire.messages import ResidencyChange

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

    def apply(self, change: ResidencyChange) -> None:
        self.adapters.difference_update(change.went)
        self.adapters.update(change.came)
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
