"""Sampling in plain torch: the plain twin, which the fast kernels are tested against.

Rows are drawn one after the other, so that a row stays in the CPU's cache. On a GPU, where each answer to the host
costs a wait, `joint_sampling.py` draws all together; a row's token is the same either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..sampling import NO_MASKS, NOT_FINITE, Draw, DrawParams, Penalty, penalty_numbers

FIRST_LOOK = 1024  # likeliest tokens that are tried as candidates before the whole vocabulary is sorted


class PlainSampling:
    """`sampling.SamplingKernels` on a CPU."""

    def penalise(self, logits: torch.Tensor, rows: Sequence[int], penalties: Sequence[Penalty]) -> None:
        """See `sampling.SamplingKernels`."""
        for row, each in zip(rows, penalties, strict=True):
            if not each.token_ids:
                continue
            token, count = (torch.frombuffer(part, dtype=torch.int32) for part in (each.token_ids, each.counts))
            repetition, presence, frequency = penalty_numbers(each.params)
            reduction = torch.where(count > 0, presence + frequency * count.double(), 0.0).float()
            at, repetition = token.long(), torch.tensor(repetition, dtype=torch.float32)
            values = logits[row, at]
            logits[row, at] = torch.where(values > 0, values / repetition, values * repetition) - reduction

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
    params = draw.params
    probabilities = torch.softmax((row.double() - row.max()) / params.temperature, dim=-1)
    if not params.is_filtered:
        return _pick_alone(probabilities, draw.uniform)
    candidates, token_ids = _candidates_alone(probabilities, params)
    return int(token_ids[_pick_alone(candidates, draw.uniform)])


def _candidates_alone(probabilities: torch.Tensor, params: DrawParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that top-k, then top-p, then min-p keep: their probabilities, descending, and their ids."""
    vocab_size = len(probabilities)
    count = min(params.top_k or vocab_size, vocab_size)
    candidates, token_ids = probabilities.topk(min(count, FIRST_LOOK))
    if len(candidates) < count and (params.top_p >= 1 or float(candidates.sum()) < params.top_p or params.top_k):
        candidates, token_ids = probabilities.topk(count)
    if params.top_p < 1:
        total = candidates.sum() if params.top_k else 1.0
        before = candidates.cumsum(0) - candidates
        candidates = candidates[before < params.top_p * total]
    if params.min_p > 0:
        candidates = candidates[candidates >= params.min_p * candidates[0]]
    candidates = candidates[:1] if len(candidates) == 0 else candidates
    return candidates, token_ids[: len(candidates)]


def _pick_alone(probabilities: torch.Tensor, uniform: float) -> int:
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True))
    return min(index, len(probabilities) - 1)
