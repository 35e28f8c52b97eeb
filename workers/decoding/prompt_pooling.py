"""Sums of the last layer's states over rows of prompts, from which embeddings are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.staging import Arriving
from ..plan import SequencePlan
from ..wire.embedding import packed_vector


class PooledRows(NamedTuple):
    """Consecutive rows of a step whose states are summed."""

    sequence_id: int
    first_row: int  # in the step
    num_rows: int


def pooled_rows(sequences: Sequence[SequencePlan], query_starts: Sequence[int]) -> tuple[PooledRows, ...]:
    """The rows to pool in a step whose sequences begin at these rows."""
    return tuple(
        [
            PooledRows(sequence.sequence_id, start + sequence.pool.first_row, sequence.pool.num_rows)
            for sequence, start in zip(sequences, query_starts, strict=False)
            if sequence.pool is not None
        ]
    )


class PoolingUnderWay:
    """Sums that the device computes: only `read` waits for them."""

    def __init__(self, hidden: torch.Tensor, pooled: Sequence[PooledRows]) -> None:
        """`hidden`: `[num_rows, hidden]`, the last layer's normed states of the whole step."""
        self._sequence_ids = [each.sequence_id for each in pooled]
        sums = [hidden.narrow(0, each.first_row, each.num_rows).sum(0, dtype=torch.float32) for each in pooled]
        self._answer = Arriving([torch.stack(sums)])

    def read(self) -> dict[int, bytes | None]:
        """Packed vectors by sequence id; None: one is not finite. Waits for the device."""
        sums = self._answer.read()[0].numpy()
        return dict(zip(self._sequence_ids, map(packed_vector, sums), strict=True))
