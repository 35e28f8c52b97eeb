"""Sampling in plain torch: the plain twin, which the fast kernels are tested against.

Rows are drawn one after the other, so that a row stays in the CPU's cache. On a GPU, where each answer to the host
costs a wait, `joint_sampling.py` draws all together; a row's token is the same either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..sampling import NO_MASKS, NOT_FINITE, Draw, Penalty

FIRST_LOOK = 1024  # likeliest tokens that are tried as candidates before the whole vocabulary is sorted


class PlainSampling:
    """`sampling.SamplingKernels` on a CPU."""

    def penalise(self, logits: torch.Tensor, rows: Sequence[int], penalties: Sequence[Penalty]) -> None:
        """See `sampling.SamplingKernels`."""
        for row, each in zip(rows, penalties, strict=True):
            if not each.token_ids:
                continue
            token, count = (torch.frombuffer(part, dtype=torch.int32) for part in (each.token_ids, each.counts))
            taken = torch.where(count > 0, each.presence + each.frequency * count.double(), 0.0).float()
            at, repetition = token.long(), torch.tensor(each.repetition, dtype=torch.float32)
            values = logits[row, at]
            logits[row, at] = torch.where(values > 0, values / repetition, values * repetition) - taken

    def highest(self, logits: torch.Tensor, masks: Mapping[int, bytes] = NO_MASKS) -> torch.Tensor:
        """See `sampling.SamplingKernels`."""
        values, tokens = _masked(logits, masks).max(dim=-1)
        return torch.where(values.isfinite(), tokens, NOT_FINITE)

    def draw(
        self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw], masks: Mapping[int, bytes] = NO_MASKS
    ) -> torch.Tensor:
        """See `sampling.SamplingKernels`."""
        logits = _masked(logits, masks)
        tokens = [draw_alone(logits[row], draw) for row, draw in zip(rows, draws, strict=True)]
        return torch.tensor(tokens, dtype=torch.int64)


def _masked(logits: torch.Tensor, masks: Mapping[int, bytes]) -> torch.Tensor:
    """Minus infinity for what masks do not allow."""
    if not masks:
        return logits
    masked = logits.clone()
    for row, mask in masks.items():
        forbidden = np.unpackbits(~np.frombuffer(mask, np.uint8), count=logits.shape[1], bitorder="little")
        masked[row].masked_fill_(torch.from_numpy(forbidden.view(np.bool_)), -torch.inf)
    return masked


def draw_alone(row: torch.Tensor, draw: Draw) -> int:
    """A token for one row `[vocab]` of logits."""
    # The highest logit is subtracted in float64, so that the smallest temperature gives the greedy token and not NaN.
    probabilities = torch.softmax((row.double() - row.max()) / draw.temperature, dim=-1)
    if draw.top_k == 0 and draw.top_p >= 1 and draw.min_p == 0:
        return _pick_alone(probabilities, draw.uniform)
    kept, token_ids = _candidates_alone(probabilities, draw)
    return int(token_ids[_pick_alone(kept, draw.uniform)])


def _candidates_alone(probabilities: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that top-k, then top-p, then min-p keep: their probabilities, descending, and their ids."""
    vocab_size = len(probabilities)
    count = min(draw.top_k or vocab_size, vocab_size)
    kept, token_ids = probabilities.topk(min(count, FIRST_LOOK))
    if len(kept) < count and (draw.top_p >= 1 or float(kept.sum()) < draw.top_p or draw.top_k):
        kept, token_ids = probabilities.topk(count)
    if draw.top_p < 1:
        total = kept.sum() if draw.top_k else 1.0
        before = kept.cumsum(0) - kept
        kept = kept[before < draw.top_p * total]
    if draw.min_p > 0:
        kept = kept[kept >= draw.min_p * kept[0]]
    kept = kept[:1] if len(kept) == 0 else kept
    return kept, token_ids[: len(kept)]


def _pick_alone(probabilities: torch.Tensor, uniform: float) -> int:
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True))
    return min(index, len(probabilities) - 1)
