"""Sampling in plain torch: the plain twin, which the fast kernels are tested against.

On a CPU rows are drawn one after the other, so that a row stays in the cache. On a GPU, where each answer to the host
costs a wait, all rows are drawn together. A row's token is the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..sampling import NOT_FINITE, Draw, Penalty

FIRST_LOOK = 1024  # likeliest tokens that are tried as candidates before the whole vocabulary is sorted


class PlainSampling:
    """`sampling.SamplingKernels` on any device."""

    def penalise(self, logits: torch.Tensor, rows: Sequence[int], penalties: Sequence[Penalty]) -> None:
        """See `sampling.SamplingKernels`. All rows together, in one copy to the device and a few launches."""
        known = [(row, each) for row, each in zip(rows, penalties, strict=True) if each.token_ids]
        if not known:
            return
        numbers = [each.token_ids for _, each in known] + [each.counts for _, each in known]
        staged = torch.cat([torch.frombuffer(part, dtype=torch.int32) for part in numbers])
        if logits.device.type == "cuda":
            staged = staged.pin_memory()
        token, count = staged.to(logits.device, non_blocking=True).chunk(2)
        factors = [(row, each.repetition, each.presence, each.frequency) for row, each in known]
        table = torch.tensor(factors, dtype=torch.float64, device=logits.device)
        lengths = torch.tensor([len(each.token_ids) for _, each in known], device=logits.device)
        row, repetition, presence, frequency = table.repeat_interleave(lengths, 0, output_size=len(token)).unbind(1)
        at, repetition = (row.long(), token.long()), repetition.float()
        taken = torch.where(count > 0, presence + frequency * count, 0.0).float()
        values = logits[at]
        logits[at] = torch.where(values > 0, values / repetition, values * repetition) - taken

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """See `sampling.SamplingKernels`."""
        values, tokens = logits.max(dim=-1)
        return torch.where(values.isfinite(), tokens, NOT_FINITE)

    def draw(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> torch.Tensor:
        """See `sampling.SamplingKernels`."""
        if logits.device.type != "cpu":
            return draw_together(logits[list(rows)], draws)
        tokens = [draw_alone(logits[row], draw) for row, draw in zip(rows, draws, strict=True)]
        return torch.tensor(tokens, dtype=torch.int64)


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


def draw_together(rows: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """A token `[num_rows]` for each row `[num_rows, vocab]` of logits: what `draw_alone` draws of each."""

    def each(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).to(rows.device, non_blocking=True).unsqueeze(1)

    # As in `draw_alone`: in float64, the highest logit subtracted first.
    scaled = (rows.double() - rows.amax(-1, keepdim=True)) / each([draw.temperature for draw in draws])
    probabilities = torch.softmax(scaled, dim=-1)
    drawn = each([draw.uniform for draw in draws])
    tokens = torch.empty(len(draws), dtype=torch.int64, device=rows.device)
    whole = [i for i, draw in enumerate(draws) if draw.top_k == 0 and draw.top_p >= 1 and draw.min_p == 0]
    if whole:
        tokens[whole] = _pick(probabilities[whole], drawn[whole])
    for some, sorted_, token_ids in _candidates(probabilities, draws, [i for i in range(len(draws)) if i not in whole]):
        kept = _kept(sorted_, [draws[i] for i in some])
        tokens[some] = token_ids.gather(1, _pick(kept, drawn[some]).unsqueeze(1)).squeeze(1)
    return tokens


def _candidates(
    probabilities: torch.Tensor, params: Sequence[Draw], rows: list[int]
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """(rows, probabilities, tokens) with the likeliest tokens of these rows, at least all that their filters can keep.

    Probabilities descend. Most rows are done with FIRST_LOOK tokens; the others get the whole vocabulary.
    """
    if not rows:
        return
    vocab_size = probabilities.shape[1]
    sorted_, token_ids = probabilities[rows].topk(min(FIRST_LOOK, vocab_size))
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


def _kept(sorted_: torch.Tensor, params: Sequence[Draw]) -> torch.Tensor:
    """`sorted_` `[num_rows, count]`, descending, with zeros for tokens that top-k, then top-p, then min-p drop."""

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
    """`[num_rows]`: the first index at which a row's running sum exceeds its draw `[num_rows, 1]` times its total."""
    cumulative = probabilities.cumsum(-1)
    found = torch.searchsorted(cumulative, cumulative[:, -1:] * draws, right=True).squeeze(1)
    place = torch.arange(probabilities.shape[1], device=probabilities.device)
    last = (place * (probabilities > 0)).amax(-1)  # rounding of the sums must not choose a token of probability zero
    return torch.minimum(found, last)
