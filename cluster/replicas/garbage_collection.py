"""How seldom a replica searches its objects for garbage that is a cycle."""

from __future__ import annotations

import gc

# A search of the second generation goes through all that was made and kept since the one before: 25,000 objects at
# most, 2 ms. What survives it lives long, and a search of all objects, which takes 100 ms where thousands of sequences
# are under way, comes after a number of these searches that is hardly ever reached.
THRESHOLDS = (5_000, 4, 10_000)


def make_garbage_collection_rare() -> None:
    """What the interpreter does by itself must not hold up every stream of a replica."""
    gc.collect()
    gc.freeze()  # objects of libraries stay for ever, and need not be searched
    gc.set_threshold(*THRESHOLDS)
