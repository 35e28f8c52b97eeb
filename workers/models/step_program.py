"""A decoder as the list of operations that its step is, for kernels that carry out a step in one call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from ...kernels.attention import LayerKV
from ...kernels.backend import Kernels
from ...kernels.step import (
    AddLora,
    AddNorm,
    Attend,
    Embed,
    Gated,
    Heads,
    Linear,
    Norm,
    Operation,
    Program,
    Step,
    WriteKV,
)
from ..parallel import Parallel
from .decoder import Decoder
from .layers import Attention, DecoderLayer, GatedMlp, LoraLinear

_log = logging.getLogger(__name__)

# Registers: the residual; the normed input of a half of a layer; its output; q, k and v; q as it is rotated; what is
# attended to; gate and up; their product.
RESIDUAL, NORMED, OUTPUT, QKV, ROTATED, ATTENDED, GATE_UP, INNER = range(8)


def prepare_step(
    decoder: Decoder,
    kernels: Kernels,
    parallel: Parallel,
    pool: torch.Tensor,
    rotary: Sequence[torch.Tensor],
    kv: Sequence[LayerKV],
) -> Step | None:
    """The decoder's step; None: its kernels are called one by one, and the log says why where they are native."""
    if kernels.step is None:
        return None
    reason = why_not(decoder, kernels, parallel, kv)
    if reason is not None:
        _log.info("kernels are called one by one, not as one program for each step: %s", reason)
        return None
    return kernels.step.prepare(program_of(decoder, rotary, kv), pool)


def why_not(decoder: Decoder, kernels: Kernels, parallel: Parallel, kv: Sequence[LayerKV]) -> str | None:
    """Why a step of this decoder cannot be one program; None: it can."""
    if parallel.degree > 1:
        return "several workers exchange sums within a step"
    if any(not isinstance(layer.mlp, GatedMlp) for layer in decoder.layers):
        return "this base has experts"
    if kernels.float8 is not None or not all(isinstance(layer, torch.Tensor) for layer in kv):
        return "weights or KV have eight bits"
    assert kernels.step is not None
    return kernels.step.why_not([heads_of(layer.attention) for layer in decoder.layers])


def heads_of(attention: Attention) -> Heads:
    return Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim)


def program_of(decoder: Decoder, rotary: Sequence[torch.Tensor], kv: Sequence[LayerKV]) -> Program:
    """Of a decoder whose layers are all dense."""
    operations: list[Operation] = [Embed(RESIDUAL, decoder.embedding, decoder.embedding_scale)]
    for layer in decoder.layers:
        operations += _layer(layer, rotary[layer.index], kv[layer.index], is_first=layer.index == 0)
    operations.append(AddNorm(OUTPUT, RESIDUAL, NORMED, decoder.norm, decoder.norm_eps))
    return Program(_widths(decoder), tuple(operations), NORMED)


def _widths(decoder: Decoder) -> tuple[int, ...]:
    """By register. Layers are alike."""
    hidden, first = decoder.embedding.shape[1], decoder.layers[0]
    heads, mlp = heads_of(first.attention), first.mlp
    assert isinstance(mlp, GatedMlp)
    query, inner = heads.num_heads * heads.head_dim, mlp.down.weight.num_in
    qkv = query + 2 * heads.num_kv_heads * heads.head_dim
    return hidden, hidden, hidden, qkv, query, query, 2 * inner, inner


def _layer(layer: DecoderLayer, rotary: torch.Tensor, kv: LayerKV, *, is_first: bool) -> Iterator[Operation]:
    attention, mlp, eps, heads = layer.attention, layer.mlp, layer.norm_eps, heads_of(layer.attention)
    assert isinstance(mlp, GatedMlp)
    if is_first:  # nothing is to be added to the residual yet
        yield AddNorm(RESIDUAL, None, NORMED, layer.attention_norm, eps)
    else:
        yield AddNorm(OUTPUT, RESIDUAL, NORMED, layer.attention_norm, eps)
    yield from _linear(attention.qkv, NORMED, QKV, layer.index)
    if attention.head_norm is not None:
        norm = attention.head_norm
        yield Norm(QKV, 0, heads.num_heads, norm.q, norm.eps)
        yield Norm(QKV, heads.num_heads * heads.head_dim, heads.num_kv_heads, norm.k, norm.eps)
    yield WriteKV(QKV, ROTATED, heads, rotary, kv)
    yield Attend(ROTATED, ATTENDED, heads, kv, attention.scale, attention.window, attention.softcap)
    yield from _linear(attention.output, ATTENDED, OUTPUT, layer.index)
    if layer.attention_post_norm is not None:
        yield Norm(OUTPUT, 0, 1, layer.attention_post_norm, eps)
    yield AddNorm(OUTPUT, RESIDUAL, NORMED, layer.mlp_norm, eps)
    yield from _linear(mlp.gate_up, NORMED, GATE_UP, layer.index)
    yield Gated(GATE_UP, INNER, mlp.activation)
    yield from _linear(mlp.down, INNER, OUTPUT, layer.index)
    if layer.mlp_post_norm is not None:
        yield Norm(OUTPUT, 0, 1, layer.mlp_post_norm, eps)


def _linear(linear: LoraLinear, x: int, to: int, layer: int) -> Iterator[Operation]:
    yield Linear(x, to, linear.weight, linear.bias)
    yield AddLora(x, to, layer, linear.modules)
