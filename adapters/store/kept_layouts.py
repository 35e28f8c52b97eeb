"""Which layouts of packed files somebody still uses."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from .durable_file import make_folder

KEPT_S = 7 * 86_400.0


class KeptLayouts:
    """A file for each layout, whose time says when an application that packs so was last seen.

    Applications with other layouts may share a store, as an old and a new one do while clients move. So a layout is
    given up only when none has kept it for `KEPT_S`, and one that nobody has heard of counts from when it is found:
    whoever uses it may be of a version that keeps nothing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._own: set[str] = set()  # which stay, whatever clocks say

    def keep(self, keys: Iterable[str]) -> None:
        """Somebody uses these now. To be said again long before `KEPT_S` have passed."""
        own = set(keys)
        self._own |= own
        self._see(own)

    def is_given_up(self, key: str) -> bool:
        if key in self._own:
            return False
        try:
            return is_old(self._root / key)
        except FileNotFoundError:
            self._see({key})
            return False

    def _see(self, keys: Iterable[str]) -> None:
        make_folder(self._root)
        for key in keys:
            (self._root / key).touch()


def is_old(path: Path) -> bool:
    """Whether nobody has written the file for `KEPT_S`. Raises FileNotFoundError."""
    return time.time() - path.stat().st_mtime >= KEPT_S
