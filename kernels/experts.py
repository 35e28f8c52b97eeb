"""The contract of mixture-of-experts products, for the kernels of every backend.

A few of a layer's experts compute each row of a batch. The unit is a pair of a row and an expert. Pairs are sorted by
expert, as in MegaBlocks (arXiv 2211.15841), and not padded, so that each expert's weights are read once for all of its
rows. x, the weights of experts and the results have one dtype, float32 or bfloat16; factors of pairs are float32.

Importing this needs no torch: routers and launchers read how a base chooses experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

ExpertWeight = Any  # a layer's weights `[num_experts, out, in]` as `pack_experts` laid them out; opaque to the caller


@dataclass(frozen=True)
class Routing:
    """How the scores of a layer's experts choose those of a row, and weight them.

    Groups of neighbours are DeepSeek V3's (arXiv 2412.19437, §2.1.2): a row's experts are of the `top_groups` groups
    whose `group_best` best experts have the highest sums: two, or one (DeepSeek V2).
    """

    top_k: int = 1  # experts of a row
    is_normalized: bool = False  # the weights of a row's experts are divided by their sum and `eps`
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False  # each expert's score has a bias, for the choice alone
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0  # of the weights
    eps: float = 0.0
    scales_inputs: bool = False  # weights multiply the experts' inputs, not their outputs (Llama 4)

    @property
    def is_plain(self) -> bool:
        """Whether the experts with the highest scores are chosen."""
        return not self.has_bias and self.num_groups == 1


def choose_experts(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, `[num_rows, top_k]` int64, and their weights in float32.

    `logits` `[num_rows, num_experts]`; `bias` `[num_experts]` float32, where the routing has one. `factors`: likewise,
    of the experts' weights; None: they are 1.
    """
    assert (bias is not None) == routing.has_bias, "a bias where the routing has one"
    logits = logits.float()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    if routing.is_plain and routing.scoring == "sigmoid":  # which are equal where they are near 1
        chosen = logits.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
    elif routing.is_plain:
        weights, chosen = scores.topk(routing.top_k, dim=-1)
    else:
        chosen = _open_to_choice(scores if bias is None else scores + bias, routing).topk(routing.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    if factors is not None:
        weights = weights * factors[chosen]
    return chosen, weights if routing.scale == 1.0 else weights * routing.scale


def _open_to_choice(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The scores, minus infinity in groups that a row does not choose."""
    if routing.num_groups == 1:
        return scores
    groups = scores.unflatten(-1, (routing.num_groups, -1))  # [num_rows, num_groups, experts of a group]
    best = groups.topk(routing.group_best, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
    is_closed = scores.new_ones(groups.shape[:-1]).scatter(-1, best, 0.0).bool()
    open_scores: torch.Tensor = groups.masked_fill(is_closed.unsqueeze(-1), -float("inf"))
    return open_scores.flatten(-2)


@dataclass(frozen=True)
class ExpertGroups:
    """A batch's pairs, sorted by expert; the pairs of one expert are in the order of their rows.

    Behind them a backend may have pairs of other workers' experts, so that how many there are depends on shapes alone.
    """

    rows: torch.Tensor  # [num_pairs] int64, the batch's row of each pair
    weights: torch.Tensor  # [num_pairs] float32, the factor of the expert's output in the row's sum
    offsets: torch.Tensor  # [num_experts + 1] int64: pairs of expert e are offsets[e] : offsets[e + 1]


def groups_of_all(num_rows: int, num_experts: int, device: torch.device) -> ExpertGroups:
    """Each expert has all rows: pair `expert * num_rows + row` is theirs. So heads with weights of their own have."""
    import torch

    rows = torch.arange(num_rows, device=device).repeat(num_experts)
    offsets = torch.arange(num_experts + 1, device=device) * num_rows
    return ExpertGroups(rows, torch.ones(len(rows), device=device), offsets)


class ExpertKernels(Protocol):
    """Called in this order for each layer: `group`, `linear` once for each weight, `combine`."""

    def group(self, experts: torch.Tensor, weights: torch.Tensor, first: int, num_experts: int) -> ExpertGroups:
        """The pairs of experts `first : first + num_experts`, which are those of this worker.

        `experts` `[num_rows, top_k]` int64 are the experts that the layer's router chose for each row, counted over all
        workers; `weights` `[num_rows, top_k]` are their factors. In the result expert `first` has the index 0.
        """

    def linear(
        self, x: torch.Tensor, weight: ExpertWeight, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each pair's row times its expert's weight, transposed: `[num_pairs, out]` of x `[num_pairs, in]`.

        Outputs for pairs of other workers' experts are undefined, and may be NaN.

        `weight` and `bias` `[num_experts, out]` hold exactly the experts that `groups` was made for.
        """

    def combine(self, x: torch.Tensor, groups: ExpertGroups, num_rows: int) -> torch.Tensor:
        """The weighted sum of each row's pairs of these experts, zeros without any.

        `[num_rows, width]` of x `[num_pairs, width]`.
        """
