"""A plan's tensors on a GPU: page tables stay there, and so do the tokens that the step before has chosen.

A step copies four numbers for each row, and its new pages, to the GPU. All other inputs are computed from these there,
in recorded passes too.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, repeat

import torch

from ...kernels.attention import AttentionBatch
from ...kernels.lora import LoraSegment, PagedAdapter
from ...kernels.staging import staged
from ..decoding.prompt_pooling import PooledRows, pooled_rows
from ..decoding.prompt_scoring import ScoredRows, scored_rows
from ..plan import INT32_BYTES, SamplePlan, SequencePlan, StepPlan
from .begun_step import BegunStep
from .inputs import segments_of
from .page_tables import PageTables

_POSITION, _TABLE, _SOURCE, _TOKEN = range(4)  # of each row; _SOURCE is a row of the step before, or _GIVEN
_GIVEN = -1  # the row's token is in _TOKEN
_PADDING = (-1, 0, _GIVEN, 0)
MOST_ROWS = 512  # of a recorded step with prompts; beyond, the device takes longer than the host's launches


class DeviceRows:
    """Lays out plans for one device, one step after the other."""

    def __init__(self, tables: PageTables, block_size: int) -> None:
        self.tables, self._block_size, self._device = tables, block_size, tables.pages.device
        self._chosen = torch.zeros(tables.num_sequences, dtype=torch.int64, device=self._device)  # by the step before
        self._fixed = torch.zeros((4, max(tables.num_sequences, MOST_ROWS)), dtype=torch.int64, device=self._device)
        self._padding = torch.tensor(_PADDING, device=self._device).unsqueeze(1)

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
        moved, on_places, on_pages = staged(
            self._device,
            torch.frombuffer(numbers, dtype=torch.int64),
            torch.frombuffer(places, dtype=torch.int64) if places else torch.empty(0, dtype=torch.int64),
            torch.frombuffer(pages, dtype=torch.int32) if pages else torch.empty(0, dtype=torch.int32),
        )
        if places:
            self.tables.pages.index_copy_(0, on_places, on_pages)
        num_rows, num = query_starts[-1], len(sequences)
        rows = moved[: 4 * num_rows].view(4, num_rows)
        rest = None if is_decode else moved[4 * num_rows :]
        return DeviceInputs(
            self,
            rows,
            rows[_TABLE] if rest is None else rest[:num],
            None if rest is None else rest[num:],
            tuple(sequences),
            query_starts,
            segments_of(sequences, query_starts, adapters),
            tuple([sequences[index].sequence_id for index in sampled]),
            tuple([sample for s in sequences if (sample := s.sample) is not None]),
            () if is_decode else scored_rows(sequences, query_starts),
            () if is_decode else pooled_rows(sequences, query_starts),
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
