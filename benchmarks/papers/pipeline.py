"""NanoFlow's pipeline (arXiv 2408.12757 §4.1): how nano-batches of Llama-2-70B would share eight A100 80GB.

By the paper's own numbers: operations take what its table 2 measured at 2,048 rows, operations that share a device do
what its table 3 says, and a product that is split in two takes 13.2 % longer. Sizes and order are searched first, then
the shares. The published split, 768 and 1,280 rows, goes through the same second stage. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from motet.benchmarks.papers.nanoflow import PARAMETERS
from motet.benchmarks.papers.pipeline_drawing import draw
from motet.benchmarks.papers.pipeline_search import (
    Layer,
    Performance,
    Schedule,
    Work,
    find_shares,
    find_sizes,
    in_sequence,
    shortest_ms,
)
from motet.workers.costs.balance import most_tokens_per_s

NUM_ROWS, NUM_LAYERS, DEGREE = 2048, 80, 8
NUM_BATCHES, PUBLISHED_SIZES = 2, (768, 1280)
SPLIT_COST = 0.132  # more time for a product in two parts
MEASURED_MS = {  # of all layers, table 2
    "KQV": 16.08,
    "DecAttn": 35.60,
    "PfAttn": 4.56,
    "O": 16.01,
    "UG": 69.92,
    "D": 34.96,
    "Net": 47.92,
}
OPTIMUM = most_tokens_per_s(260e12, PARAMETERS)  # tokens/s of a GPU, as the paper has it
PUBLISHED = {
    "one after the other": 1106,
    "split, one after the other": 982,
    "overlapped": 1323,
}  # figure 9, 512 and 512


def _table(known: dict[float, float]) -> tuple[tuple[float, float], ...]:
    """Every tenth of the device; what is not published lies on a line between its neighbours."""
    found = []
    for tenth in range(1, 11):
        share = tenth / 10
        below = max(one for one in known if one <= share)
        above = min(one for one in known if one >= share)
        part = (share - below) / (above - below) if above > below else 0.0
        found.append((share, round(known[below] + part * (known[above] - known[below]), 4)))
    return tuple(found)


# Table 3, and "0.4 ... reaches 80 % of maximum decode attention performance" (§4.1.4).
PERFORMANCE: Performance = {
    "compute": _table({0.1: 0.1, 1.0: 1.0}),
    "memory": _table({0.1: 0.2, 0.2: 0.3, 0.4: 0.8, 0.8: 0.85, 0.9: 0.95, 1.0: 1.0}),
    "network": _table({0.1: 0.3, 0.2: 0.5, 0.8: 0.9, 0.9: 1.0, 1.0: 1.0}),
}


def measured_layer(num_pieces: int = 1) -> Layer:
    """`num_pieces`: of a nano-batch's KQV and decode attention. motet's two all-reduces send what the paper's three
    collectives do. Decodes and prompt tokens are spread evenly over the rows."""

    def product(name: str, *after: str, num_pieces: int = 1) -> Work:
        whole_ms = MEASURED_MS[name] / NUM_LAYERS
        return Work(name, "compute", SPLIT_COST * whole_ms, (1 - SPLIT_COST) * whole_ms / NUM_ROWS, after, num_pieces)

    row_ms = {name: whole_ms / NUM_LAYERS / NUM_ROWS for name, whole_ms in MEASURED_MS.items()}
    return Layer(
        (
            product("KQV", num_pieces=num_pieces),
            Work("DecAttn", "memory", 0.0, row_ms["DecAttn"], ("KQV",), num_pieces),
            Work("PfAttn", "compute", 0.0, row_ms["PfAttn"], ("KQV",)),
            product("O", "DecAttn", "PfAttn"),
            Work("O.AR", "network", 0.0, row_ms["Net"] / 2, ("O",)),
            product("UG", "O.AR"),
            product("D", "UG"),
            Work("D.AR", "network", 0.0, row_ms["Net"] / 2, ("D",)),
        )
    )


def tokens_per_s(schedule: Schedule) -> float:
    """Of a GPU."""
    return sum(schedule.sizes) / (schedule.period_ms * NUM_LAYERS / 1e3) / DEGREE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each search of shares (default 60)")
    parser.add_argument("--svg", type=Path, help="writes a picture of the best schedule")
    arguments = parser.parse_args()
    layer = measured_layer()
    alone = find_sizes(layer, NUM_ROWS, NUM_BATCHES, arguments.limit_s)
    shared = {
        sizes: find_shares(layer, sizes, PERFORMANCE, alone, arguments.limit_s)
        for sizes in dict.fromkeys((PUBLISHED_SIZES, alone.sizes))
    }
    best = min(shared.values(), key=lambda one: one.period_ms)
    broken = [*alone.violations(), *(each for one in shared.values() for each in one.violations(PERFORMANCE))]
    assert not broken, broken
    sequence = in_sequence(layer, (NUM_ROWS,))
    shown = {
        "one after the other": sequence,
        "split, one after the other": in_sequence(layer, PUBLISHED_SIZES),
        "as if alone": alone,
    }
    print(f"{'':26} {'rows':>10} {'ms':>6} {'tokens/s':>8} of the optimum")
    for name, one in [*shown.items(), *(("shares found", one) for one in shared.values())]:
        rate = tokens_per_s(one)
        print(f"{name:26} {'+'.join(map(str, one.sizes)):>10} {one.period_ms:6.3f} {rate:8.0f} {rate / OPTIMUM:.3f}")
    shortest = shortest_ms(layer, best.sizes, PERFORMANCE)
    print(f"no schedule of {best.sizes} rows is shorter than {shortest:.3f} ms")
    if arguments.svg is not None:
        arguments.svg.write_text(draw(best))
    summary = {
        "sizes": best.sizes,
        "layer_ms": round(best.period_ms, 4),
        "over_published_split": round(shared[PUBLISHED_SIZES].period_ms / best.period_ms, 4),
        "over_sequence": round(sequence.period_ms / best.period_ms, 3),
        "over_shortest": round(best.period_ms / shortest, 3),
        "tokens_per_s": round(tokens_per_s(best)),
        "share_of_optimum": round(tokens_per_s(best) / OPTIMUM, 3),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
