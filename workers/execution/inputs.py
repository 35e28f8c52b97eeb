"""A plan's tensors: all rows of a step, one after the other, without padding."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby

import torch

from ...kernels.attention import AttentionBatch
from ...kernels.lora import LoraSegment, PagedAdapter
from ...kernels.staging import staged
from ..decoding.prompt_pooling import PooledRows, pooled_rows
from ..decoding.prompt_scoring import ScoredRows, scored_rows
from ..plan import INT32_BYTES, SamplePlan, SequencePlan, StepPlan


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

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def make_inputs(plan: StepPlan, adapters: dict[str, PagedAdapter], block_size: int, device: torch.device) -> StepInputs:
    """Lays out a plan with at least one sequence; neighbours share an adapter where they can."""
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
    )


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
