"""Choosing tokens from logits.

A draw depends on nothing but the row's logits, its seed and the token's index, so a sequence that is computed again,
in another batch or on another gang, gets the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..messages import SamplingParams, TokenLogprobs
from ..scheduling.plan import SampledToken, SamplePlan

_FIRST_LOOK = 1024  # candidates tried before a whole vocabulary is sorted
_MASK = (1 << 64) - 1


def sample(logits: torch.Tensor, plans: Sequence[SamplePlan]) -> list[SampledToken | None]:
    """One token for each row of `[num_rows, vocab]` float32 logits, with log-probabilities where asked for.

    None for a row whose largest number is NaN or infinite: nothing can be chosen from it. All of it is computed where
    the logits are; the host waits once, and once more if a row keeps some candidates only.
    """
    shaped = logits
    if any(_is_shaped(plan) for plan in plans):
        shaped = logits.clone()
        for row, plan in zip(shaped, plans, strict=True):
            _apply_penalties(row, plan)
    largest, chosen = shaped.max(dim=-1)
    drawn = [i for i, plan in enumerate(plans) if plan.params.temperature > 0]
    for some in _at_once(drawn, logits.device):
        chosen[some] = _draw(shaped[some], [plans[i] for i in some])
    tokens, finite = torch.stack((chosen, largest.isfinite().long())).tolist()
    logprobs = _logprobs(logits, tokens, plans)
    return [
        SampledToken(token, logprobs.get(i)) if is_finite else None
        for i, (token, is_finite) in enumerate(zip(tokens, finite, strict=True))
    ]


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


def _at_once(rows: list[int], device: torch.device) -> list[list[int]]:
    """Rows that are drawn together: one by one on a CPU, whose cache holds no more; all on a GPU."""
    return [[row] for row in rows] if device.type == "cpu" else [rows] if rows else []


def _draw(rows: torch.Tensor, plans: Sequence[SamplePlan]) -> torch.Tensor:
    """A token for each row `[num_rows, vocab]` by inverse transform over the candidates, most likely first.

    What is computed of a row is the same whatever the others ask for.
    """

    def each(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).to(rows.device, non_blocking=True).unsqueeze(1)

    params = [plan.params for plan in plans]
    # In double and from the largest down, so that the smallest temperature is greedy instead of NaN.
    scaled = (rows.double() - rows.amax(-1, keepdim=True)) / each([p.temperature for p in params])
    probabilities = torch.softmax(scaled, dim=-1)
    draws = each([uniform(plan.seed, plan.index) for plan in plans])
    tokens = torch.empty(len(plans), dtype=torch.int64, device=rows.device)
    whole = [i for i, p in enumerate(params) if p.top_k == 0 and p.top_p >= 1 and p.min_p == 0]
    if whole:
        tokens[whole] = _pick(probabilities[whole], draws[whole])
    for some, sorted_, token_ids in _candidates(
        probabilities, params, [i for i in range(len(plans)) if i not in whole]
    ):
        kept = _kept(sorted_, [params[i] for i in some])
        tokens[some] = token_ids.gather(1, _pick(kept, draws[some]).unsqueeze(1)).squeeze(1)
    return tokens


def _candidates(
    probabilities: torch.Tensor, params: Sequence[SamplingParams], rows: list[int]
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """The most likely tokens of those rows, as many as their parameters can leave: rows, probabilities, descending, and
    tokens. A few do for most; the others get the whole vocabulary."""
    if not rows:
        return
    vocab_size = probabilities.shape[1]
    sorted_, token_ids = probabilities[rows].topk(min(_FIRST_LOOK, vocab_size))
    more = [place for place, i in enumerate(rows) if sorted_.shape[1] < (params[i].top_k or vocab_size)]
    if any(params[rows[place]].top_k == 0 and params[rows[place]].top_p < 1 for place in more):
        mass = sorted_.sum(-1).tolist()
        tops = {place: params[rows[place]] for place in more}
        more = [place for place, p in tops.items() if p.top_k or p.top_p >= 1 or mass[place] < p.top_p]
    enough = [place for place in range(len(rows)) if place not in more]
    if enough:
        yield [rows[place] for place in enough], sorted_[enough], token_ids[enough]
    if more:
        those = [rows[place] for place in more]
        yield those, *probabilities[those].topk(vocab_size)


def _kept(sorted_: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities `[num_rows, count]`, descending, zero where top-k, top-p and min-p, in this order, drop one."""

    def each(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).to(sorted_.device, non_blocking=True).unsqueeze(1)

    count = sorted_.shape[1]
    rank = torch.arange(count, device=sorted_.device)
    kept = sorted_ * (rank < each([p.top_k or count for p in params]))
    total = torch.where(each([p.top_k for p in params]) > 0, kept.sum(-1, keepdim=True), 1.0)
    top_p = each([p.top_p for p in params])
    inside = (kept.cumsum(-1) - kept < top_p * total) | (top_p >= 1)
    likely = kept >= each([p.min_p for p in params]) * kept[:, :1]
    return kept * ((inside & likely) | (rank == 0))


def _pick(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The place `[num_rows]` at which each row's running sum passes its draw `[num_rows, 1]` of the whole."""
    cumulative = probabilities.cumsum(-1)
    found = torch.searchsorted(cumulative, cumulative[:, -1:] * draws, right=True).squeeze(1)
    place = torch.arange(probabilities.shape[1], device=probabilities.device)
    last = (place * (probabilities > 0)).amax(-1)  # what has no weight is never chosen, however a sum was rounded
    return torch.minimum(found, last)


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], plans: Sequence[SamplePlan]) -> dict[int, TokenLogprobs]:
    """By row, of those that asked for any."""
    by_count: dict[int, list[int]] = {}
    for row, plan in enumerate(plans):
        if plan.params.num_logprobs is not None:
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
