"""Sampling of all rows of a step together, for a GPU: one copy to it, and one back, for which the host waits.

The result is that of `sampling.py`, row by row. Probabilities are computed in float64 for some rows at a time, so
that they never take more than a fixed part of the device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch

from .sampling import NOT_FINITE, NUM_DRAW_NUMBERS, Draw, DrawParams, Penalty, draw_numbers, penalty_numbers
from .staging import Arriving, staged

FIRST_LOOK = 1024  # likeliest tokens that are tried as candidates before the whole vocabulary is sorted
_NOT_ENOUGH = -2  # in place of a token: filters may keep more candidates than the first look took
_MOST_BYTES = 64 << 20  # of one float64 copy of logits


@dataclass(frozen=True)
class RowChoice:
    """How the token of a row is chosen, and which log-probabilities are returned with it."""

    draw: Draw | None  # None: the highest logit
    penalty: Penalty | None
    bias: Mapping[int, float]  # is added to the logits of these tokens; minus infinity: it may not be chosen
    num_logprobs: int | None  # of this many likeliest tokens beside the chosen one; None: no log-probabilities at all
    mask: bytes | None = None  # a bit for each token, the lowest first, in int32 words: 0 is never chosen


class Chosen(NamedTuple):
    token_id: int
    logprob: float | None  # before any shaping; None: not requested
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class _Drawn:
    """Rows that are drawn alike, with their numbers on the device, `[num_rows, 1]` float64 each."""

    rows: torch.Tensor  # [num_rows] int64
    draws: torch.Tensor  # [numbers, num_rows, 1]: the fields of `DrawParams`, and u
    num_candidates: int  # candidates, the likeliest first; 0: no filter, so the whole vocabulary in its order


class ChoicesUnderWay:
    """The token of each row of `[num_rows, vocab]` float32 logits, which the device computes: only `read` waits for it.

    None for a row whose highest logit is infinite, or that has a NaN.
    """

    def __init__(self, logits: torch.Tensor, choices: Sequence[RowChoice]) -> None:
        """Changes the logits in place. They must stay as they are until `read`, if a token `may_change`."""
        self._choices = choices
        self._reported = reported = [row for row, choice in enumerate(choices) if choice.num_logprobs is not None]
        groups = _groups(choices, logits.shape[1])
        self._logprobs: torch.Tensor | None = None
        drawn: list[_Drawn] = []
        shaped = any(c.penalty is not None or c.bias or c.mask for c in choices)
        if reported or groups or shaped:
            reported_rows, drawn, shaping = _on_device(logits.device, reported, groups, choices)
            if reported:
                self._logprobs = torch.log_softmax(logits.index_select(0, reported_rows), dim=-1)
            _shape(logits, shaping)
        values, highest = logits.max(dim=-1)
        self.token_ids = chosen = torch.where(values.isfinite(), highest, NOT_FINITE)  # [num_rows], on the device
        for group in drawn:
            tokens = _draw(logits, group)
            chosen.index_copy_(0, group.rows, torch.where(chosen.index_select(0, group.rows) < 0, NOT_FINITE, tokens))
        answer = [chosen]
        if self._logprobs is not None:
            num_top = max(choices[row].num_logprobs or 0 for row in reported)
            reported_tokens = chosen.index_select(0, reported_rows).clamp(min=0)
            top_logprobs, top_ids = self._logprobs.topk(min(num_top, logits.shape[1]))
            answer += [self._logprobs.gather(1, reported_tokens.unsqueeze(1)), top_logprobs, top_ids]
        # Until `read`, a negative token may stand for a row that has to be drawn from the whole vocabulary.
        self.may_change = any(_may_need_more(choice.draw, logits.shape[1]) for choice in choices)
        self._logits = logits if self.may_change else None  # otherwise their memory is free for the next step
        self._answer = Arriving(answer)

    def read(self) -> list[Chosen | None]:
        """Waits for the tokens; afterwards `token_ids` are the same on the device. May be called once."""
        choices, reported = self._choices, self._reported
        token_ids, *tops = (part.tolist() for part in self._answer.read())
        if not reported and not self.may_change:
            return [None if token_id == NOT_FINITE else Chosen(token_id, None, [], []) for token_id in token_ids]
        of_row = dict(zip(reported, zip(*tops, strict=True), strict=True)) if reported else {}
        chances = {row: values[0] for row, (values, _, _) in of_row.items()}
        lacking = [row for row, token_id in enumerate(token_ids) if token_id == _NOT_ENOUGH]
        if lacking:
            assert self._logits is not None
            again = _draw_from_all(self._logits, self._logprobs, self.token_ids, lacking, reported, choices)
            for row, (token_id, chance) in again.items():
                token_ids[row], chances[row] = token_id, chance
        self.may_change = False
        results: list[Chosen | None] = []
        for row, (token_id, choice) in enumerate(zip(token_ids, choices, strict=True)):
            count = choice.num_logprobs
            _, logprobs_of, ids_of = of_row.get(row, (None, [], []))
            result = Chosen(token_id, None if count is None else chances[row], ids_of[:count], logprobs_of[:count])
            results.append(None if token_id == NOT_FINITE else result)
        return results


def _groups(choices: Sequence[RowChoice], vocab_size: int) -> list[tuple[list[int], int]]:
    """Groups of rows to draw, each with its number of candidates; the float64 copy of a group has a bounded size."""
    by_count: dict[int, list[int]] = {}
    for row, choice in enumerate(choices):
        if choice.draw is not None:
            by_count.setdefault(_num_candidates(choice.draw.params, vocab_size), []).append(row)
    size = max(_MOST_BYTES // (8 * vocab_size), 1)
    return [(rows[at : at + size], count) for count, rows in by_count.items() for at in range(0, len(rows), size)]


def _num_candidates(params: DrawParams, vocab_size: int) -> int:
    if not params.is_filtered:
        return 0
    return vocab_size if params.top_k > FIRST_LOOK else min(FIRST_LOOK, vocab_size)


def _may_need_more(draw: Draw | None, vocab_size: int) -> bool:
    """Whether filters may keep more candidates than the first look takes."""
    if draw is None or draw.params.top_k > 0:
        return False
    return 0 < _num_candidates(draw.params, vocab_size) < vocab_size


@dataclass(frozen=True)
class _Shaping:
    """Penalties, biases and masks, one entry for each token of each row that has any."""

    factors: torch.Tensor  # [num_penalised, 4] float64: row, repetition, presence, frequency
    lengths: torch.Tensor  # [num_penalised] int64, entries of each
    bias_at: torch.Tensor  # [2, num_biased] int64: rows and tokens
    bias: torch.Tensor  # [num_biased] float32
    masked: torch.Tensor  # [num_masked] int64: rows
    masks: torch.Tensor  # [num_masked, num_words] int32
    penalised: torch.Tensor  # [2, num_entries] int32: tokens, and how often each is in the output


def _on_device(
    device: torch.device, reported: list[int], groups: list[tuple[list[int], int]], choices: Sequence[RowChoice]
) -> tuple[torch.Tensor, list[_Drawn], _Shaping]:
    """Everything that the device needs, in one copy."""
    penalties = [(row, c.penalty) for row, c in enumerate(choices) if c.penalty is not None and c.penalty.token_ids]
    biases = [(row, token, value) for row, c in enumerate(choices) for token, value in c.bias.items()]
    drawn_rows = list(chain.from_iterable(rows for rows, _ in groups))
    draws = [choices[row].draw for row in drawn_rows]
    masked = [row for row, choice in enumerate(choices) if choice.mask is not None]
    words = torch.frombuffer(
        bytearray().join([choices[row].mask or b"" for row in masked]) or bytearray(4), dtype=torch.int32
    )
    numbers = [(*draw_numbers(draw.params), draw.uniform) for draw in draws if draw is not None]
    counted = [torch.frombuffer(p.token_ids, dtype=torch.int32) for _, p in penalties]
    counted += [torch.frombuffer(p.counts, dtype=torch.int32) for _, p in penalties]
    on_device = staged(
        device,
        torch.tensor(numbers, dtype=torch.float64).view(-1, NUM_DRAW_NUMBERS).t().contiguous(),
        torch.tensor([(row, *penalty_numbers(p.params)) for row, p in penalties], dtype=torch.float64),
        torch.tensor([*reported, *drawn_rows, *masked], dtype=torch.int64),
        torch.tensor([len(p.token_ids) for _, p in penalties], dtype=torch.int64),
        torch.tensor([[row for row, _, _ in biases], [token for _, token, _ in biases]], dtype=torch.int64),
        torch.tensor([value for _, _, value in biases], dtype=torch.float32),
        torch.cat([torch.empty(0, dtype=torch.int32), *counted]).view(2, -1),
        words[: 0 if not masked else None].view(len(masked), -1 if masked else 0),
    )
    of_draws, factors, rows, lengths, bias_at, bias, penalised, masks = on_device
    drawn, at = [], 0
    for group, count in groups:
        part = slice(at, at + len(group))
        drawn.append(_Drawn(rows[len(reported) :][part], of_draws[:, part].unsqueeze(2), count))
        at += len(group)
    of_masks = rows[len(reported) + len(drawn_rows) :]
    shaping = _Shaping(factors, lengths, bias_at, bias, of_masks, masks, penalised)
    return rows[: len(reported)], drawn, shaping


def _shape(logits: torch.Tensor, shaping: _Shaping) -> None:
    """Penalties, then biases, then masks. No token of a row has two entries."""
    if len(shaping.lengths):
        token, count = shaping.penalised
        entries = shaping.factors.repeat_interleave(shaping.lengths, 0, output_size=len(token))
        row, repetition, presence, frequency = entries.unbind(1)
        at, repetition = (row.long(), token.long()), repetition.float()
        reduction = torch.where(count > 0, presence + frequency * count, 0.0).float()
        values = logits[at]
        logits[at] = torch.where(values > 0, values / repetition, values * repetition) - reduction
    if len(shaping.bias):
        at = (shaping.bias_at[0], shaping.bias_at[1])
        logits[at] = logits[at] + shaping.bias
    vocab_size = logits.shape[1]
    max_rows = max(_MOST_BYTES // (4 * vocab_size), 1)
    for start in range(0, len(shaping.masked), max_rows):
        rows, words = shaping.masked[start : start + max_rows], shaping.masks[start : start + max_rows]
        bits = words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=logits.device)
        forbidden = ((bits & 1) == 0).view(len(rows), -1)[:, :vocab_size]
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


def _draw(logits: torch.Tensor, group: _Drawn) -> torch.Tensor:
    """A token `[num_rows]` for each row of a group; _NOT_ENOUGH where its filters may keep more candidates."""
    rows = logits.index_select(0, group.rows)
    temperature, top_k, top_p, min_p, uniform = group.draws
    # The highest logit is subtracted in float64, so that the smallest temperature gives the greedy token and not NaN.
    probabilities = torch.softmax((rows.double() - rows.amax(-1, keepdim=True)) / temperature, dim=-1)
    if group.num_candidates == 0:
        return _pick(probabilities, uniform)
    likeliest, token_ids = probabilities.topk(group.num_candidates)
    tokens = token_ids.gather(1, _pick(_filter(likeliest, top_k, top_p, min_p), uniform).unsqueeze(1)).squeeze(1)
    if group.num_candidates == logits.shape[1]:
        return tokens
    reached = (top_p < 1) & (likeliest.sum(-1, keepdim=True) >= top_p)
    enough = (top_k > 0) | reached | (likeliest[:, -1:] < min_p * likeliest[:, :1])
    return torch.where(enough.squeeze(1), tokens, _NOT_ENOUGH)


def _filter(likeliest: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`likeliest` `[num_rows, count]`, descending, with zeros for tokens that top-k, then top-p, then min-p drop."""
    rank = torch.arange(likeliest.shape[1], device=likeliest.device)
    weights = likeliest * ((rank < top_k) | (top_k == 0))
    total = torch.where(top_k > 0, weights.sum(-1, keepdim=True), 1.0)
    inside = (weights.cumsum(-1) - weights < top_p * total) | (top_p >= 1)
    return weights * ((inside & (weights >= min_p * weights[:, :1])) | (rank == 0))


def _pick(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`[num_rows]`: the first index at which a row's running sum exceeds its `uniform` `[num_rows, 1]` of its total."""
    cumulative = probabilities.cumsum(-1)
    index = torch.searchsorted(cumulative, cumulative[:, -1:] * uniform, right=True).squeeze(1)
    place = torch.arange(probabilities.shape[1], device=probabilities.device)
    last = (place * (probabilities > 0)).amax(-1)  # rounding of the sums must not choose a token of probability zero
    return torch.minimum(index, last)


def _draw_from_all(
    logits: torch.Tensor,
    logprobs: torch.Tensor | None,
    chosen: torch.Tensor,
    lacking: list[int],
    reported: list[int],
    choices: Sequence[RowChoice],
) -> dict[int, tuple[int, float]]:
    """Draws these rows from the whole vocabulary: the token of each and, for `reported` rows, its log-probability.

    Writes the tokens into `chosen`.
    """
    vocab_size = logits.shape[1]
    max_rows = max(_MOST_BYTES // (8 * vocab_size), 1)
    groups = [(lacking[at : at + max_rows], vocab_size) for at in range(0, len(lacking), max_rows)]
    alone = [replace(choice, penalty=None, bias={}, mask=None) for choice in choices]  # they are shaped
    places = [reported.index(row) if row in reported else 0 for row in lacking]
    at, drawn, _ = _on_device(logits.device, places, groups, alone)
    tokens = torch.cat([_draw(logits, group) for group in drawn])
    chosen.index_copy_(0, torch.cat([group.rows for group in drawn]), tokens)
    chances = torch.zeros_like(tokens, dtype=torch.float32)
    if logprobs is not None:
        chances = logprobs.index_select(0, at).gather(1, tokens.unsqueeze(1)).squeeze(1)
    token_ids, logprob_list = (part.tolist() for part in Arriving([tokens, chances]).read())
    return dict(zip(lacking, zip(token_ids, logprob_list, strict=True), strict=True))
