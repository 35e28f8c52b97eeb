"""What parameters of draws mean, written out, and values of each to try: every test of kernels takes them from here."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from motet.kernels.sampling import Draw, DrawParams

WIDE = 50_000  # candidates: more than tests have tokens

# Beside the temperature, which no test draws from the same range.
FILTERS = {
    "top_k": st.one_of(st.just(0), st.integers(1, 60), st.just(WIDE)),
    "top_p": st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
}
# All of them are combined with each other.
GRID = {"top_k": (0, 1, 7, 2000), "top_p": (1.0, 0.97, 0.3), "min_p": (0.0, 0.001, 0.2)}


def draw_with(uniform: float, **params: float) -> Draw:
    return Draw(DrawParams(**params), uniform)  # type: ignore[arg-type]


def candidates(row: torch.Tensor, params: DrawParams, slack: float = 1e-5) -> set[int]:
    """The tokens of logits `[vocab]` that may be drawn. What is within `slack` of a limit may be either way."""
    probabilities, order = (row.double() / params.temperature).softmax(-1).sort(descending=True)
    kept = probabilities[: params.top_k] if params.top_k else probabilities
    total = float(kept.sum()) if params.top_k else 1.0
    kept = kept[(kept.cumsum(0) - kept) < params.top_p * total * (1 + slack)]
    kept = kept[kept >= params.min_p * kept[0] * (1 - slack)]
    return set(order[: max(1, len(kept))].tolist())
