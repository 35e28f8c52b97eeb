"""A plan's tensors on a GPU: page tables stay there, and so do the tokens that the step before has chosen.

A step copies four numbers for each row, its new pages, and those of recurrent states to the GPU. All other inputs are
computed from these there, in recorded passes too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, repeat

import torch

from ...kernels.attention import AttentionBatch
from ...kernels.lora import LoraSegment, PagedAdapter
from ...kernels.recurrence import StateBatch
from ...kernels.staging import staged
from ..decoding.prompt_scoring import PooledRows, ScoredRows, pooled_rows, scored_rows
from ..plan import INT32_BYTES, Int32s, SamplePlan, SequencePlan, StatePlan, StepPlan, packed, unpacked
from .begun_step import BegunStep

# Sequences' lists of pages, kept on a device: a step copies only new pages there.


class PageTables:
    """A table for each sequence of a step, all in one tensor that never moves: `pages`, int32, one after the other.

    A sequence keeps its table until another one needs it. What lies beyond its last page is any valid page.
    """

    def __init__(self, num_sequences: int, most_pages: int, device: torch.device) -> None:
        """`num_sequences`: the most of a step; `most_pages`: of a sequence."""
        self.num_sequences, self.most_pages = num_sequences, most_pages
        self.pages = torch.zeros(num_sequences * most_pages, dtype=torch.int32, device=device)
        self._tables: dict[int, tuple[int, Int32s]] = {}  # by sequence id: where its table begins, and its pages there
        self._free = [table * most_pages for table in range(num_sequences - 1, -1, -1)]

    def update(self, sequences: Sequence[SequencePlan]) -> tuple[list[int], array[int], array[int]]:
        """The start of each table, and what must be written: indices in `pages`, and the pages for them.

        The caller writes these after all earlier steps and before the step of these sequences.
        """
        places, pages, starts = array("q"), array("i"), []
        for sequence in sequences:
            start, table = self._tables.get(sequence.sequence_id) or (self._take(sequences), b"")
            if table is not sequence.pages:
                prefix_len = len(table) if sequence.pages.startswith(table) else 0
                new = unpacked(sequence.pages[prefix_len:])
                first = start + prefix_len // INT32_BYTES
                assert prefix_len // INT32_BYTES + len(new) <= self.most_pages, "a sequence has more pages than a table"
                places.extend(range(first, first + len(new)))
                pages.extend(new)
                self._tables[sequence.sequence_id] = (start, sequence.pages)
            starts.append(start)
        return starts, places, pages

    def _take(self, sequences: Sequence[SequencePlan]) -> int:
        """A table that none of these sequences has."""
        if not self._free:
            current_ids = {sequence.sequence_id for sequence in sequences}
            for sequence_id in self._tables.keys() - current_ids:
                self._free.append(self._tables.pop(sequence_id)[0])
        return self._free.pop()

    def check_integrity(self) -> None:
        """Raises AssertionError if two sequences share a table, or one holds other pages than is known."""
        starts = [start for start, _ in self._tables.values()]
        assert sorted([*starts, *self._free]) == list(range(0, len(self.pages), self.most_pages))
        content = self.pages.tolist()
        for start, table in self._tables.values():
            pages = unpacked(table).tolist()
            assert content[start : start + len(pages)] == pages, "a table on the device is behind"


# A plan's tensors: all rows of a step, one after the other, without padding.


@dataclass(frozen=True)
class StepInputs:
    token_ids: torch.Tensor  # [num_rows] int64
    attention: AttentionBatch
    segments: tuple[LoraSegment, ...]
    sample_rows: torch.Tensor  # [num_samples] int64, the row after which a token is chosen
    sample_ids: tuple[int, ...]  # sequence ids, in the order of sample_rows
    samples: tuple[SamplePlan, ...]
    scored: tuple[ScoredRows, ...] = ()
    pooled: tuple[PooledRows, ...] = ()
    states: StateBatch | None = None  # None: the base has no recurrent states

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> list[int]:
        """`sample_rows` on the host."""
        rows: list[int] = self.sample_rows.tolist()
        return rows


def make_inputs(
    plan: StepPlan,
    adapters: dict[str, PagedAdapter],
    block_size: int,
    device: torch.device,
    num_state_pages: int = 0,
) -> StepInputs:
    """Lays out a plan with at least one sequence; neighbours share an adapter where they can.

    `num_state_pages`: of a sequence's recurrent state; 0: the base has none.
    """
    sequences = sorted(plan.sequences, key=lambda sequence: sequence.adapter or "")
    query_starts = tuple(accumulate((len(s.token_ids) for s in sequences), initial=0))
    sampled = [(row_end - 1, s) for s, row_end in zip(sequences, query_starts[1:], strict=True) if s.sample is not None]
    most_pages = max(len(s.pages) for s in sequences) // INT32_BYTES
    token_ids, sample_rows, page_starts, positions, row_pages, row_slots, pages = staged(
        device,
        _ints(chain.from_iterable(s.token_ids for s in sequences)),
        torch.tensor([row for row, _ in sampled], dtype=torch.int64),
        *_places(sequences, query_starts, block_size),
    )
    context_lens = tuple(s.start + len(s.token_ids) for s in sequences)
    return StepInputs(
        token_ids,
        AttentionBatch(query_starts, context_lens, pages, page_starts, most_pages, positions, row_pages, row_slots),
        segments_of(sequences, query_starts, adapters),
        sample_rows,
        tuple(s.sequence_id for _, s in sampled),
        tuple(s.sample for _, s in sampled if s.sample is not None),
        scored_rows(sequences, query_starts) if len(sampled) < query_starts[-1] else (),
        pooled_rows(sequences, query_starts) if len(sampled) < query_starts[-1] else (),
        StateBatch(*staged(device, *state_tables(sequences, query_starts, num_state_pages)))
        if num_state_pages
        else None,
    )


def state_tables(
    sequences: Sequence[SequencePlan], query_starts: Sequence[int], num_state_pages: int
) -> tuple[torch.Tensor, ...]:
    """Whose rows go on from which recurrent state, as the fields of a `StateBatch`, on the host.

    A sequence whose state is kept in between has several segments, which begin with what is kept. Sequences of a plan
    that only measures have no state in it: they write to the pool's first page.
    """
    unused = StatePlan(b"", packed([0] * num_state_pages))
    rows, firsts, source, target, fresh = array("i"), array("i", (0,)), bytearray(), bytearray(), []
    for sequence, start in zip(sequences, query_starts, strict=False):
        state = sequence.state or unused
        rows.append(start)
        rows.extend(start + row for row in state.snapshot_rows)
        source += (state.source or state.target) + state.snapshots
        target += state.snapshots + state.target
        fresh += [not state.source, *[False] * len(state.snapshot_rows)]
        firsts.append(len(rows))
    rows.append(query_starts[-1])
    tables = [torch.frombuffer(each, dtype=torch.int32).view(len(fresh), -1) for each in (source, target)]
    numbers = [torch.frombuffer(each, dtype=torch.int32) for each in (rows, firsts)]
    return (*numbers, *tables, torch.tensor(fresh))


def _ints(numbers: Iterable[int]) -> torch.Tensor:
    """At least one number as int64; several times faster than `torch.tensor` of a long list."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _places(
    sequences: list[SequencePlan], query_starts: tuple[int, ...], block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each sequence's pages begin in the list of all; each row's position, page and token of that page; the list.

    The lists of pages are only put together, as the bytes that they are in the plan, whatever their lengths.
    """
    pages = torch.frombuffer(bytearray().join([s.pages for s in sequences]), dtype=torch.int32)
    page_starts = _ints(accumulate((len(s.pages) // INT32_BYTES for s in sequences[:-1]), initial=0))
    lengths = torch.tensor([len(s.token_ids) for s in sequences])
    row_sequences = torch.arange(len(sequences)).repeat_interleave(lengths)
    first_rows = torch.tensor(query_starts[:-1])
    starts = torch.tensor([s.start for s in sequences])
    positions = torch.arange(query_starts[-1]) + (starts - first_rows)[row_sequences]
    row_pages = pages[page_starts[row_sequences] + positions // block_size].long()
    return page_starts, positions, row_pages, positions % block_size, pages


def segments_of(
    sequences: Sequence[SequencePlan], query_starts: Sequence[int], adapters: Mapping[str, PagedAdapter]
) -> tuple[LoraSegment, ...]:
    """The rows of each adapter, where neighbours with the same one are one segment."""
    rows = zip(sequences, query_starts, query_starts[1:], strict=False)
    segments = []
    for digest, group in groupby(rows, key=lambda row: row[0].adapter):
        if digest is not None:
            neighbours = list(group)
            segments.append(LoraSegment(neighbours[0][1], neighbours[-1][2], adapters[digest]))
    return tuple(segments)


_POSITION, _TABLE, _SOURCE, _TOKEN = range(4)  # of each row; _SOURCE is a row of the step before, or _GIVEN
_GIVEN = -1  # the row's token is in _TOKEN
_PADDING = (-1, 0, _GIVEN, 0)
MOST_ROWS = 512  # of a recorded step with prompts; beyond, the device takes longer than the host's launches


class DeviceRows:
    """Lays out plans for one device, one step after the other."""

    def __init__(self, tables: PageTables, block_size: int, num_state_pages: int = 0) -> None:
        """`num_state_pages`: of a sequence's recurrent state; 0: the base has none."""
        self.tables, self._block_size, self._device = tables, block_size, tables.pages.device
        self._num_state_pages = num_state_pages
        self._chosen = torch.zeros(tables.num_sequences, dtype=torch.int64, device=self._device)  # by the step before
        self._fixed = torch.zeros((4, max(tables.num_sequences, MOST_ROWS)), dtype=torch.int64, device=self._device)
        self._padding = torch.tensor(_PADDING, device=self._device).unsqueeze(1)
        shape = (2, tables.num_sequences, num_state_pages)
        self._state_pages = torch.full(shape, -1, dtype=torch.int32, device=self._device)  # sources, then targets
        self._is_fresh = torch.ones(tables.num_sequences, dtype=torch.bool, device=self._device)
        self._numbers = torch.arange(tables.num_sequences + 1, dtype=torch.int32, device=self._device)

    def inputs(self, plan: StepPlan, adapters: Mapping[str, PagedAdapter], before: BegunStep) -> DeviceInputs:
        """The inputs of a plan with at least one sequence; neighbours share an adapter where they can.

        `before`: the step before. Rows may need its tokens, so `feed` must be called before these inputs are used.
        """
        sequences = sorted(plan.sequences, key=lambda sequence: sequence.adapter or "")
        starts, places, pages = self.tables.update(sequences)
        lengths = [len(s.token_ids) for s in sequences]
        query_starts = tuple(accumulate(lengths, initial=0))
        sampled = [index for index, s in enumerate(sequences) if s.sample is not None]
        is_decode = len(sampled) == query_starts[-1]  # each row is a sequence's only one
        numbers = array("q", _rows(sequences, starts, lengths, before))
        if not is_decode:
            numbers.extend(starts)
            numbers.extend(query_starts[index + 1] - 1 for index in sampled)
        num_state_pages = self._num_state_pages
        states = state_tables(sequences, query_starts, num_state_pages) if num_state_pages else ()
        moved, on_places, on_pages, *on_states = staged(
            self._device,
            torch.frombuffer(numbers, dtype=torch.int64),
            torch.frombuffer(places, dtype=torch.int64) if places else torch.empty(0, dtype=torch.int64),
            torch.frombuffer(pages, dtype=torch.int32) if pages else torch.empty(0, dtype=torch.int32),
            *states,
        )
        if places:
            self.tables.pages.index_copy_(0, on_places, on_pages)
        num_rows, num = query_starts[-1], len(sequences)
        rows = moved[: 4 * num_rows].view(4, num_rows)
        tail = None if is_decode else moved[4 * num_rows :]
        return DeviceInputs(
            self,
            rows,
            rows[_TABLE] if tail is None else tail[:num],
            None if tail is None else tail[num:],
            tuple(sequences),
            query_starts,
            segments_of(sequences, query_starts, adapters),
            tuple([sequences[index].sequence_id for index in sampled]),
            tuple([sample for s in sequences if (sample := s.sample) is not None]),
            () if is_decode else scored_rows(sequences, query_starts),
            () if is_decode else pooled_rows(sequences, query_starts),
            StateBatch(*on_states) if on_states else None,
        )

    def feed(self, before: BegunStep) -> None:
        """Copies the tokens of the step before, which are final, to where `token_ids` reads them."""
        self._chosen[: len(before.token_ids)].copy_(before.token_ids)

    def fill(self, rows: torch.Tensor, size: int) -> None:
        """Copies a step's rows, and padding after them, to where `fixed` reads them."""
        num_rows = rows.shape[1]
        self._fixed[:, :num_rows].copy_(rows)
        if num_rows < size:
            self._fixed[:, num_rows:size].copy_(self._padding)

    def fill_states(self, states: StateBatch, size: int) -> None:
        """Copies which states a step's decodes go on from, and padding, to where `fixed_states` has them."""
        num_rows = len(states.source)
        for place, pages in zip(self._state_pages, (states.source, states.target), strict=True):
            place[:num_rows].copy_(pages)
        self._is_fresh[:num_rows].copy_(states.is_fresh)
        if num_rows < size:
            self._state_pages[:, num_rows:size].fill_(-1)
            self._is_fresh[num_rows:size].fill_(True)

    def fixed_states(self, size: int) -> StateBatch | None:
        """The states of the first `size` decodes that `fill_states` has copied. None: the base has no states."""
        if not self._num_state_pages:
            return None
        each_row, (source, target) = self._numbers[: size + 1], self._state_pages[:, :size]
        return StateBatch(each_row, each_row, source, target, self._is_fresh[:size])

    def fixed(self, size: int) -> tuple[torch.Tensor, AttentionBatch]:
        """Tokens and batch of the first `size` rows that `fill` has copied, as if all were decodes.

        Padding has position -1.
        """
        rows = self._fixed[:, :size]
        batch = self.attention(rows, rows[_TABLE], tuple(range(size + 1)), (), self.tables.most_pages)
        return self.token_ids(rows), batch

    def token_ids(self, rows: torch.Tensor) -> torch.Tensor:
        """`[num_rows]`. A row whose token could not be chosen gets token 0: what is computed from it is dropped."""
        fed = self._chosen[rows[_SOURCE].clamp(min=0)].clamp(min=0)
        return torch.where(rows[_SOURCE] == _GIVEN, rows[_TOKEN], fed)

    def attention(
        self,
        rows: torch.Tensor,
        page_starts: torch.Tensor,
        query_starts: tuple[int, ...],
        context_lens: tuple[int, ...],
        most_pages: int,
    ) -> AttentionBatch:
        positions = rows[_POSITION]
        row_pages = self.tables.pages[rows[_TABLE] + positions // self._block_size].long()
        row_slots = positions % self._block_size
        pages = self.tables.pages
        return AttentionBatch(
            query_starts, context_lens, pages, page_starts, most_pages, positions, row_pages, row_slots
        )


@dataclass(frozen=True)
class DeviceInputs:
    """As `inputs.StepInputs`; tokens and batch are made only for a pass that was not recorded."""

    _of: DeviceRows
    rows: torch.Tensor  # [4, num_rows] int64
    _page_starts: torch.Tensor  # [num_sequences] int64
    sample_rows: torch.Tensor | None  # None: all
    _sequences: tuple[SequencePlan, ...]
    _query_starts: tuple[int, ...]
    segments: tuple[LoraSegment, ...]
    sample_ids: tuple[int, ...]
    samples: tuple[SamplePlan, ...]
    scored: tuple[ScoredRows, ...] = ()
    pooled: tuple[PooledRows, ...] = ()
    states: StateBatch | None = None  # None: the base has no recurrent states

    @property
    def num_rows(self) -> int:
        return self.rows.shape[1]

    @property
    def is_fed(self) -> bool:
        """Some row's token is one of the step before."""
        return any(sequence.is_fed for sequence in self._sequences)

    @property
    def is_decode(self) -> bool:
        """Every sequence has one row, and gets a token."""
        return self.sample_rows is None

    @property
    def sampled(self) -> list[int]:
        """The rows after which a token is chosen, on the host."""
        each = zip(self._sequences, self._query_starts[1:], strict=True)
        return [row_end - 1 for sequence, row_end in each if sequence.sample is not None]

    @cached_property
    def token_ids(self) -> torch.Tensor:
        return self._of.token_ids(self.rows)

    @cached_property
    def attention(self) -> AttentionBatch:
        context_lens = tuple([s.start + len(s.token_ids) for s in self._sequences])
        most_pages = max([len(s.pages) for s in self._sequences]) // INT32_BYTES
        return self._of.attention(self.rows, self._page_starts, self._query_starts, context_lens, most_pages)


def _rows(
    sequences: Sequence[SequencePlan], starts: Sequence[int], lengths: Sequence[int], before: BegunStep
) -> list[int]:
    """All positions, then all tables, sources and tokens."""
    place = before.indices
    if max(lengths) == 1:
        return [
            *[s.start for s in sequences],
            *starts,
            *[place[s.sequence_id] if s.is_fed else _GIVEN for s in sequences],
            *[s.token_ids[0] for s in sequences],
        ]
    return [
        *chain.from_iterable([range(s.start, s.start + length) for s, length in zip(sequences, lengths, strict=True)]),
        *chain.from_iterable([repeat(start, length) for start, length in zip(starts, lengths, strict=True)]),
        *chain.from_iterable(
            [
                repeat(place[s.sequence_id] if s.is_fed else _GIVEN, length)
                for s, length in zip(sequences, lengths, strict=True)
            ]
        ),
        *chain.from_iterable([s.token_ids for s in sequences]),
    ]
