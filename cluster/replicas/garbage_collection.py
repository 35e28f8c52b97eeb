"""How seldom a replica searches its objects for garbage that is a cycle."""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 1000)  # a search of all objects takes 100 ms where thousands of sequences are under way


def make_garbage_collection_rare() -> None:
    """What the interpreter does by itself must not hold up every stream of a replica."""
    gc.collect()
    gc.freeze()  # what the libraries made stays for good, and need not be searched
    gc.set_threshold(*THRESHOLDS)
