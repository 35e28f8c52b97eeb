"""Which adapters stay: how many requests find theirs in the pool, while popularity changes and versions come.

A simulation through the real adapter cache and idle order. `unaged` counts uses for ever, as GreedyDual-Size-Frequency
does by itself; LRU evicts what was idle longest. With hints the gang learns which adapters no name points to any more.
"""

from __future__ import annotations

import argparse
import json
import math
from unittest.mock import patch

from motet.benchmarks.rigs.churn import CHURN, Churn, LeastRecent, hit_rate
from motet.workers.memory import page_allocator
from motet.workers.memory.page_allocator import IdleOrder


def hit_rates(churn: Churn, num_requests: int) -> dict[str, float]:
    """By the name of what decides, the ratio of requests that find their adapter."""
    rates = {
        "motet": hit_rate(IdleOrder, churn, num_requests, hints=True),
        "without hints": hit_rate(IdleOrder, churn, num_requests, hints=False),
    }
    with patch.multiple(page_allocator, HALF_LIFE=math.inf, MOST=math.inf):
        rates["unaged"] = hit_rate(IdleOrder, churn, num_requests, hints=False)
    rates["LRU"] = hit_rate(LeastRecent, churn, num_requests, hints=False)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=80_000, help="of each kind of traffic (default 80000)")
    arguments = parser.parse_args()
    least = math.inf
    for number, (name, churn) in enumerate(CHURN.items()):
        rates = hit_rates(churn, arguments.requests)
        if not number:
            print(f"{'traffic':14}" + "".join(f"{decider:>15}" for decider in rates))
        print(f"{name:14}" + "".join(f"{rate:15.1%}" for rate in rates.values()), flush=True)
        least = min(least, rates["motet"] / max(rates["unaged"], rates["LRU"]))
    print(json.dumps({"benchmark": "adapter_churn", "motet_over_best_least": round(least, 3)}))


if __name__ == "__main__":
    main()
