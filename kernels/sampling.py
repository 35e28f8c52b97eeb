"""Choosing tokens by logits: what every backend's kernels take and give.

Greedily, or drawn by inverse transform: a number in [0, 1) is held against the running sum of the candidates'
probabilities. Without a filter the candidates are all tokens, in their order. Top-k, top-p and min-p, in this order,
leave the most likely ones, the most likely first; one is always left. Probabilities are those of logits over
temperature, in double. A row's draw depends on its own logits and `Draw` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch


@dataclass(frozen=True)
class Draw:
    """How one token is drawn."""

    temperature: float  # above 0
    top_k: int  # candidates at most; 0: all
    top_p: float  # candidates until their probabilities, of what top-k left, reach so much
    min_p: float  # candidates at least so likely, beside the likeliest
    uniform: float  # in [0, 1)


NOT_FINITE: Final = -1  # instead of a token


class SamplingKernels(Protocol):
    """Of logits `[num_rows, vocab]` float32; tokens are int64, on the logits' device."""

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """The token with the highest logit of each row `[num_rows]`, the first of several.

        NOT_FINITE where the highest is infinite, or any is NaN.
        """

    def draw(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> torch.Tensor:
        """A token for each of these rows: `[len(rows)]`.

        On a CPU the highest logit of each of them must be finite; on a GPU, where nobody can look, a token of such a
        row means nothing.
        """
