"""The tokenizer of a model folder, read by transformers, which does without torch for it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def load_tokenizer(folder: Path) -> Any:
    """A tokenizer of transformers with a `tokenizers` backend. Blocking; runs no code from the folder.

    Raises ValueError for a folder without one.
    """
    from transformers import AutoTokenizer  # takes a second: call this in a thread

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be loaded (tokenizer.json is needed): {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{folder} has no tokenizer.json: only tokenizers with one are served")
    return tokenizer


def import_transformers_without_torch() -> None:
    """Imports transformers so that it finds no torch: for processes that want its tokenizers only.

    Otherwise `AutoTokenizer` alone imports torch and model code: 2.4 s of CPU and 300 MB. Transformers looks for torch
    once, so that it offers no models in this process afterwards. Where torch or transformers is loaded already, there
    is nothing to save, and nothing changes.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    _log.info("importing transformers without torch, which its tokenizers do not need")
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes the import fail
    try:
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]
