"""Drawing tokens from logits: what every backend's kernel takes and gives.

By inverse transform: a number in [0, 1) is held against the running sum of the candidates' probabilities. Without a
filter the candidates are all tokens, in their order. Top-k, top-p and min-p, in this order, leave the most likely ones,
the most likely first; one is always left. Probabilities are those of logits over temperature, in double. A row's draw
depends on its own logits and `Draw` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Draw:
    """How one token is drawn."""

    temperature: float  # above 0
    top_k: int  # candidates at most; 0: all
    top_p: float  # candidates until their probabilities, of what top-k left, reach so much
    min_p: float  # candidates at least so likely, beside the likeliest
    uniform: float  # in [0, 1)


class DrawTokens(Protocol):
    def __call__(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> torch.Tensor:
        """A token for each of these rows of logits `[num_rows, vocab]` float32: `[len(rows)]` int64, on their device.

        On a CPU the highest logit of each row must be finite; on a GPU, where nobody can look, a token of such a row
        means nothing.
        """
