"""Names of the served base that its folder tells."""

from __future__ import annotations

import json
from pathlib import Path


def names_of_folder(folder: Path) -> tuple[str, ...]:
    """The folder's path, and what its config.json was saved from, where that is written."""
    saved_from = json.loads((folder / "config.json").read_text("utf-8")).get("_name_or_path")
    return (str(folder), *([saved_from] if isinstance(saved_from, str) else []))
