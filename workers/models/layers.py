"""One worker's part of a decoder layer, over all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ...kernels.attention import AttentionBatch, LayerKV
from ...kernels.backend import Kernels, LinearWeight
from ...kernels.expert_lora import ExpertLoraBatch
from ...kernels.experts import ExpertWeight, Routing, choose_experts
from ...kernels.latent_lora import LatentLoraBatch
from ...kernels.lora import LoraBatch
from ...kernels.model_ends import StepEnds
from ...kernels.norms import Activation, Ungated, activate, affine, scale_to_unit
from ...kernels.output_vectors import OutputBatch
from ...kernels.recurrence import LayerState, Rule, StateBatch
from ..parallel import Parallel
from .passes import Pass

# The arguments that a forward pass hands to every layer beside the hidden states.


@dataclass(frozen=True)
class TokenEmbeddings:
    """Of the rows of a step."""

    token_ids: torch.Tensor  # [num_rows]
    embedded: torch.Tensor  # [num_rows, hidden], as the first layer has them


@dataclass(frozen=True)
class ForwardContext:
    """One step's batch as the layers see it."""

    kernels: Kernels
    parallel: Parallel
    pool: torch.Tensor  # [num_pages, num_layers, slab]
    attention: AttentionBatch
    lora: LoraBatch | None  # None: no row has an adapter
    expert_lora: ExpertLoraBatch | None  # None: no row has an adapter with parts for experts
    rotary: tuple[torch.Tensor, ...]  # by layer, [num_positions, 2, head_dim // 2] each
    kv: tuple[LayerKV, ...]  # by layer with attention, views of the pool
    states: StateBatch | None = None  # None: no layer has a recurrent state
    state_places: tuple[LayerState, ...] = ()  # by layer with a recurrent state
    has_narrow_lora: bool = False  # an adapter has LoRA of a router or of a shared expert's gate
    tokens: TokenEmbeddings | None = None  # None: no layer takes of its token what is not in the residual
    latent_lora: LatentLoraBatch | None = None  # None: no row has LoRA of what latent attention absorbs
    outputs: OutputBatch | None = None  # None: no row's adapter scales or shifts outputs
    ends: StepEnds | None = None  # None: no row's adapter changes the embedding or the head


@dataclass(frozen=True)
class LoraLinear:
    """This worker's part of one or more modules that share an input, with the rows' adapters.

    They are computed together, with one product of the base, one shrink and one expand.

    Cut along outputs, it gives some of these, the modules side by side. Cut along inputs, it gives a partial sum of all
    outputs; base and adapters are in one sum.
    """

    weight: LinearWeight  # [sum of this worker's out, this worker's in]
    bias: torch.Tensor | None  # of partial sums on the first worker only, so that the sum has it once
    modules: tuple[int, ...]  # indices in `BaseShape.dense_modules`

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        y = context.kernels.layer_linear(x, self.weight, self.bias)
        if context.lora is not None:
            context.kernels.lora.add(y, x, context.pool, layer, context.lora, self.modules)
        if context.outputs is not None:
            context.kernels.outputs.apply(y, context.pool, layer, context.outputs, self.modules)
        return y


@dataclass(frozen=True)
class NarrowLinear(LoraLinear):
    """A linear of few outputs: its adapters' outputs are padded, see `BaseShape.padding`."""

    padded_out: int

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        y = context.kernels.linear(x, self.weight, self.bias)
        if context.lora is None or not context.has_narrow_lora:
            return y
        padded = y.new_zeros(len(y), self.padded_out)
        context.kernels.lora.add(padded, x, context.pool, layer, context.lora, self.modules)
        return y + padded[:, : y.shape[1]]


@dataclass(frozen=True)
class HeadNorm:
    """A norm over each head of q and of k (Qwen3, Gemma 3), or over all heads of each at once (OLMo 2)."""

    q: torch.Tensor  # [head_dim], or [this worker's columns of q]
    k: torch.Tensor
    eps: float
    spans_heads: bool = False
    v: torch.Tensor | None = None  # [head_dim] ones; None: v is not normed (it is in Gemma 4)
    # Layer norms, and what each column of q and of k is multiplied by behind them (Cohere); None: RMS norms.
    of_columns: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Of q and k `[num_rows, heads, head_dim]`; k may have no heads."""
        norm, parallel = context.kernels.rms_norm, context.parallel
        if self.of_columns is not None:
            centred = context.kernels.add_norm(True)
            normed = (centred(x.flatten(0, 1), None, self.q, self.eps)[0].view(len(x), -1) for x in (q, k))
            both = (affine(x, weight, None) for x, weight in zip(normed, self.of_columns, strict=True))
            q, k = (x.view(each.shape) for x, each in zip(both, (q, k), strict=True))
            return q, k
        if not self.spans_heads:
            return norm(q, self.q, self.eps), norm(k, self.k, self.eps) if k.shape[1] else k
        all_q, all_k = q.flatten(1), k.flatten(1)
        if parallel.degree == 1:
            return norm(all_q, self.q, self.eps).view(q.shape), norm(all_k, self.k, self.eps).view(k.shape)
        # Workers have equally many heads, and each KV head is on equally many: the mean of their means is that of all.
        means = torch.stack([part.float().square().mean(-1, keepdim=True) for part in (all_q, all_k)])
        of_q, of_k = parallel.all_reduce(means / parallel.degree)
        return (
            scale_to_unit(all_q, of_q, self.q, self.eps).view(q.shape),
            scale_to_unit(all_k, of_k, self.k, self.eps).view(k.shape),
        )


@dataclass(frozen=True)
class Attention:
    """Self-attention over paged KV with grouped queries: this worker's partial sum."""

    qkv: LoraLinear
    output: LoraLinear
    head_norm: HeadNorm | None
    num_heads: int  # of this worker
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    kv_index: int  # among the layers with a KV of their own
    has_kv: bool = True  # False: the KV is that of a layer before it, and it computes q alone
    is_gated: bool = False  # before q there is a gate of the output
    sinks: torch.Tensor | None = None  # [num_heads] float32
    beside: RecurrentMixer | None = None  # what reads the same input, and is added (Falcon-H1)
    query_factors: torch.Tensor | None = None  # [num_heads * head_dim] float32, behind the rotary embedding (Hunyuan)

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        kernels, batch = context.kernels, context.attention
        columns, gate = self.qkv(x, layer, context), None
        if self.is_gated:
            num_gates = self.num_heads * self.head_dim
            gate, columns = columns[:, :num_gates], columns[:, num_gates:].contiguous()
        heads = columns.view(x.shape[0], -1, self.head_dim)
        num_written = self.num_kv_heads if self.has_kv else 0
        q, k, v = heads.split_with_sizes([self.num_heads, num_written, num_written], dim=1)
        if self.head_norm is not None:
            q, k = self.head_norm(q, k, context)
            if self.head_norm.v is not None and self.has_kv:
                v = kernels.rms_norm(v, self.head_norm.v, self.head_norm.eps)
        kv = context.kv[self.kv_index]
        q = kernels.write_kv(q, k, v, context.rotary[layer], kv, batch)
        if self.query_factors is not None:
            q = affine(q.flatten(1), self.query_factors, None).view(q.shape)
        attended = kernels.paged_attention(q, kv, batch, self.scale, self.window, self.softcap, self.sinks)
        attended = attended.flatten(1)
        if gate is not None:
            attended = kernels.multiply_gate(attended, gate)
        y = self.output(attended, layer, context)
        return y if self.beside is None else y + self.beside(x, layer, context)


@dataclass(frozen=True)
class GroupNorm:
    """RMS norm over a group of which this worker has a part, as large as that of each other worker of the group."""

    weight: torch.Tensor  # [this worker's columns]
    eps: float
    group: int
    num_groups: int

    def __call__(self, x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        means = x.new_zeros(len(x), self.num_groups, dtype=torch.float32)
        means[:, self.group] = x.float().square().mean(-1) * self.num_groups / parallel.degree
        of_group = parallel.all_reduce(means)[:, self.group, None]
        return scale_to_unit(x, of_group, self.weight, self.eps)


@dataclass(frozen=True)
class RecurrentMixer:
    """A rule with a state of a fixed size in place of attention: this worker's partial sum."""

    inputs: LoraLinear
    output: LoraLinear
    rule: Rule
    state_index: int  # among the layers with a recurrent state
    norm: GroupNorm | None = None  # of what the rule gives, where the rule does not norm it itself

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        assert context.states is not None, "a step's states come with its rows"
        columns, place = self.inputs(x, layer, context), context.state_places[self.state_index]
        mixed = context.kernels.recur(columns, self.rule, context.pool, place, context.states)
        if self.norm is not None:
            mixed = self.norm(mixed, context.parallel)
        return self.output(mixed, layer, context)


class Mixer(Protocol):
    """The first half of a layer: this worker's partial sum, `[num_rows, hidden]`."""

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor: ...


class Mlp(Protocol):
    """The second half of a layer, dense or with experts: this worker's partial sum, `[num_rows, hidden]`."""

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor: ...


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    gate_up: LoraLinear
    down: LoraLinear
    activation: Activation

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        inner = context.kernels.gated(self.gate_up(x, layer, context), self.activation)
        return self.down(inner, layer, context)


@dataclass(frozen=True)
class UngatedMlp:
    """output(activation(up(x)))."""

    up: LoraLinear
    output: LoraLinear
    activation: Ungated

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        return self.output(activate(self.up(x, layer, context), self.activation), layer, context)


class LayerEnd(Protocol):
    """What a layer adds to the residual last, `[num_rows, hidden]`, of that residual and of its token (Gemma 4)."""

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> Pass[torch.Tensor]: ...


@dataclass(frozen=True)
class DecoderLayer:
    index: int
    attention: Mixer  # where layers have one half alone: that, which may be an MLP, or experts
    mlp: Mlp | None
    attention_norm: torch.Tensor | None  # [hidden]; None: attention reads the residual
    mlp_norm: torch.Tensor | None
    attention_post_norm: torch.Tensor | None  # norms the output of attention (Gemma); None: it is not normed
    mlp_post_norm: torch.Tensor | None  # norms the output of the MLP (Gemma)
    norm_eps: float
    centred_norms: bool = False  # those before the halves are layer norms
    is_parallel: bool = False  # the MLP has the input that attention has
    beside: ExpertsBeside | None = None
    end: LayerEnd | None = None
    norm_biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # of attention_norm and mlp_norm
    scalar: float = 1.0  # of the layer's output

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: ForwardContext
    ) -> Pass[tuple[torch.Tensor, torch.Tensor | None]]:
        """The layer's output, and the residual that it is not yet added to, each `[num_rows, hidden]`; None: it is."""
        kernels = context.kernels
        bias, mlp_bias = self.norm_biases
        first, residual = self._enter(x, residual, self.attention_norm, bias, kernels)
        x = yield self.attention(first, self.index, context)
        if self.attention_post_norm is not None:
            x = kernels.rms_norm(x, self.attention_post_norm, self.norm_eps)
        if self.mlp is None:
            return x, residual
        x, residual = self._enter(x, residual, self.mlp_norm, mlp_bias, kernels)
        x = yield self.mlp(first if self.is_parallel else x, self.index, context)
        if self.beside is not None:
            x = yield from self.beside(x, residual, self.index, context)
        if self.mlp_post_norm is not None:
            x = kernels.rms_norm(x, self.mlp_post_norm, self.norm_eps)
        if not self.is_whole:
            return x, residual
        x = x + residual
        if self.end is not None:
            x = x + (yield from self.end(x, self.index, context))
        return x * self.scalar, None

    @property
    def is_whole(self) -> bool:
        """Its output has the residual in it."""
        return self.end is not None or self.scalar != 1.0

    def _enter(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor | None,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of a half of the layer, and the residual with x added."""
        if norm is not None:
            normed, total = kernels.add_norm(self.centred_norms)(x, residual, norm, self.norm_eps)
            return normed if bias is None else affine(normed, None, bias), total
        total = x if residual is None else x + residual
        return total, total


# One worker's part of a layer's mixture of experts.

EXPERT_GATE_UP, EXPERT_UP, EXPERT_DOWN = (0, 1), (1,), (2,)  # indices in EXPERT_MODULES


def _inner(gate_up: torch.Tensor, activation: Activation, kernels: Kernels) -> torch.Tensor:
    """What an expert's down projection reads, of gates and ups or of ups alone."""
    return activate(gate_up, activation) if isinstance(activation, Ungated) else kernels.gated(gate_up, activation)


@dataclass(frozen=True)
class SharedExpert:
    """An expert that computes every row, weighted by a gate of its own (Qwen2-MoE) or as it is (DeepSeek)."""

    gate_up: LoraLinear  # to 2 * this worker's features, or without a gate as many
    down: LoraLinear
    gate: NarrowLinear | None  # to 1

    def __call__(self, x: torch.Tensor, layer: int, activation: Activation, context: ForwardContext) -> torch.Tensor:
        """This worker's partial sum."""
        inner = _inner(self.gate_up(x, layer, context), activation, context.kernels)
        y = self.down(inner, layer, context)
        return y if self.gate is None else self.gate(x, layer, context).sigmoid() * y


@dataclass(frozen=True)
class ExpertMlp:
    """The weighted sum of the experts that the layer's router chooses for each row.

    Workers share the experts (expert-parallel) or the features of each (tensor-parallel). Either way every worker has
    all rows and a partial sum of all outputs, and one all-reduce adds the partial sums up, as for a dense MLP.
    """

    router: NarrowLinear  # its outputs are the scores of the experts
    gate_up: ExpertWeight  # [this worker's experts, 2 * its features, hidden]; without a gate as many as features
    down: ExpertWeight  # [this worker's experts, hidden, its features]
    first: int  # index of this worker's first expert
    num_experts: int  # of this worker
    routing: Routing
    activation: Activation
    shared: SharedExpert | None
    dense: GatedMlp | None = None  # computes every row too (Granite 4)
    choice_bias: torch.Tensor | None = None  # [num_experts] float32, of the scores for the choice alone
    gate_up_bias: torch.Tensor | None = None  # [this worker's experts, 2 * its features]
    down_bias: torch.Tensor | None = None  # [this worker's experts, hidden], once where workers share features
    factors: torch.Tensor | None = None  # [num_experts] float32, of the experts' weights
    # Experts read what the first gives, of fewer features than hidden, and their sum goes through the second, which is
    # linear (Nemotron-H). None: they read x.
    latent: tuple[LoraLinear, LoraLinear] | None = None

    @property
    def up_modules(self) -> tuple[int, ...]:
        """Indices in EXPERT_MODULES of what `gate_up` computes."""
        return EXPERT_UP if isinstance(self.activation, Ungated) else EXPERT_GATE_UP

    def __call__(
        self, x: torch.Tensor, layer: int, context: ForwardContext, routed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`routed`: what the router reads; None: x."""
        kernels, lora, multiply = context.kernels.experts, context.kernels.lora, context.kernels.expert_linear
        # Every worker chooses by itself; the same x gives the same choice.
        scores = self.router(x if routed is None else routed, layer, context)
        chosen, weights = choose_experts(scores, self.routing, self.choice_bias, self.factors)
        groups = kernels.group(chosen, weights, self.first, self.num_experts)
        adapters = None
        if context.expert_lora is not None:
            adapters = context.kernels.expert_lora.of_pairs(context.expert_lora, groups, self.first)
        pairs = (x if self.latent is None else self.latent[0](x, layer, context))[groups.rows]
        if self.routing.scales_inputs:
            pairs = pairs * groups.weights.to(x.dtype).unsqueeze(1)
            groups = replace(groups, weights=torch.ones_like(groups.weights))
        gate_up = multiply(pairs, self.gate_up, groups, self.gate_up_bias)
        if adapters is not None:
            lora.add(gate_up, pairs, context.pool, layer, adapters, self.up_modules)
        inner = _inner(gate_up, self.activation, context.kernels)
        down = multiply(inner, self.down, groups, self.down_bias)
        if adapters is not None:
            lora.add(down, inner, context.pool, layer, adapters, EXPERT_DOWN)
        y = kernels.combine(down, groups, len(x))
        if self.latent is not None:
            y = self.latent[1](y, layer, context)
        if self.dense is not None:
            y = y + self.dense(x, layer, context)
        if self.shared is not None:
            y = y + self.shared(x, layer, self.activation, context)
        return y


@dataclass(frozen=True)
class ExpertsBeside:
    """Experts beside a layer's dense MLP: both outputs are normed and added (Gemma 4). Both read the residual."""

    experts: ExpertMlp
    router_norm: torch.Tensor  # [hidden] float32
    norm: torch.Tensor  # [hidden], of what the experts read
    post_norm: torch.Tensor  # of their output
    dense_post_norm: torch.Tensor  # of that of the dense MLP
    eps: float

    def __call__(
        self, dense: torch.Tensor, residual: torch.Tensor, layer: int, context: ForwardContext
    ) -> Pass[torch.Tensor]:
        """`dense`: the output of the dense MLP."""
        norm = context.kernels.rms_norm
        routed, x = (norm(residual, weight, self.eps) for weight in (self.router_norm, self.norm))
        y = yield self.experts(x, layer, context, routed)
        return norm(dense, self.dense_post_norm, self.eps) + norm(y, self.post_norm, self.eps)
