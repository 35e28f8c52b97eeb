"""Names of bases, by which an adapter says what it was trained on. Shapes decide what can be computed, not these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from .errors import shown

_HUB_CACHE: Final = re.compile(r"models--(?:[^/]+?--)?([^/]+)")  # a folder in the hub's cache
_UNINFORMATIVE: Final = re.compile(
    r"\.{0,2}|~|(?:base|final|latest|merged|model|output|weights|checkpoint)s?|(?:base|final|merged)[-_]model"
    r"|(?:checkpoint|step|epoch)[-_]?[0-9]+|[0-9a-f]{32,}"
)


def base_name(path: str) -> str:
    """What a hub's name or a folder says of a base, in small letters; empty: nothing, as `./output` or `checkpoint-90`.

    The owner before a hub's name does not count: mirrors have others.
    """
    parts = path.strip().lower().replace("\\", "/").rstrip("/").split("/")
    for part in parts:
        if match := _HUB_CACHE.fullmatch(part):
            return match[1]
    name = parts[-1].rpartition("--")[2]  # owner--name, as downloads are kept
    return "" if _UNINFORMATIVE.fullmatch(name) else name


def names_of_folder(folder: Path) -> tuple[str, ...]:
    """The path of a base's folder, and what its config.json was saved from, where that is written."""
    saved_from = json.loads((folder / "config.json").read_text("utf-8")).get("_name_or_path")
    return (str(folder), *([saved_from] if isinstance(saved_from, str) else []))


class BaseNames:
    """The names of the served base."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted({base_name(name) for name in names} - {""})

    def mismatch(self, named: str) -> str | None:
        """What is wrong with an adapter that names this base; None: nothing, or one of them is unknown."""
        name = base_name(named)
        if not name or not self._names or name in self._names:
            return None
        return (
            f"the adapter was trained on {shown(named, 160)}, by base_model_name_or_path of its adapter_config.json, "
            f"and the base here is {' or '.join(self._names)}: on another base of the same shapes it answers nonsense"
        )
