"""One worker's part of a layer's mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.backend import LinearWeight
from ...kernels.experts import ExpertWeight
from .config import Activation
from .context import ForwardContext
from .layers import gated

GATE_UP, DOWN = (0, 1), (2,)  # indices in EXPERT_MODULES


@dataclass(frozen=True)
class SharedExpert:
    """An expert that computes every row, weighted by a gate of its own (Qwen2-MoE)."""

    gate_up: LinearWeight  # [2 * this worker's features, hidden]
    down: LinearWeight  # [hidden, this worker's features]
    gate: LinearWeight  # [1, hidden]

    def __call__(self, x: torch.Tensor, activation: Activation, context: ForwardContext) -> torch.Tensor:
        """This worker's partial sum."""
        kernels = context.kernels
        inner = gated(kernels.linear(x, self.gate_up, None), activation, kernels)
        return kernels.linear(x, self.gate, None).sigmoid() * kernels.linear(inner, self.down, None)


@dataclass(frozen=True)
class ExpertMlp:
    """The weighted sum of the experts that the layer's router chooses for each row.

    Workers share the experts (expert-parallel) or the features of each (tensor-parallel). Either way every worker has
    all rows and a partial sum of all outputs, and one all-reduce adds the partial sums up, as for a dense MLP.
    """

    router: LinearWeight  # [num_experts, hidden]: its outputs are the scores of the experts
    gate_up: ExpertWeight  # [this worker's experts, 2 * its features, hidden]
    down: ExpertWeight  # [this worker's experts, hidden, its features]
    first: int  # index of this worker's first expert
    num_experts: int  # of this worker
    top_k: int
    normalized: bool  # the chosen experts' weights add up to one
    activation: Activation
    shared: SharedExpert | None

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        kernels, lora = context.kernels.experts, context.kernels.lora
        # Every worker chooses by itself; the same x gives the same choice.
        chosen, weights = choose_experts(context.kernels.linear(x, self.router, None), self.top_k, self.normalized)
        groups = kernels.group(chosen, weights, self.first, self.num_experts)
        adapters = None
        if context.expert_lora is not None:
            adapters = context.kernels.expert_lora.of_pairs(context.expert_lora, groups, self.first)
        pairs = x[groups.rows]
        gate_up = kernels.linear(pairs, self.gate_up, groups)
        if adapters is not None:
            lora.add(gate_up, pairs, context.pool, layer, adapters, GATE_UP)
        inner = gated(gate_up, self.activation, context.kernels)
        down = kernels.linear(inner, self.down, groups)
        if adapters is not None:
            lora.add(down, inner, context.pool, layer, adapters, DOWN)
        y = kernels.combine(down, groups, len(x))
        if self.shared is not None:
            y = y + self.shared(x, self.activation, context)
        return y


def choose_experts(logits: torch.Tensor, top_k: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each row, `[num_rows, top_k]` int64, and their weights in float32."""
    weights, chosen = logits.float().softmax(-1).topk(top_k, dim=-1)
    return chosen, weights / weights.sum(-1, keepdim=True) if normalized else weights
