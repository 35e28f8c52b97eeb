"""Whether a step is faster in two nano-batches: what they hide of the network, less what splitting costs.

A gang's workers add up partial sums after each half of a layer. With all rows in one batch they compute, then wait for
the network. With two nano-batches one computes while the other's sum is under way (NanoFlow, arXiv 2408.12757). But
products read their weights twice, and what the network takes of the CPU is computed slower, not hidden.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

ROW_MULTIPLE = 32  # of the first nano-batch: two tiles of a CPU's matrix unit, half a tile of a GPU's
LEAST_ROWS = 2 * ROW_MULTIPLE  # of a step that is split
LEAST_GAIN = 1.2  # of a step's predicted time over that of its nano-batches; the model is not exact
# More for each sum beside a core that computes, by steps of 64 to 512 rows over 0.3 to 2 Gbit/s on one machine: threads
# that send wait for their turn between a sum's messages.
CPU_WAIT_S = 1e-3


def first_rows(num_rows: int) -> int:
    """Rows of the first nano-batch of a step of at least two: half of them, in whole tiles where there are several."""
    if num_rows < LEAST_ROWS:
        return num_rows // 2
    return (num_rows + ROW_MULTIPLE) // (2 * ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(frozen=True)
class SumCosts:
    """Seconds of an all-reduce over a gang: a fixed part, and one for each row."""

    sum_s: float
    row_s: float
    busy_share: float  # of these, that a worker's cores are busy with and cannot compute in
    wait_s: float  # more while the worker computes

    def seconds(self, num_rows: int) -> float:
        return self.sum_s + num_rows * self.row_s


@dataclass(frozen=True)
class NanoBatchCosts:
    """Of one base on one gang."""

    num_sums: int  # of a step
    sums: SumCosts
    passes: Mapping[int, float]  # seconds of passes without sums, by rows; not empty

    def compute_s(self, num_rows: int) -> float:
        """On lines between what was measured, and on the last of them beyond."""
        sizes = sorted(self.passes)
        if len(sizes) == 1:
            return self.passes[sizes[0]] * max(1.0, num_rows / sizes[0])
        place = min(max(bisect_left(sizes, num_rows), 1), len(sizes) - 1)
        low, high = sizes[place - 1], sizes[place]
        slope = max(0.0, (self.passes[high] - self.passes[low]) / (high - low))
        return self.passes[low] + (max(num_rows, sizes[0]) - low) * slope

    def whole_s(self, num_rows: int) -> float:
        """A pass of all rows, which waits for each of its sums."""
        return self.compute_s(num_rows) + self.num_sums * self.sums.seconds(num_rows)

    def split_s(self, first: int, second: int) -> float:
        """Two nano-batches in turn, which are never computed faster than the whole.

        From one sum of a nano-batch to its next, the slowest of four limits: computing both, with what the network
        takes of the CPU; sending both; or either alone, which waits for its own sum. The sums' fixed parts overlap.
        Both sums take longer beside computing.
        """
        sums, num = self.sums, self.num_sums
        first_s, second_s = self.compute_s(first) / num, self.compute_s(second) / num
        both_s = max(first_s + second_s, self.compute_s(first + second) / num)
        every_s = max(
            both_s + sums.busy_share * (sums.seconds(first) + sums.seconds(second)),
            (first + second) * sums.row_s,
            first_s + sums.seconds(first),
            second_s + sums.seconds(second),
        )
        last_s = first_s + max(both_s - first_s, first * sums.row_s) + sums.seconds(second)
        return (num - 1) * every_s + last_s + 2 * num * sums.wait_s

    def gain(self, num_rows: int) -> float:
        """Predicted time of a step of at least two rows over that of its nano-batches; attention is left out.

        Attention costs nothing to split, and the network is hidden behind it too.
        """
        first = first_rows(num_rows)
        return self.whole_s(num_rows) / self.split_s(first, num_rows - first)


def first_rows_of(costs: NanoBatchCosts, least_rows: int, most_rows: int) -> dict[int, int]:
    """By rows of the steps that are predicted to gain enough, of these numbers: rows of the first nano-batch."""
    gains = {num_rows: costs.gain(num_rows) for num_rows in range(least_rows, most_rows + 1)}
    return {num_rows: first_rows(num_rows) for num_rows, gain in gains.items() if gain >= LEAST_GAIN}
