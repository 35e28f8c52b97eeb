"""Choosing tokens from logits.

A draw depends on nothing but the row's logits, its seed and the token's index, so a sequence that is computed again,
in another batch or on another gang, gets the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.sampling import NOT_FINITE, Draw, SamplingKernels
from ..plan import SampledToken, SamplePlan
from ..wire.messages import TokenLogprobs

_MASK = (1 << 64) - 1


def sample(logits: torch.Tensor, plans: Sequence[SamplePlan], kernels: SamplingKernels) -> list[SampledToken | None]:
    """One token for each row of `[num_rows, vocab]` float32 logits, with log-probabilities where asked for.

    None for a row whose largest number is NaN or infinite: no token can be chosen from it. Everything is computed where
    the logits are. The host waits for the device once, and once more if a row keeps only some candidates.
    """
    shaped = logits
    if any(_is_shaped(plan) for plan in plans):
        shaped = logits.clone()
        for row, plan in zip(shaped, plans, strict=True):
            _apply_penalties(row, plan)
    chosen = kernels.highest(shaped)
    drawn = [i for i, plan in enumerate(plans) if plan.params.temperature > 0]
    if drawn and logits.device.type == "cpu":  # reading the result costs nothing on the CPU
        highest = chosen.tolist()
        drawn = [i for i in drawn if highest[i] != NOT_FINITE]
    if drawn:
        tokens = kernels.draw(shaped, drawn, [_draw_of(plans[i]) for i in drawn])
        chosen[drawn] = torch.where(chosen[drawn] == NOT_FINITE, NOT_FINITE, tokens)
    listed = chosen.tolist()
    logprobs = _logprobs(logits, listed, plans)
    return [None if token == NOT_FINITE else SampledToken(token, logprobs.get(i)) for i, token in enumerate(listed)]


def _draw_of(plan: SamplePlan) -> Draw:
    params = plan.params
    return Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniform(plan.seed, plan.index))


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


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], plans: Sequence[SamplePlan]) -> dict[int, TokenLogprobs]:
    """By row, for rows that ask for log-probabilities and have a token."""
    by_count: dict[int, list[int]] = {}
    for row, plan in enumerate(plans):
        if plan.params.num_logprobs is not None and tokens[row] != NOT_FINITE:
            by_count.setdefault(plan.params.num_logprobs, []).append(row)
    found = {}
    for count, rows in by_count.items():
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        top_logprobs, top_ids = logprobs.topk(min(count, logits.shape[1]))
        own = torch.tensor([tokens[row] for row in rows], device=logits.device).unsqueeze(1)
        listed = (logprobs.gather(1, own).squeeze(1).tolist(), top_ids.tolist(), top_logprobs.tolist())
        for row, chosen, ids, values in zip(rows, *listed, strict=True):
            found[row] = TokenLogprobs(chosen, ids, values)
    return found
