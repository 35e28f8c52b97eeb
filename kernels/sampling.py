"""The contract of sampling, which chooses a token for each row of logits, for the kernels of every backend.

A token is either the one with the highest logit or drawn by inverse transform sampling: with a number u in [0, 1), the
first candidate at which the running sum of probabilities exceeds u times their total. Probabilities are the softmax of
logits / temperature, in float64. Without a filter all tokens are candidates, in the order of the vocabulary. Top-k
(arXiv 1805.04833), then top-p (arXiv 1904.09751), then min-p (arXiv 2407.01082) keep the most likely tokens, the most
likely first, and always at least one. A row's draw depends on nothing but its own logits and its `Draw`.

Importing this needs no torch: routers know the parameters.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    import torch


class DrawParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The table of parameters of draws. Each default changes nothing.

    Messages to gangs have these fields (`SamplingParams`), and requests have fields of these names, which are copied
    to them. Kernels get them as doubles in this order, and then the random number.
    """

    temperature: float = 1.0  # above 0, or 0: no draw, the token with the highest logit
    top_k: int = 0  # the most candidates to keep; 0: all
    top_p: float = 1.0  # keeps the likeliest candidates until they have this share of the probability that top-k left
    min_p: float = 0.0  # keeps candidates with at least this share of the likeliest one's probability

    @property
    def is_filtered(self) -> bool:
        """Some tokens are no candidates."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class ShapingParams(DrawParams, frozen=True, kw_only=True, omit_defaults=True):
    """Also the table of penalties: how the tokens that a sequence has already are made less likely, or more.

    Repetition is CTRL's (arXiv 1909.05858), as transformers computes it: it counts once for each token that the
    sequence has, its prompt included. Presence and frequency are OpenAI's: they count in the output alone.
    """

    repetition_penalty: float = 1.0  # positive logits are divided by it, the others multiplied
    presence_penalty: float = 0.0  # is taken from the logit of each token in the output
    frequency_penalty: float = 0.0  # is taken as many times as the token is in the output


# Every parameter with a value that changes something: a worker's warm-up draws with them, and tests send them.
EXAMPLE_PARAMS: Final = ShapingParams(
    top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
)

PENALTIES: Final = ShapingParams.__struct_fields__[len(DrawParams.__struct_fields__) :]
draw_numbers: Final = attrgetter(*DrawParams.__struct_fields__)  # the parameters of a draw, as a tuple
penalty_numbers: Final = attrgetter(*PENALTIES)
NO_PENALTIES: Final = penalty_numbers(ShapingParams())
NUM_DRAW_NUMBERS: Final = len(DrawParams.__struct_fields__) + 1  # with u


class Draw(NamedTuple):
    """How one token is drawn."""

    params: DrawParams  # of a temperature above 0
    uniform: float  # the random number u, in [0, 1)


class Penalty(NamedTuple):
    """The penalties of one row, and the tokens that they change."""

    params: ShapingParams
    token_ids: array[int]  # the tokens that the sequence has, each once, as "i"
    counts: array[int]  # how often each of them is in the output, as "i"


NOT_FINITE: Final = -1  # what `highest` returns in place of a token
NO_MASKS: Final[Mapping[int, bytes]] = MappingProxyType({})


class SamplingKernels(Protocol):
    """For a CPU; of a GPU's rows `joint_sampling.ChoicesUnderWay` has all tokens. Logits are `[num_rows, vocab]`
    float32, tokens int64.

    `masks`: by row, of those that may have only some tokens: a bit for each token, the lowest first, in whole int32
    words; what is 0 counts as if it were no token.
    """

    def penalise(self, logits: torch.Tensor, rows: Sequence[int], penalties: Sequence[Penalty]) -> None:
        """Changes each of `rows` as the `Penalty` of the same index says, in place: first repetition, then the others.

        No row is named twice.
        """

    def highest(self, logits: torch.Tensor, masks: Mapping[int, bytes] = NO_MASKS) -> torch.Tensor:
        """The token with the highest logit of each row, `[num_rows]`; of equal logits the first token.

        NOT_FINITE for a row whose highest logit is infinite, or that has a NaN.
        """

    def draw(
        self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw], masks: Mapping[int, bytes] = NO_MASKS
    ) -> torch.Tensor:
        """A token for each of `rows`, drawn by the `Draw` of the same index: `[len(rows)]`.

        The highest logit of each of these rows must be finite.
        """
