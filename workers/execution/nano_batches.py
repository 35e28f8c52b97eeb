"""A step's rows in two nano-batches, which are computed in turn (`models/passes.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...kernels.attention import AttentionBatch, split_batch
from ...kernels.lora import LoraSegment


@dataclass(frozen=True)
class NanoBatch:
    token_ids: torch.Tensor  # [num_rows] int64
    attention: AttentionBatch
    segments: tuple[LoraSegment, ...]


def split_rows(
    token_ids: torch.Tensor, attention: AttentionBatch, segments: Sequence[LoraSegment], row: int
) -> tuple[NanoBatch, NanoBatch]:
    """The rows before `row`, and the others. A prompt's chunk may be in both, its earlier tokens in the first."""
    first, second = split_batch(attention, row)
    return (
        NanoBatch(token_ids[:row], first, _moved(segments, 0, row)),
        NanoBatch(token_ids[row:], second, _moved(segments, row, len(token_ids))),
    )


def _moved(segments: Sequence[LoraSegment], start: int, stop: int) -> tuple[LoraSegment, ...]:
    """What segments have of these rows, which are numbered from 0 then."""
    return tuple(
        LoraSegment(max(segment.start, start) - start, min(segment.end, stop) - start, segment.adapter)
        for segment in segments
        if segment.start < stop and segment.end > start
    )
