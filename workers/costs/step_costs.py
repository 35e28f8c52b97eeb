"""What steps take on one machine: a fit of measured steps against rows, context and adapters, and its file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..plan import StepPlan

# Which steps are faster in two nano-batches, by what a gang's steps of some sizes took both ways.
#
# A gang's workers add up partial sums after each half of a layer. With all rows in one batch they compute, then wait
# for the network. With two nano-batches one computes while the other's sum is under way (NanoFlow, arXiv 2408.12757).
# But products read their weights twice, and what the network takes of the CPU is computed slower, not hidden.

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


Floats = NDArray[np.float64]
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # of rows, between which products are linear
_FEWEST_STEPS = 16  # that a fit needs
_ROUNDS = 8  # of reweighting
_OUTLIER = 2.0  # residuals of more medians than this count less


@dataclass(frozen=True)
class StepShape:
    """All of a step that its time is fitted against."""

    num_rows: int = 0
    num_logits: int = 0  # rows that choose a token
    num_sequences: int = 0
    decode_context: int = 0  # tokens that rows of decodes see, summed
    num_pairs: int = 0  # of a prompt's token and one that it sees
    num_adapters: int = 0  # different ones
    decode_adapter_pages: int = 0  # of those that rows of decodes have
    prompt_adapter_pages: int = 0  # and of the others, which are read while many rows are computed
    decode_row_pages: int = 0  # of the adapter of each row that decodes, summed
    prompt_row_pages: int = 0  # and of each other row: those of a prompt read their adapter together

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        pages = {residence.digest: len(residence.pages) for residence in plan.adapters}
        decoding = {part.adapter for part in plan.sequences if len(part.token_ids) == 1}
        decode_pages = sum([number for digest, number in pages.items() if digest in decoding])
        num_rows = num_logits = decode_context = num_pairs = decode_row_pages = prompt_row_pages = 0
        for part in plan.sequences:
            num_tokens = len(part.token_ids)
            num_rows += num_tokens
            num_logits += part.sample is not None
            if num_tokens == 1:
                decode_context += part.start + 1
            else:
                num_pairs += num_tokens * part.start + num_tokens * (num_tokens + 1) // 2
            if part.adapter is not None:
                if num_tokens == 1:
                    decode_row_pages += pages[part.adapter]
                else:
                    prompt_row_pages += num_tokens * pages[part.adapter]
        return StepShape(
            num_rows,
            num_logits,
            len(plan.sequences),
            decode_context,
            num_pairs,
            len(pages),
            decode_pages,
            sum(pages.values()) - decode_pages,
            decode_row_pages,
            prompt_row_pages,
        )

    @property
    def features(self) -> tuple[float, ...]:
        """What each coefficient of a fit is multiplied with. None falls as the step grows."""
        spans = zip((0, *_KNOTS), (*_KNOTS, None), strict=True)
        between = [min(max(self.num_rows - low, 0), (high or self.num_rows + low) - low) for low, high in spans]
        return (
            1.0,
            *map(float, between),
            float(self.num_logits),
            float(self.num_sequences),
            float(self.decode_context),
            float(self.num_pairs),
            float(self.num_adapters),
            float(self.decode_adapter_pages),
            float(self.prompt_adapter_pages),
            float(self.decode_row_pages),
            float(self.prompt_row_pages),
        )


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a base's steps and of an adapter's load on one machine, and the settings that they were taken with."""

    model: str  # its folder's name
    machine: str
    device: str
    num_threads: int
    dtype: str
    coefficients: tuple[float, ...]  # of `StepShape.features`, none below 0
    store_load_s: float  # of an adapter that is not in host memory, and of each of its pages
    store_page_s: float
    copy_page_s: float  # of a page from host memory into the pool
    residual: float  # median of the fit's relative errors
    num_steps: int  # that were measured

    def __post_init__(self) -> None:
        if len(self.coefficients) != len(StepShape().features):
            raise ValueError(f"{len(self.coefficients)} coefficients: {len(StepShape().features)} are needed")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device = {self.device!r}: cpu or cuda is needed")
        if min(*self.coefficients, self.store_load_s, self.store_page_s, self.copy_page_s) < 0:
            raise ValueError("no cost is below 0")

    def step_s(self, plan: StepPlan) -> float:
        return self.shape_s(StepShape.of(plan))

    def shape_s(self, shape: StepShape) -> float:
        return sum([a * b for a, b in zip(self.coefficients, shape.features, strict=True)])

    def load_s(self, num_pages: int, *, from_store: bool) -> float:
        if from_store:
            return self.store_load_s + num_pages * self.store_page_s
        return num_pages * self.copy_page_s

    def move_s(self, num_pages: int) -> float:
        """Seconds to copy pages of KV between the pool and host memory, which are as large as those of adapters."""
        return num_pages * self.copy_page_s

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def read(path: Path) -> StepCosts:
        """Raises ValueError for a file that does not hold a fit."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=StepCosts)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"{path} holds no measured costs of steps: {error}") from error


@dataclass(frozen=True)
class Fit:
    coefficients: tuple[float, ...]
    residual: float  # median of relative errors


def fit_steps(steps: Sequence[tuple[StepShape, float]]) -> Fit:
    """Least squares of relative errors without negative coefficients; outliers, such as stalls, count less.

    So a larger step is never expected to be faster. Raises ValueError for too few steps.
    """
    if len(steps) < _FEWEST_STEPS or min(seconds for _, seconds in steps) <= 0:
        raise ValueError(f"{len(steps)} steps: a fit needs {_FEWEST_STEPS}, each longer than 0 s")
    seconds = np.array([took for _, took in steps])
    features = np.array([shape.features for shape, _ in steps]) / seconds[:, None]
    weights = np.ones(len(steps))
    for _ in range(_ROUNDS):
        coefficients = non_negative_least_squares(features * weights[:, None], weights)
        errors = np.abs(features @ coefficients - 1)
        typical = float(np.median(errors)) + 1e-9
        weights = np.sqrt(np.minimum(1.0, _OUTLIER * typical / np.maximum(errors, 1e-12)))
    return Fit(tuple(map(float, coefficients)), float(np.median(errors)))


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Value at 0 and slope, neither below 0, by least squares of relative errors."""
    ys = np.array([y for _, y in points])
    features = np.array([(1.0, x) for x, _ in points]) / ys[:, None]
    first, slope = non_negative_least_squares(features, np.ones(len(points)))
    return float(first), float(slope)


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x of no negative elements that makes |matrix x - target| least (Lawson and Hanson, 1974, chapter 23)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    num = matrix.shape[1]
    passive, solution = np.zeros(num, dtype=bool), np.zeros(num)
    for _ in range(10 * num):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-10:
            break
        passive[gradient.argmax()] = True
        while True:
            tried = np.zeros(num)
            tried[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            below = passive & (tried <= 0)
            if not below.any():
                break
            step = (solution[below] / np.maximum(solution[below] - tried[below], 1e-300)).min()
            solution = solution + step * (tried - solution)
            passive &= solution > 1e-15
            solution[~passive] = 0.0
        solution = tried
    return np.asarray(solution / scale)
