"""Whether two kinds of requests can be distinguished by the processor's time that they take.

What a request waits for hides a hundred times as much on a busy machine; but a request that waits once more, or looks
up one thing more, computes more too.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence

Ask = Callable[[], Awaitable[None]]


async def differences(pairs: Sequence[tuple[Ask, Ask]]) -> list[float]:
    """How much more each first one takes than the second beside it, in seconds. Which goes first is drawn."""
    found = []
    gc.disable()
    try:
        for pair in pairs:
            order = random.sample((0, 1), 2)
            times = [0.0, 0.0]
            for which in order:
                began = time.process_time()
                await pair[which]()
                times[which] = time.process_time() - began
            found.append(times[0] - times[1])
    finally:
        gc.enable()
    return found


def z_of(differences: Sequence[float]) -> float:
    """Of Wilcoxon's signed-rank test: some busy moments of the machine weigh no more than their rank."""
    ranked = sorted((one for one in differences if one), key=abs)
    count = len(ranked)
    above = sum(rank for rank, one in enumerate(ranked, 1) if one > 0)
    spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return (above - count * (count + 1) / 4) / spread if count else 0.0
