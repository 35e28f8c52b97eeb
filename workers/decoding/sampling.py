"""Choosing tokens from logits.

A draw depends on nothing but the row's logits, its seed and the token's index, so a sequence that is computed again,
in another batch or on another gang, gets the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..messages import SamplingParams, TokenLogprobs
from ..scheduling.plan import SampledToken, SamplePlan

_FIRST_LOOK = 1024  # candidates tried before a whole vocabulary is sorted
_MASK = (1 << 64) - 1


def sample(logits: torch.Tensor, plans: Sequence[SamplePlan]) -> list[SampledToken | None]:
    """One token for each row of `[num_rows, vocab]` float32 logits, with log-probabilities where asked for.

    None for a row whose largest number is NaN or infinite: nothing can be chosen from it.
    """
    shaped = logits
    if any(_is_shaped(plan) for plan in plans):
        shaped = logits.clone()
        for row, plan in zip(shaped, plans, strict=True):
            _apply_penalties(row, plan)
    largest, most_likely = shaped.max(dim=-1)
    found: list[SampledToken | None] = []
    for i, (plan, token, is_finite) in enumerate(
        zip(plans, most_likely.tolist(), largest.isfinite().tolist(), strict=True)
    ):
        if not is_finite:
            found.append(None)
            continue
        chosen = _draw(shaped[i], plan) if plan.params.temperature > 0 else token
        has_logprobs = plan.params.num_logprobs is not None
        found.append(SampledToken(chosen, _logprobs(logits[i], chosen, plan.params) if has_logprobs else None))
    return found


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) fixed by its two arguments: SplitMix64 (Steele et al., OOPSLA 2014) of seed and index."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return float(((state ^ (state >> 31)) >> 11) * 2.0**-53)


def _is_shaped(plan: SamplePlan) -> bool:
    params = plan.params
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def _apply_penalties(row: torch.Tensor, plan: SamplePlan) -> None:
    """Repetition as in CTRL (arXiv 1909.05858) over prompt and output; presence and frequency over the output."""
    params = plan.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*plan.prompt_token_ids, *plan.output_token_ids}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if plan.output_token_ids and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.unique(torch.tensor(plan.output_token_ids, device=row.device), return_counts=True)
        row[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        biases = torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        row.index_add_(0, torch.tensor(list(params.logit_bias), device=row.device), biases)


def _draw(row: torch.Tensor, plan: SamplePlan) -> int:
    """A token by inverse transform over the candidates, most likely first."""
    params = plan.params
    # In double and from the largest down, so that the smallest temperature is greedy instead of NaN.
    probabilities = torch.softmax((row.double() - row.max()) / params.temperature, dim=-1)
    if params.top_k == 0 and params.top_p >= 1 and params.min_p == 0:
        return _pick(probabilities, uniform(plan.seed, plan.index))
    kept, token_ids = _candidates(probabilities, params)
    return int(token_ids[_pick(kept, uniform(plan.seed, plan.index))])


def _candidates(probabilities: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, descending, and ids of the tokens that top-k, top-p and min-p leave, in this order."""
    vocab_size = len(probabilities)
    count = min(params.top_k or vocab_size, vocab_size)
    kept, token_ids = probabilities.topk(min(count, _FIRST_LOOK))
    if len(kept) < count and (params.top_p >= 1 or float(kept.sum()) < params.top_p or params.top_k):
        kept, token_ids = probabilities.topk(count)
    if params.top_p < 1:
        total = kept.sum() if params.top_k else 1.0
        before = kept.cumsum(0) - kept
        kept = kept[before < params.top_p * total]
    if params.min_p > 0:
        kept = kept[kept >= params.min_p * kept[0]]
    kept = kept[:1] if len(kept) == 0 else kept
    return kept, token_ids[: len(kept)]


def _pick(probabilities: torch.Tensor, draw: float) -> int:
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, cumulative[-1:] * draw, right=True))
    return min(index, len(probabilities) - 1)


def _logprobs(row: torch.Tensor, token: int, params: SamplingParams) -> TokenLogprobs:
    logprobs = torch.log_softmax(row, dim=-1)
    top_logprobs, top_ids = logprobs.topk(min(params.num_logprobs or 0, len(row)))
    return TokenLogprobs(float(logprobs[token]), top_ids.tolist(), top_logprobs.tolist())
