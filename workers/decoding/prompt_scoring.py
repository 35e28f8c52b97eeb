"""Log-probabilities of prompts' tokens from the last layer's states, for some rows at a time.

The logits of a whole prompt never exist at once: those of 128,000 tokens would take 60 GB.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from ...kernels.staging import Arriving, staged
from ..plan import INT32_BYTES, ScorePlan, SequencePlan, unpacked
from ..wire.prompt_scores import PromptScores, packed_scores, packed_vector

# Sums of the last layer's states over rows of prompts, from which embeddings are made.


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


MOST_BYTES: Final = 32 << 20  # of the logits of rows that are scored together

# States [num_rows, hidden], and which rows of the step these are, ascending -> logits [num_rows, vocab] in float32.
Head = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class ScoredRows(NamedTuple):
    """Consecutive rows of a step from which tokens of a sequence's prompt are scored."""

    sequence_id: int
    first_row: int  # in the step
    plan: ScorePlan

    @property
    def num_rows(self) -> int:
        return len(self.plan.targets) // INT32_BYTES


def scored_rows(sequences: Sequence[SequencePlan], query_starts: Sequence[int]) -> tuple[ScoredRows, ...]:
    """The rows to score in a step whose sequences begin at these rows."""
    return tuple(
        [
            ScoredRows(sequence.sequence_id, start + sequence.scores.first_row, sequence.scores)
            for sequence, start in zip(sequences, query_starts, strict=False)
            if sequence.scores is not None
        ]
    )


class ScoresUnderWay:
    """Scores that the device computes: only `read` waits for them."""

    def __init__(self, hidden: torch.Tensor, head: Head, scored: Sequence[ScoredRows], vocab_size: int) -> None:
        """`hidden`: `[num_rows, hidden]`, the last layer's normed states of the whole step."""
        self._scored = scored
        rows, targets = array("q"), array("q")
        for each in scored:
            rows.extend(range(each.first_row, each.first_row + each.num_rows))
            targets.extend(unpacked(each.plan.targets).tolist())
        self._num_top = min(max([each.plan.num_top for each in scored]), vocab_size)
        at, target_ids = staged(
            hidden.device,
            torch.frombuffer(rows, dtype=torch.int64),
            torch.frombuffer(targets, dtype=torch.int64).unsqueeze(1),
        )
        max_rows = most_rows(vocab_size)
        some = [slice(start, start + max_rows) for start in range(0, len(rows), max_rows)]
        parts = [_scores(head(hidden[at[each]], rows[each]), target_ids[each], self._num_top) for each in some]
        self._answer = Arriving([torch.cat(column) for column in zip(*parts, strict=True)])

    def read(self) -> dict[int, PromptScores | None]:
        """By sequence id; None: they are not finite. Waits for the device."""
        logprobs, ranks, top_ids, top_logprobs = [part.numpy() for part in self._answer.read()]
        scores_by_id: dict[int, PromptScores | None] = {}
        end = 0
        for sequence_id, _, plan in self._scored:
            start, end = end, end + len(plan.targets) // INT32_BYTES
            rows, num_top = slice(start, end), min(plan.num_top, self._num_top)
            scores = packed_scores(logprobs[rows], ranks[rows], top_ids[rows, :num_top], top_logprobs[rows, :num_top])
            scores_by_id[sequence_id] = None if (ranks[rows] < 1).any() else scores
        return scores_by_id


def most_rows(vocab_size: int) -> int:
    """Rows that are scored together."""
    return max(MOST_BYTES // (4 * vocab_size), 1)


def _scores(logits: torch.Tensor, target_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """Log-probability and rank of `target_ids` `[num_rows, 1]`, and ids and log-probabilities of the likeliest tokens.

    Rank 0: the row has a number that is not finite.
    """
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, target_ids)
    ranks = ((logits > chosen).sum(-1, dtype=torch.int32) + 1) * total.squeeze(1).isfinite()
    top_logits, top_ids = logits.topk(num_top)
    return (chosen - total).squeeze(1), ranks.int(), top_ids.int(), top_logits - total
