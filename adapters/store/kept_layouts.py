"""Which layouts of packed files are still in use."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from .durable_file import make_folder

KEPT_S = 7 * 86_400.0


class KeptLayouts:
    """A file for each layout, whose time says when an application last used the layout.

    Applications with different layouts may share a store, as an old and a new one do during an upgrade. So a layout is
    given up only when no application has used it for `KEPT_S`. An unknown layout counts from when it is found, since an
    application of an older version records nothing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._own: set[str] = set()  # which stay, whatever clocks say

    def keep(self, keys: Iterable[str]) -> None:
        """These are in use now. To be called again long before `KEPT_S` have passed."""
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
    """Whether the file was last written more than `KEPT_S` ago. Raises FileNotFoundError."""
    return time.time() - path.stat().st_mtime >= KEPT_S
