"""Searches how the nano-batches of a step share a device, by NanoFlow's two stages (arXiv 2408.12757 §4.1), with HiGHS.

A step computes the same operations in each layer, so a schedule is periodic: each layer begins one period after the one
before it. All times of a program are in periods, and its variable is the rate, 1 / period. So it is linear in both the
sizes of nano-batches and the shares of operations, and one program finds the shortest period (cyclic scheduling).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Resource = Literal["compute", "memory", "network"]
Performance = Mapping[Resource, Sequence[tuple[float, float]]]  # shares of the device, and what an operation does there
SIZE = 128  # rows: nano-batches are multiples of it
_TOLERANCE = 1e-6  # of times, in periods; the solver's is 1e-7 for each constraint


@dataclass(frozen=True)
class Work:
    """An operation of a layer. With n rows it takes `fixed_ms + n * row_ms` while nothing else runs."""

    name: str
    resource: Resource
    fixed_ms: float
    row_ms: float
    after: tuple[str, ...]  # operations of its own layer; none: it follows the layer before
    num_pieces: int = 1  # in which the rows of a nano-batch are computed

    def seconds_ms(self, num_rows: float) -> float:
        return self.fixed_ms + num_rows * self.row_ms


@dataclass(frozen=True)
class NanoOperation:
    work: Work
    batch: int
    piece: int = 0

    @property
    def name(self) -> str:
        return f"{self.work.name}{self.batch + 1}" + ("abcd"[self.piece] if self.work.num_pieces > 1 else "")


@dataclass(frozen=True)
class Layer:
    """The operations of a layer, each after those that it depends on."""

    works: tuple[Work, ...]

    def __post_init__(self) -> None:
        known = set[str]()
        for work in self.works:
            if not known.issuperset(work.after):
                raise ValueError(f"{work.name} follows {', '.join(work.after)}: these are not all before it")
            known.add(work.name)
        if len(known) < len(self.works) or not known:
            raise ValueError("a layer has operations, each with a name of its own")

    def operations(self, num_batches: int) -> tuple[NanoOperation, ...]:
        return tuple(
            NanoOperation(work, batch, piece)
            for batch in range(num_batches)
            for work in self.works
            for piece in range(work.num_pieces)
        )

    def before(self, one: NanoOperation) -> Iterator[NanoOperation]:
        """What must have ended in the same layer: of equally many pieces only its own, and pieces are in order."""
        if one.piece:
            yield NanoOperation(one.work, one.batch, one.piece - 1)
        for work in self.works:
            if work.name in one.work.after:
                own = work.num_pieces == one.work.num_pieces
                for piece in [one.piece] if own else range(work.num_pieces):
                    yield NanoOperation(work, one.batch, piece)

    @cached_property
    def first(self) -> frozenset[str]:
        """They wait for the layer before."""
        return frozenset(work.name for work in self.works if not work.after)

    @cached_property
    def last(self) -> frozenset[str]:
        return frozenset(work.name for work in self.works) - {name for work in self.works for name in work.after}


@dataclass(frozen=True)
class Placed:
    operation: NanoOperation
    start_ms: float  # in the layer whose first nano-batch begins at 0; it may reach into later periods
    duration_ms: float
    share: float  # of the device; 1 where interference does not count

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.duration_ms


@dataclass(frozen=True)
class Schedule:
    layer: Layer
    sizes: tuple[int, ...]  # rows of each nano-batch
    period_ms: float  # of a layer
    placed: tuple[Placed, ...]

    def violations(self, performance: Performance | None = None, num_layers: int = 4) -> list[str]:
        """What is broken if so many layers run one after the other; none of it should be.

        `performance`: None: operations on different resources do not disturb each other.
        """
        slack_ms = 10 * _TOLERANCE * self.period_ms
        at = {one.operation: one for one in self.placed}
        operations = self.layer.operations(len(self.sizes))
        found = [f"{one.name} is missing" for one in operations if one not in at]
        if found or len(at) != len(self.placed):
            return [*found, "an operation is placed twice"] if len(at) != len(self.placed) else found
        for one in self.placed:
            work = one.operation.work
            alone_ms = work.seconds_ms(self.sizes[one.operation.batch] / work.num_pieces)
            reached = 1.0 if performance is None else dict(performance[work.resource]).get(one.share, 0.0)
            if one.duration_ms * reached < alone_ms - slack_ms:
                found.append(f"{one.operation.name} takes {one.duration_ms} ms with {one.share} of the device")
            found += [
                f"{one.operation.name} begins before {other.name} ends"
                for other in self.layer.before(one.operation)
                if one.start_ms < at[other].end_ms - slack_ms
            ]
            if work.name in self.layer.first:
                found += [
                    f"{one.operation.name} begins before {other.operation.name} of the layer before ends"
                    for other in self.placed
                    if other.operation.batch == one.operation.batch
                    and other.operation.work.name in self.layer.last
                    and one.start_ms + self.period_ms < other.end_ms - slack_ms
                ]
        runs = [(one, one.start_ms + layer * self.period_ms) for layer in range(num_layers) for one in self.placed]
        for _, start_ms in runs:  # where all that begins has begun, the most runs
            now_ms = start_ms + slack_ms
            beside = [other for other, began_ms in runs if began_ms <= now_ms < began_ms + other.duration_ms - slack_ms]
            resources = [other.operation.work.resource for other in beside]
            names = ", ".join(other.operation.name for other in beside)
            if len(set(resources)) < len(resources):
                found.append(f"{names} run at once, and two of them on the same resource")
            if performance is not None and sum(other.share for other in beside) > 1 + _TOLERANCE:
                found.append(f"{names} run at once, with more than the device")
        return found


def in_sequence(layer: Layer, sizes: Sequence[int]) -> Schedule:
    """One operation at a time, nano-batch by nano-batch."""
    placed, now_ms = list[Placed](), 0.0
    for one in layer.operations(len(sizes)):
        took_ms = one.work.seconds_ms(sizes[one.batch] / one.work.num_pieces)
        placed.append(Placed(one, now_ms, took_ms, 1.0))
        now_ms += took_ms
    return Schedule(layer, tuple(sizes), now_ms, tuple(placed))


def shortest_ms(layer: Layer, sizes: Sequence[int], performance: Performance) -> float:
    """No schedule of these nano-batches has a shorter period: what all operations take of the device at least."""
    return sum(
        one.duration_ms * min(share / reached for share, reached in performance[one.operation.work.resource])
        for one in in_sequence(layer, sizes).placed
    )


def find_sizes(layer: Layer, num_rows: int, num_batches: int, limit_s: float = 60.0) -> Schedule:
    """Stage 1: sizes and order of nano-batches, as if operations on different resources did not disturb each other."""
    if num_rows % SIZE or num_rows < num_batches * SIZE:
        raise ValueError(f"{num_rows} rows: {num_batches} nano-batches are multiples of {SIZE}, one each at least")
    program = _Program(layer, num_batches, limit_s)
    program.choose_sizes(num_rows)
    program.separate_equals()
    program.solve()
    return program.schedule()


def find_shares(
    layer: Layer, sizes: Sequence[int], performance: Performance, order: Schedule | None = None, limit_s: float = 60.0
) -> Schedule:
    """Stage 2: shares and times of nano-operations of these sizes. At each moment all shares together are 1 at most.

    `order`: operations on the same resource keep its order for half of the time, and for the rest that is where the
    search begins. The result is the best within the time limit, and the shortest there is if that was long enough.
    """
    begin: _Program | None = None
    for kept in [None] if order is None else [order, None]:
        program = _Program(layer, len(sizes), limit_s if order is None else limit_s / 2)
        program.choose_shares(sizes, performance)
        program.separate_equals(kept)
        program.share_device()
        program.solve(begin)
        begin = program
    assert begin is not None
    return begin.schedule()


class _Program:
    """Times in periods: `start` of each operation, `took`, and their rate, the number of periods in a millisecond."""

    def __init__(self, layer: Layer, num_batches: int, limit_s: float) -> None:
        self._layer, self._operations = layer, layer.operations(num_batches)
        import highspy  # loaded here: others read constants of these files, and need no solver

        self._solver = highspy.Highs()
        for option, value in (("output_flag", False), ("time_limit", limit_s), ("threads", 1)):
            self._solver.setOptionValue(option, value)
        self._rate: Any = self._solver.addVariable(0, 1e3)
        self._start: dict[NanoOperation, Any] = {one: self._solver.addVariable(0, 2) for one in self._operations}
        self._took: dict[NanoOperation, Any] = {}
        self._sizes: list[Any] = []  # rows of each nano-batch
        self._share: dict[NanoOperation, Any] = dict.fromkeys(self._operations, 1.0)
        self._solver.addConstr(self._start[self._operations[0]] == 0)
        self._add = self._solver.addConstr

    def choose_sizes(self, num_rows: int) -> None:
        choices = range(SIZE, num_rows, SIZE) if self._operations[-1].batch else [num_rows]
        most = 1 / max(work.num_pieces * work.fixed_ms + num_rows * work.row_ms for work in self._layer.works)
        self._solver.changeColBounds(self._rate.index, 0.0, most)
        scaled = []  # rows of each nano-batch times the rate
        for _ in range(self._operations[-1].batch + 1):
            chosen = [self._solver.addBinary() for _ in choices]
            rates = [self._solver.addVariable(0, most) for _ in choices]  # the rate where it is chosen, 0 elsewhere
            self._add(sum(chosen) == 1)
            self._add(sum(rates) == self._rate)
            for one, rate in zip(chosen, rates, strict=True):
                self._add(rate <= most * one)
            self._sizes.append(sum(rows * one for rows, one in zip(choices, chosen, strict=True)))
            scaled.append(sum(rows * rate for rows, rate in zip(choices, rates, strict=True)))
        self._add(sum(self._sizes) == num_rows)
        self._add(sum(scaled) == num_rows * self._rate)
        for less, more in itertools.pairwise(self._sizes):  # they are alike, so their order is free
            self._add(less <= more)
        for one in self._operations:
            work = one.work
            self._took[one] = work.fixed_ms * self._rate + (work.row_ms / work.num_pieces) * scaled[one.batch]
        for resource in ("compute", "memory", "network"):  # it follows from the rest, and bounds the search well
            if any(one.work.resource == resource for one in self._operations):
                self._add(sum(took for one, took in self._took.items() if one.work.resource == resource) <= 1)
        self._keep_dependencies()

    def choose_shares(self, sizes: Sequence[int], performance: Performance) -> None:
        self._sizes = list(sizes)
        most = 1 / max(one.duration_ms for one in in_sequence(self._layer, sizes).placed)
        self._solver.changeColBounds(self._rate.index, 0.0, most)
        whole = []  # what each takes of the device in a period
        for one in self._operations:
            alone_ms = one.work.seconds_ms(sizes[one.batch] / one.work.num_pieces)
            levels = [level for level in performance[one.work.resource] if level[1] > 0]
            chosen = [self._solver.addBinary() for _ in levels]
            rates = [self._solver.addVariable(0, most) for _ in levels]
            self._add(sum(chosen) == 1)
            self._add(sum(rates) == self._rate)
            for use, rate in zip(chosen, rates, strict=True):
                self._add(rate <= most * use)
            parts = list(zip(levels, rates, strict=True))
            self._took[one] = sum((alone_ms / reached) * rate for (_, reached), rate in parts)
            self._share[one] = sum(share * use for (share, _), use in zip(levels, chosen, strict=True))
            whole.append(sum((alone_ms * share / reached) * rate for (share, reached), rate in parts))
        self._add(sum(whole) <= 1)  # it follows from the rest, and bounds the search well
        for took in self._took.values():
            self._add(took <= 1)
        self._keep_dependencies()

    def _keep_dependencies(self) -> None:
        for one in self._operations:
            for other in self._layer.before(one):
                self._add(self._start[one] >= self._start[other] + self._took[other])
            if one.work.name in self._layer.first:
                for other in self._operations:
                    if other.batch == one.batch and other.work.name in self._layer.last:
                        self._add(self._start[one] + 1 >= self._start[other] + self._took[other])

    def _free_pairs(self) -> Iterator[tuple[NanoOperation, NanoOperation]]:
        """Pairs that no dependency keeps apart."""
        ancestors: dict[NanoOperation, set[NanoOperation]] = {}
        for one in self._operations:
            before = set(self._layer.before(one))
            ancestors[one] = before.union(*(ancestors[other] for other in before))
        for one, other in itertools.combinations(self._operations, 2):
            if one not in ancestors[other] and other not in ancestors[one]:
                yield one, other

    def separate_equals(self, order: Schedule | None = None) -> None:
        """Operations on the same resource do not overlap. `order`: whose order they keep."""
        at = {} if order is None else {placed.operation: placed for placed in order.placed}
        for one, other in self._free_pairs():
            if one.work.resource == other.work.resource:
                turns: Any = self._solver.addIntegral(-2, 2)
                if order is not None:
                    # The other one begins within a period of this one, in some layer before or after.
                    apart = (at[other].start_ms - at[one].start_ms) / order.period_ms
                    self._add(turns == -int((apart + _TOLERANCE) // 1))
                self._separate(one, other, turns, 0.0)

    def _separate(self, one: NanoOperation, other: NanoOperation, turns: Any, overlap: Any) -> None:
        """`turns`: periods from one to the next begin of the other. `overlap`: 1 if they need not be apart."""
        apart = self._start[other] - self._start[one] + turns
        self._add(apart + overlap >= self._took[one])
        self._add(1 - apart + overlap >= self._took[other])

    def share_device(self) -> None:
        """Operations on different resources overlap only if their shares are the device together, or less."""
        overlaps: dict[frozenset[NanoOperation], Any] = {}
        for one, other in self._free_pairs():
            if one.work.resource != other.work.resource:
                overlap = overlaps[frozenset((one, other))] = self._solver.addBinary()
                self._separate(one, other, self._solver.addIntegral(-2, 2), overlap)
                self._add(self._share[one] + self._share[other] <= 2 - overlap)
        for three in itertools.combinations(self._operations, 3):
            if len({one.work.resource for one in three}) == 3:
                pairs = [frozenset(pair) for pair in itertools.combinations(three, 2)]
                if overlaps.keys() >= set(pairs):
                    shares = sum(self._share[one] for one in three)
                    self._add(shares <= 4 - sum(overlaps[pair] for pair in pairs))

    def solve(self, begin: _Program | None = None) -> None:
        """`begin`: a program of the same variables, whose solution is one of this program too.

        Raises RuntimeError if no schedule was found in time.
        """
        import highspy

        self._solver.setObjective(self._rate, highspy.ObjSense.kMaximize)
        if begin is not None:  # set last: other changes of the program would drop it
            self._solver.setSolution(begin._solver.getSolution())
        self._solver.solve()
        if self._solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise RuntimeError("no schedule was found within the time limit")

    def schedule(self) -> Schedule:
        period_ms = 1 / self._value(self._rate)
        sizes = tuple(round(self._value(rows)) for rows in self._sizes)
        placed = [
            Placed(
                one,
                self._value(self._start[one]) * period_ms,
                self._value(self._took[one]) * period_ms,
                round(self._value(self._share[one]), 6),
            )
            for one in self._operations
        ]
        return Schedule(self._layer, sizes, period_ms, tuple(placed))

    def _value(self, expression: Any) -> float:
        return float(expression if isinstance(expression, int | float) else self._solver.val(expression))
