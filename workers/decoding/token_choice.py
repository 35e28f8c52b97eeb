"""Choosing tokens from logits.

A draw depends only on the row's logits, its seed and the token's index, so a sequence that is computed again, in
another batch or on another gang, gets the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from ...kernels.joint_sampling import ChoicesUnderWay, Chosen, RowChoice
from ...kernels.sampling import NO_MASKS, NOT_FINITE, Draw, Penalty, SamplingKernels
from ..plan import SampledToken, SamplePlan
from ..wire.messages import TokenLogprobs, TokenRules
from .mask_source import TokenMask, mask_of
from .token_counts import TokenCounts

_MASK = (1 << 64) - 1
_BANNED = float("-inf")
_HIGHEST = RowChoice(None, None, {}, None)  # of most rows; made once


def sample(
    logits: torch.Tensor,
    plans: Sequence[SamplePlan],
    kernels: SamplingKernels,
    counts: Sequence[TokenCounts | None] = (),
    masks: Mapping[int, TokenMask] = NO_MASKS,
) -> list[SampledToken | None]:
    """One token for each row of `[num_rows, vocab]` float32 logits, with log-probabilities where requested.

    None for a row whose largest number is NaN or infinite: no token can be chosen from it. Everything is computed where
    the logits are, on a GPU by `ChoicesUnderWay`, on the CPU by `kernels`.

    `counts`: each row's token counts, if its sequence has penalties; empty: no row has any. `masks`: by row, of those
    that may choose only some tokens. Changes logits in place.
    """
    if logits.device.type != "cpu":
        return sampled(begin_sample(logits, plans, counts, masks).read())
    masks = _narrowed(masks, plans, counts, logits.shape[1])
    penalised = [row for row, each in enumerate(counts) if each is not None]
    biased = [row for row, plan in enumerate(plans) if plan.params.logit_bias or plan.params.rules is not None]
    # Log-probabilities are those before any shaping, and which token's are wanted is known only afterwards.
    raw_rows = {row: logits[row].clone() for row in {*penalised, *biased} if plans[row].params.num_logprobs is not None}
    if penalised:
        kernels.penalise(logits, penalised, [_penalty_of(plans[row], counts[row]) for row in penalised])
    for row in biased:
        if bias := _bias_of(plans[row], counts[row] if counts else None, masks.get(row)):
            logits[row].index_add_(0, torch.tensor([*bias]), torch.tensor([*bias.values()], dtype=logits.dtype))
    listed = kernels.highest(logits, masks).tolist()
    drawn = [i for i, plan in enumerate(plans) if plan.params.temperature > 0 and listed[i] != NOT_FINITE]
    if drawn:
        tokens = kernels.draw(logits, drawn, [_draw_of(plans[i]) for i in drawn], masks)
        for row, token in zip(drawn, tokens.tolist(), strict=True):
            listed[row] = token
    for row, raw in raw_rows.items():
        logits[row] = raw
    logprobs = _logprobs(logits, listed, plans)
    return [None if token == NOT_FINITE else SampledToken(token, logprobs.get(i)) for i, token in enumerate(listed)]


def begin_sample(
    logits: torch.Tensor,
    plans: Sequence[SamplePlan],
    counts: Sequence[TokenCounts | None] = (),
    masks: Mapping[int, TokenMask] = NO_MASKS,
) -> ChoicesUnderWay:
    """As `sample` on a GPU, without a wait."""
    seen = counts or [None] * len(plans)
    masks = _narrowed(masks, plans, counts, logits.shape[1])
    choices = [_choice_of(plan, of, masks.get(row)) for row, (plan, of) in enumerate(zip(plans, seen, strict=True))]
    return ChoicesUnderWay(logits, choices)


def _choice_of(plan: SamplePlan, seen: TokenCounts | None, mask: TokenMask | None) -> RowChoice:
    params = plan.params
    is_free = seen is None and mask is None and not params.logit_bias and params.rules is None
    if is_free and params.temperature <= 0 and params.num_logprobs is None:
        return _HIGHEST
    return RowChoice(
        _draw_of(plan) if params.temperature > 0 else None,
        _penalty_of(plan, seen) if seen is not None else None,
        _bias_of(plan, seen, mask),
        params.num_logprobs,
        mask,
    )


def sampled(choices: Iterable[Chosen | None]) -> list[SampledToken | None]:
    """The choices as a step's result carries them."""
    return [_sampled(chosen) for chosen in choices]


def _sampled(chosen: Chosen | None) -> SampledToken | None:
    if chosen is None:
        return None
    if chosen.logprob is None:
        return SampledToken(chosen.token_id, None)
    return SampledToken(chosen.token_id, TokenLogprobs(chosen.logprob, chosen.top_ids, chosen.top_logprobs))


def _draw_of(plan: SamplePlan) -> Draw:
    return Draw(plan.params, uniform(plan.seed, plan.index))


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) fixed by its two arguments: SplitMix64 (Steele et al., OOPSLA 2014) of seed and index."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return float(((state ^ (state >> 31)) >> 11) * 2.0**-53)


def _penalty_of(plan: SamplePlan, counts: TokenCounts | None) -> Penalty:
    assert counts is not None
    return Penalty(plan.params, counts.token_ids, counts.counts)


def _narrowed(
    masks: Mapping[int, TokenMask],
    plans: Sequence[SamplePlan],
    counts: Sequence[TokenCounts | None],
    vocab_size: int,
) -> Mapping[int, TokenMask]:
    """The masks by row, with those of rows that may choose some tokens alone, and without what rules forbid."""
    row_masks = dict[int, TokenMask]()
    for row, plan in enumerate(plans):
        rules = plan.params.rules
        if rules is None:
            continue
        mask, seen = masks.get(row), counts[row] if counts else None
        if (forced := _forced(seen, mask)) is not None:
            row_masks[row] = mask_of((forced,), vocab_size)
        elif mask is not None:
            row_masks[row] = _within_rules(mask, rules, plan.index, seen, vocab_size)
        elif rules.allowed_token_ids:
            row_masks[row] = mask_of(rules.allowed_token_ids, vocab_size)
    return {**masks, **row_masks} if row_masks else masks


def _forced(seen: TokenCounts | None, mask: TokenMask | None) -> int | None:
    """The only token that may come; None: there are others."""
    forced = None if seen is None or seen.thoughts is None else seen.thoughts.forced
    if forced is not None and mask is not None and not mask[forced // 8] >> forced % 8 & 1:
        return None  # a mask does not allow it within a character: that comes to its end first
    return forced


def _within_rules(
    mask: TokenMask, rules: TokenRules, index: int, seen: TokenCounts | None, vocab_size: int
) -> TokenMask:
    """Of what a grammar allows, what the rules do, too. It may end early only where it must end."""
    words = np.frombuffer(mask, np.int32)
    if rules.allowed_token_ids:
        words = words & np.frombuffer(mask_of(rules.allowed_token_ids, vocab_size), np.int32)
    if banned := _banned(rules, seen):
        words = words & ~np.frombuffer(mask_of((*banned,), vocab_size), np.int32)
    if index < rules.min_tokens and rules.late_token_ids:
        later = words & ~np.frombuffer(mask_of(rules.late_token_ids, vocab_size), np.int32)
        words = later if later.any() else words
    return words.tobytes()


def _banned(rules: TokenRules, seen: TokenCounts | None) -> list[int]:
    """The last tokens of bad words."""
    banned = [word[0] for word in rules.bad_words if len(word) == 1]
    return banned if seen is None or seen.bad_words is None else [*banned, *seen.bad_words.banned()]


def _bias_of(plan: SamplePlan, seen: TokenCounts | None, mask: TokenMask | None) -> Mapping[int, float]:
    """What is added to the logits of these tokens; minus infinity: it may not be chosen. Grammars' masks have rules."""
    rules = plan.params.rules
    if rules is None or plan.is_constrained:
        return plan.params.logit_bias
    if _forced(seen, mask) is not None:
        return {}
    banned = _banned(rules, seen)
    if plan.index < rules.min_tokens:
        banned += rules.late_token_ids
    return plan.params.logit_bias | dict.fromkeys(banned, _BANNED)


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], plans: Sequence[SamplePlan]) -> dict[int, TokenLogprobs]:
    """By row, for rows that ask for log-probabilities and have a token."""
    by_count: dict[int, list[int]] = {}
    for row, plan in enumerate(plans):
        if plan.params.num_logprobs is not None and tokens[row] != NOT_FINITE:
            by_count.setdefault(plan.params.num_logprobs, []).append(row)
    by_row = {}
    for count, rows in by_count.items():
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        top_logprobs, top_ids = logprobs.topk(min(count, logits.shape[1]))
        token_ids = torch.tensor([tokens[row] for row in rows], device=logits.device).unsqueeze(1)
        listed = (logprobs.gather(1, token_ids).squeeze(1).tolist(), top_ids.tolist(), top_logprobs.tolist())
        for row, chosen, ids, values in zip(rows, *listed, strict=True):
            by_row[row] = TokenLogprobs(chosen, ids, values)
    return by_row
