"""Which steps are faster in two nano-batches, by what a gang's steps of some sizes took both ways.

A gang's workers add up partial sums after each half of a layer. With all rows in one batch they compute, then wait for
the network. With two nano-batches one computes while the other's sum is under way (NanoFlow, arXiv 2408.12757). But
products read their weights twice, and what the network takes of the CPU is computed slower, not hidden.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

ROW_MULTIPLE = 32  # of the first nano-batch: two tiles of a CPU's matrix unit, half a tile of a GPU's
LEAST_ROWS = 256  # of a step that is split: with fewer, reading weights twice took most of what was hidden
LEAST_GAIN = 1.2  # of a step's predicted time over that of its nano-batches; what is measured varies by some hundredths


def first_rows(num_rows: int) -> int:
    """Rows of the first nano-batch of a step of at least two: half of them, in whole tiles where there are several."""
    if num_rows < 2 * ROW_MULTIPLE:
        return num_rows // 2
    return (num_rows + ROW_MULTIPLE) // (2 * ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps of one base on one gang, by rows; both have the same sizes, one at least."""

    whole: Mapping[int, float]
    split: Mapping[int, float]  # in nano-batches

    def gain(self, num_rows: int) -> float:
        """Predicted time of a step over that of its nano-batches."""
        return _on_lines(self.whole, num_rows) / _on_lines(self.split, num_rows)


def _on_lines(measured: Mapping[int, float], num_rows: int) -> float:
    """Between what was measured on a line, below as the smallest, and beyond on the last line, which never falls."""
    sizes = sorted(measured)
    if len(sizes) == 1:
        return measured[sizes[0]]
    place = min(max(bisect_left(sizes, num_rows), 1), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    slope = (measured[high] - measured[low]) / (high - low)
    if num_rows > high:
        return measured[high] + (num_rows - high) * max(slope, 0.0)
    return measured[low] + (max(num_rows, sizes[0]) - low) * slope


def first_rows_of(times: StepTimes, least_rows: int, most_rows: int) -> dict[int, int]:
    """By rows of the steps that are predicted to gain enough, of these numbers: rows of the first nano-batch."""
    gains = {num_rows: times.gain(num_rows) for num_rows in range(least_rows, most_rows + 1)}
    return {num_rows: first_rows(num_rows) for num_rows, gain in gains.items() if gain >= LEAST_GAIN}
