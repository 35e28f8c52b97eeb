"""What the interpreter does by itself must not hold up every stream of a replica."""

from __future__ import annotations

import gc
import sys

# A search of the second generation goes through all that was made and kept since the one before: 25,000 objects at
# most, 2 ms. What survives it lives long, and a search of all objects, which takes 100 ms where thousands of sequences
# are under way, comes after a number of these searches that is hardly ever reached.
THRESHOLDS = (5_000, 4, 10_000)
# After which a thread that renders, tokenizes or plans gives way to the one that answers or computes.
SWITCH_INTERVAL_S = 0.0005


def keep_pauses_short() -> None:
    """Makes garbage collection rare and turns of threads short, once the replica has been built."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # objects of libraries stay for ever, and need not be searched
    gc.set_threshold(*THRESHOLDS)
