"""A decoder as the list of operations that its step is, for kernels that carry out a step in one call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from ...adapters.adapter import EXPERT_MODULES
from ...kernels.attention import LayerKV
from ...kernels.backend import Kernels
from ...kernels.norms import Activation, Ungated
from ...kernels.recurrence import LayerState
from ...kernels.step import (
    Activate,
    Add,
    AddExpertLora,
    AddGated,
    AddLora,
    AddNarrowLora,
    AddNorm,
    Affine,
    Attend,
    ChooseExperts,
    CombinePairs,
    Embed,
    ExpertLinear,
    Gated,
    Heads,
    JoinEmbedding,
    Linear,
    MultiplyGate,
    Norm,
    Operation,
    Program,
    Recur,
    Step,
    TakePairs,
    WriteKV,
)
from ..parallel import Parallel
from .decoder import Decoder
from .latent_attention import LatentAttention
from .layer_input import LayerInput
from .layers import (
    EXPERT_DOWN,
    Attention,
    DecoderLayer,
    ExpertMlp,
    GatedMlp,
    LoraLinear,
    NarrowLinear,
    RecurrentMixer,
    UngatedMlp,
)

_log = logging.getLogger(__name__)

# Registers: the residual; the normed input of a half of a layer; its output; q, k and v; q as it is rotated; what is
# attended to; gate and up; their product. Of experts: their scores; the pairs' inputs, gates and ups, products and
# outputs; the same of the expert that computes every row, and its gate. Of a layer with a recurrent state: its inputs,
# and what comes of them. Of a layer with an input beside the residual: the embedding, what is projected of it, the
# gate, both with the token's own, and their product. The output of what is beside attention.
RESIDUAL, NORMED, OUTPUT, QKV, ROTATED, ATTENDED, GATE_UP, INNER = range(8)
SCORES, PAIRS, PAIRS_GATE_UP, PAIRS_INNER, PAIRS_OUTPUT = range(8, 13)
SHARED_GATE_UP, SHARED_INNER, SHARED_OUTPUT, SHARED_GATE = range(13, 17)
RECURRENT, MIXED = 17, 18
PADDED_SCORES, PADDED_GATE = 19, 20  # what adapters add to scores and gates
EMBEDDED, OWN, INPUT_GATE, JOINED, INPUT = range(21, 26)
ROUTED, EXPERTS = 26, 27  # of experts beside a dense MLP
BESIDE = 28
LATENT, LATENT_SUM = 29, 30  # what experts read and give, where they have fewer features
NUM_NAMES = 31


def prepare_step(
    decoder: Decoder,
    kernels: Kernels,
    parallel: Parallel,
    pool: torch.Tensor,
    rotary: Sequence[torch.Tensor],
    kv: Sequence[LayerKV],
    states: Sequence[LayerState] = (),
) -> Step | None:
    """The decoder's step; None: its kernels are called one by one, and the log says why where they are native."""
    if kernels.step is None:
        return None
    reason = why_not(decoder, kernels, parallel, kv)
    if reason is not None:
        _log.info("kernels are called one by one, not as one program for each step: %s", reason)
        return None
    return kernels.step.prepare(program_of(decoder, rotary, kv, states), pool)


def why_not(decoder: Decoder, kernels: Kernels, parallel: Parallel, kv: Sequence[LayerKV]) -> str | None:
    """Why a step of this decoder cannot be one program; None: it can."""
    if parallel.degree > 1:
        return "several workers exchange sums within a step"
    if kernels.float8 is not None or not all(isinstance(layer, torch.Tensor) for layer in kv):
        return "weights or KV have eight bits"
    if any(isinstance(layer.attention, LatentAttention) for layer in decoder.layers):
        return "latent attention has no operations of it"
    assert kernels.step is not None
    return kernels.step.why_not([heads_of(attention) for attention in _attentions(decoder)])


def _attentions(decoder: Decoder) -> list[Attention]:
    return [layer.attention for layer in decoder.layers if isinstance(layer.attention, Attention)]


def heads_of(attention: Attention) -> Heads:
    return Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim)


def program_of(
    decoder: Decoder, rotary: Sequence[torch.Tensor], kv: Sequence[LayerKV], states: Sequence[LayerState] = ()
) -> Program:
    """`kv` and `states`: of the layers that have them. `rotary`: of all."""
    hidden = decoder.embedding.shape[1]
    whole = {RESIDUAL: hidden, NORMED: hidden, OUTPUT: hidden, EMBEDDED: hidden}
    registers = {(name, width): name for name, width in whole.items() if name != EMBEDDED}
    operations: list[Operation] = [Embed(RESIDUAL, decoder.embedding, decoder.embedding_scale)]
    if decoder.layers[0].end is not None:
        operations.append(_named(Embed(EMBEDDED, decoder.embedding, decoder.embedding_scale), whole, registers))
    is_added = True  # what the layer before gave is in the residual
    for layer in decoder.layers:
        mixer, x = layer.attention, _input(layer.attention_norm)
        if isinstance(mixer, Attention):
            mixing = _attention(mixer, x, layer.index, rotary[layer.index], kv[mixer.kv_index])
            if mixer.beside is not None:
                beside = _recurrence(mixer.beside, x, layer.index, states[mixer.beside.state_index], BESIDE)
                mixing = chain(beside, mixing, [Add(BESIDE, OUTPUT)])
        elif isinstance(mixer, UngatedMlp):
            mixing = _ungated(mixer, x, layer.index)
        elif isinstance(mixer, ExpertMlp):
            mixing = _experts(mixer, layer, x, x, OUTPUT)
        else:
            assert isinstance(mixer, RecurrentMixer)
            mixing = _recurrence(mixer, x, layer.index, states[mixer.state_index], OUTPUT)
        widths = whole | _widths(layer, hidden)
        operations += [_named(each, widths, registers) for each in _layer(layer, mixing, is_added)]
        is_added = layer.is_whole
    norm = decoder.norm, decoder.norm_eps, decoder.norm_is_centred
    if is_added:
        operations.append(AddNorm(RESIDUAL, None, NORMED, *norm))
    else:
        operations.append(AddNorm(OUTPUT, RESIDUAL, NORMED, *norm))
    if decoder.norm_bias is not None:
        operations.append(Affine(NORMED, 0, None, decoder.norm_bias))
    by_register = {register: width for (_, width), register in registers.items()}
    return Program(
        tuple(by_register.get(register, 0) for register in range(max(by_register) + 1)), tuple(operations), NORMED
    )


_REGISTERS = ("x", "to", "residual", "gate", "beside", "padded")  # fields of operations


def _named(operation: Operation, widths: Mapping[int, int], registers: dict[tuple[int, int], int]) -> Operation:
    """The operation with registers of the widths that its layer needs: layers of other sizes have others."""
    names = {name: getattr(operation, name) for name in _REGISTERS if getattr(operation, name, None) is not None}
    places = {}
    for field, name in names.items():
        key = name, widths[name]
        if key not in registers:
            registers[key] = name if name not in registers.values() else max(NUM_NAMES, *registers.values()) + 1
        places[field] = registers[key]
    return operation if places == names else replace(operation, **places)  # type: ignore[arg-type]


def _widths(layer: DecoderLayer, hidden: int) -> dict[int, int]:
    """By register, of those that the layer has beside the residual's."""
    widths: dict[int, int] = {}
    mixer, mlp = layer.attention, layer.mlp
    recurrent = mixer if isinstance(mixer, RecurrentMixer) else mixer.beside if isinstance(mixer, Attention) else None
    if recurrent is not None:
        widths |= {RECURRENT: recurrent.rule.width, MIXED: recurrent.output.weight.num_in, BESIDE: hidden}
    if isinstance(mixer, Attention):
        query = mixer.num_heads * mixer.head_dim
        widths |= {QKV: mixer.qkv.weight.num_out, ROTATED: query, ATTENDED: query}
    for half in (mixer, mlp):
        if isinstance(half, UngatedMlp):
            widths |= {INNER: half.up.weight.num_out}
    if isinstance(mixer, ExpertMlp):
        mlp = mixer
    if isinstance(mlp, GatedMlp):
        widths |= {GATE_UP: mlp.gate_up.weight.num_out, INNER: mlp.down.weight.num_in}
    if layer.beside is not None:
        mlp, widths = layer.beside.experts, widths | {ROUTED: hidden, EXPERTS: hidden}
    if isinstance(mlp, ExpertMlp):
        gate_up, inner, pairs, read = mlp.gate_up.num_out, mlp.down.num_in, mlp.routing.top_k, mlp.down.num_out
        widths |= {SCORES: mlp.num_experts, PADDED_SCORES: mlp.router.padded_out}
        widths |= {PAIRS: pairs * read, PAIRS_OUTPUT: pairs * read, LATENT: read, LATENT_SUM: read}
        widths |= {PAIRS_GATE_UP: pairs * gate_up, PAIRS_INNER: pairs * inner}
        if mlp.dense is not None:
            widths |= {GATE_UP: mlp.dense.gate_up.weight.num_out, INNER: mlp.dense.down.weight.num_in}
            widths |= {SHARED_OUTPUT: hidden}
        if mlp.shared is not None:
            shared, down, gate = mlp.shared.gate_up.weight, mlp.shared.down.weight, mlp.shared.gate
            widths |= {SHARED_GATE_UP: shared.num_out, SHARED_INNER: down.num_in, SHARED_OUTPUT: hidden}
            widths |= {} if gate is None else {SHARED_GATE: 1, PADDED_GATE: gate.padded_out}
    if (end := layer.end) is not None:
        assert isinstance(end, LayerInput)
        widths |= {OWN: end.embedding_projection.weight.num_out, INPUT_GATE: end.gate.weight.num_out}
        widths |= {JOINED: 2 * end.gate.weight.num_out, INPUT: end.project.weight.num_in}
    return widths


def _input(norm: torch.Tensor | None) -> int:
    """The register that a half of a layer reads."""
    return RESIDUAL if norm is None else NORMED


def _attention(attention: Attention, x: int, layer: int, rotary: torch.Tensor, kv: LayerKV) -> Iterator[Operation]:
    heads = heads_of(attention)
    query = heads.num_heads * heads.head_dim
    column = query if attention.is_gated else 0
    yield from _linear(attention.qkv, x, QKV, layer)
    if attention.head_norm is not None:
        norm, kv_width = attention.head_norm, heads.num_kv_heads * heads.head_dim
        is_centred = norm.of_columns is not None
        yield Norm(QKV, column, query // len(norm.q), norm.q, norm.eps, is_centred)
        if attention.has_kv:
            yield Norm(QKV, column + query, kv_width // len(norm.k), norm.k, norm.eps, is_centred)
        if norm.of_columns is not None:
            yield Affine(QKV, column, torch.cat(norm.of_columns))
        if attention.has_kv and norm.v is not None:
            yield Norm(QKV, column + query + kv_width, heads.num_kv_heads, norm.v, norm.eps)
    written = heads if attention.has_kv else replace(heads, num_kv_heads=0)
    yield WriteKV(QKV, ROTATED, written, rotary, kv, column)
    if attention.query_factors is not None:
        yield Affine(ROTATED, 0, attention.query_factors)
    scores = (attention.scale, attention.window, attention.softcap, attention.sinks)
    yield Attend(ROTATED, ATTENDED, heads, kv, *scores)
    if attention.is_gated:
        yield MultiplyGate(ATTENDED, QKV, ATTENDED)
    yield from _linear(attention.output, ATTENDED, OUTPUT, layer)


def _recurrence(mixer: RecurrentMixer, x: int, layer: int, state: LayerState, to: int) -> Iterator[Operation]:
    yield from _linear(mixer.inputs, x, RECURRENT, layer)
    yield Recur(RECURRENT, MIXED, mixer.rule, state)
    yield from _linear(mixer.output, MIXED, to, layer)


def _ungated(mlp: UngatedMlp, x: int, layer: int) -> Iterator[Operation]:
    yield from _linear(mlp.up, x, INNER, layer)
    yield Activate(INNER, INNER, mlp.activation)
    yield from _linear(mlp.output, INNER, OUTPUT, layer)


def _layer(layer: DecoderLayer, mixing: Iterator[Operation], is_added: bool) -> Iterator[Operation]:
    """`mixing`: attention, or what a layer has in its place."""
    eps = layer.norm_eps
    bias, mlp_bias = layer.norm_biases
    yield from _enter(layer, layer.attention_norm, bias, is_added=is_added)
    yield from mixing
    if layer.attention_post_norm is not None:
        yield Norm(OUTPUT, 0, 1, layer.attention_post_norm, eps)
    if layer.mlp is None:
        return
    yield from _enter(layer, layer.mlp_norm, mlp_bias)
    yield from _mlp(layer, _input(layer.attention_norm if layer.is_parallel else layer.mlp_norm))
    if layer.mlp_post_norm is not None:
        yield Norm(OUTPUT, 0, 1, layer.mlp_post_norm, eps)
    if layer.is_whole:
        yield Add(OUTPUT, RESIDUAL, 1.0 if layer.end is not None else layer.scalar)
    if (end := layer.end) is not None:
        assert isinstance(end, LayerInput)
        yield from _linear(end.embedding_projection, EMBEDDED, OWN, layer.index)
        yield Norm(OWN, 0, 1, end.embedding_norm, end.embedding_eps)
        yield from _linear(end.gate, RESIDUAL, INPUT_GATE, layer.index)
        yield JoinEmbedding(INPUT_GATE, OWN, JOINED, end.table, end.table_scale)
        yield Gated(JOINED, INPUT, end.activation)
        yield from _linear(end.project, INPUT, OUTPUT, layer.index)
        yield Norm(OUTPUT, 0, 1, end.norm, end.eps)
        yield Add(OUTPUT, RESIDUAL, layer.scalar)


def _enter(
    layer: DecoderLayer, norm: torch.Tensor | None, bias: torch.Tensor | None, *, is_added: bool = False
) -> Iterator[Operation]:
    """Adds the output of the half before to the residual, unless it is in there, and norms the sum."""
    if norm is not None:
        x, residual = (RESIDUAL, None) if is_added else (OUTPUT, RESIDUAL)
        yield AddNorm(x, residual, NORMED, norm, layer.norm_eps, layer.centred_norms)
        if bias is not None:
            yield Affine(NORMED, 0, None, bias)
    elif not is_added:
        yield Add(OUTPUT, RESIDUAL)


def _mlp(layer: DecoderLayer, x: int) -> Iterator[Operation]:
    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        yield from _linear(mlp.gate_up, x, GATE_UP, layer.index)
        yield Gated(GATE_UP, INNER, mlp.activation)
        yield from _linear(mlp.down, INNER, OUTPUT, layer.index)
        if (beside := layer.beside) is not None:
            yield Norm(OUTPUT, 0, 1, beside.dense_post_norm, beside.eps)
            yield AddNorm(RESIDUAL, None, ROUTED, beside.router_norm, beside.eps)
            yield AddNorm(RESIDUAL, None, NORMED, beside.norm, beside.eps)
            yield from _experts(beside.experts, layer, NORMED, ROUTED, EXPERTS)
            yield Norm(EXPERTS, 0, 1, beside.post_norm, beside.eps)
            yield Add(EXPERTS, OUTPUT)
        return
    if isinstance(mlp, UngatedMlp):
        yield from _ungated(mlp, x, layer.index)
        return
    assert isinstance(mlp, ExpertMlp)
    yield from _experts(mlp, layer, x, x, OUTPUT)


def _experts(mlp: ExpertMlp, layer: DecoderLayer, x: int, routed: int, to: int) -> Iterator[Operation]:
    """`routed`: what the router reads."""
    read, inner = mlp.down.num_out, mlp.down.num_in
    yield from _narrow(mlp.router, routed, SCORES, PADDED_SCORES, layer.index)
    yield ChooseExperts(SCORES, mlp.routing, mlp.choice_bias, mlp.factors)
    if mlp.latent is not None:
        yield from _linear(mlp.latent[0], x, LATENT, layer.index)
    yield TakePairs(x if mlp.latent is None else LATENT, PAIRS, mlp.routing.scales_inputs)
    yield ExpertLinear(PAIRS, PAIRS_GATE_UP, mlp.gate_up, mlp.gate_up_bias)
    yield _expert_lora(PAIRS, PAIRS_GATE_UP, layer.index, mlp.up_modules, read, inner)
    yield _inner(PAIRS_GATE_UP, PAIRS_INNER, mlp.activation, mlp.routing.top_k)
    yield ExpertLinear(PAIRS_INNER, PAIRS_OUTPUT, mlp.down, mlp.down_bias)
    yield _expert_lora(PAIRS_INNER, PAIRS_OUTPUT, layer.index, EXPERT_DOWN, inner, read)
    yield CombinePairs(PAIRS_OUTPUT, to if mlp.latent is None else LATENT_SUM)
    if mlp.latent is not None:
        yield from _linear(mlp.latent[1], LATENT_SUM, to, layer.index)
    if (dense := mlp.dense) is not None:
        yield from _linear(dense.gate_up, x, GATE_UP, layer.index)
        yield Gated(GATE_UP, INNER, dense.activation)
        yield from _linear(dense.down, INNER, SHARED_OUTPUT, layer.index)
        yield Add(SHARED_OUTPUT, to)
    if (shared := mlp.shared) is not None:
        yield from _linear(shared.gate_up, x, SHARED_GATE_UP, layer.index)
        yield _inner(SHARED_GATE_UP, SHARED_INNER, mlp.activation, 1)
        yield from _linear(shared.down, SHARED_INNER, SHARED_OUTPUT, layer.index)
        if shared.gate is None:
            yield Add(SHARED_OUTPUT, to)
        else:
            yield from _narrow(shared.gate, x, SHARED_GATE, PADDED_GATE, layer.index)
            yield AddGated(SHARED_OUTPUT, SHARED_GATE, to)


def _inner(x: int, to: int, activation: Activation, per_row: int) -> Operation:
    return Activate(x, to, activation) if isinstance(activation, Ungated) else Gated(x, to, activation, per_row)


def _expert_lora(x: int, to: int, layer: int, modules: tuple[int, ...], num_in: int, num_out: int) -> AddExpertLora:
    return AddExpertLora(x, to, layer, modules, len(EXPERT_MODULES), num_in, num_out)


def _narrow(linear: NarrowLinear, x: int, to: int, padded: int, layer: int) -> Iterator[Operation]:
    yield Linear(x, to, linear.weight, linear.bias)
    yield AddNarrowLora(x, to, padded, layer, linear.modules)


def _linear(linear: LoraLinear, x: int, to: int, layer: int) -> Iterator[Operation]:
    yield Linear(x, to, linear.weight, linear.bias)
    yield AddLora(x, to, layer, linear.modules)
