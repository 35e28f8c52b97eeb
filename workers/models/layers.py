"""One worker's part of a decoder layer, over all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels.backend import Kernels, LinearWeight
from .config import Activation
from .context import ForwardContext
from .passes import Pass


@dataclass(frozen=True)
class LoraLinear:
    """This worker's part of one or more modules that share an input, with the rows' adapters.

    Cut along outputs, it gives some of these, the modules side by side. Cut along inputs, it gives a partial sum of all
    outputs; base and adapters are in one sum.
    """

    weight: LinearWeight  # [sum of this worker's out, this worker's in]
    bias: torch.Tensor | None  # of partial sums on the first worker only, so that the sum has it once
    modules: tuple[int, ...]

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        y = context.kernels.layer_linear(x, self.weight, self.bias)
        if context.lora is not None:
            context.kernels.lora.add(y, x, context.pool, layer, context.lora, self.modules)
        return y


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm over each head of q and of k (Qwen3, Gemma 3)."""

    q: torch.Tensor  # [head_dim]
    k: torch.Tensor
    eps: float


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

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        kernels, batch = context.kernels, context.attention
        heads = self.qkv(x, layer, context).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.head_norm is not None:
            q = kernels.rms_norm(q, self.head_norm.q, self.head_norm.eps)
            k = kernels.rms_norm(k, self.head_norm.k, self.head_norm.eps)
        kv = context.kv[layer]
        q = kernels.write_kv(q, k, v, context.rotary[layer], kv, batch)
        attended = kernels.paged_attention(q, kv, batch, self.scale, self.window, self.softcap)
        return self.output(attended.flatten(1), layer, context)


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
        inner = gated(self.gate_up(x, layer, context), self.activation, context.kernels)
        return self.down(inner, layer, context)


def gated(gate_up: torch.Tensor, activation: Activation, kernels: Kernels) -> torch.Tensor:
    """activation(gate) * up of `[num_rows, 2 * width]`, gate first: `[num_rows, width]`."""
    return kernels.silu_mul(gate_up) if activation == "silu" else kernels.gelu_tanh_mul(gate_up)


@dataclass(frozen=True)
class DecoderLayer:
    index: int
    attention: Attention
    mlp: Mlp
    attention_norm: torch.Tensor  # [hidden]
    mlp_norm: torch.Tensor
    attention_post_norm: torch.Tensor | None  # norms the output of attention (Gemma); None: it is not normed
    mlp_post_norm: torch.Tensor | None  # norms the output of the MLP (Gemma)
    norm_eps: float

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: ForwardContext
    ) -> Pass[tuple[torch.Tensor, torch.Tensor]]:
        """The layer's output, and the residual that it is not yet added to, each `[num_rows, hidden]`."""
        kernels = context.kernels
        x, residual = kernels.add_rms_norm(x, residual, self.attention_norm, self.norm_eps)
        x = yield self.attention(x, self.index, context)
        if self.attention_post_norm is not None:
            x = kernels.rms_norm(x, self.attention_post_norm, self.norm_eps)
        x, residual = kernels.add_rms_norm(x, residual, self.mlp_norm, self.norm_eps)
        x = yield self.mlp(x, self.index, context)
        if self.mlp_post_norm is not None:
            x = kernels.rms_norm(x, self.mlp_post_norm, self.norm_eps)
        return x, residual
