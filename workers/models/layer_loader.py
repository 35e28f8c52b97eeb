"""Reads one worker's part of a decoder layer from a checkpoint."""

from __future__ import annotations

import math

import torch

from ...adapters.adapter import PER_LAYER_MODULES
from ...kernels.backend import Kernels
from ...kernels.norms import XIELU, Ungated
from .attention_loader import load_attention, load_latent_attention
from .config import ModelConfig
from .expert_loader import load_experts, load_experts_beside
from .layer_input import LayerInput, LayerInputs
from .layer_reader import LayerReader, StoredWeight, some_rows
from .layers import DecoderLayer, GatedMlp, LoraLinear, Mixer, Mlp, RecurrentMixer, UngatedMlp
from .recurrent_rules import load_group_norm, load_rule
from .sharding import ModelSharding
from .weights import WeightSource


def load_layer(
    index: int,
    sharding: ModelSharding,
    checkpoint: WeightSource,
    kernels: Kernels,
    inputs: LayerInputs | None = None,
) -> DecoderLayer:
    """The layer. `inputs`: of all layers, where they have such. Raises ValueError for missing and misshapen tensors."""
    reader, config = LayerReader(index, sharding, checkpoint, kernels), sharding.config
    assert config.residual_multiplier == 1.0 or config.family.post_norms is None
    post_norms = config.family.post_norms or (None, None)
    _split_fused(reader)
    return DecoderLayer(
        index,
        _mixer(reader),
        _mlp(reader),
        attention_norm=reader.norm(config.family.attention_norm),
        mlp_norm=reader.norm(config.family.mlp_norm),
        attention_post_norm=reader.norm(post_norms[0]),
        mlp_post_norm=reader.norm(post_norms[1]),
        norm_eps=residual_eps(config),
        centred_norms=config.family.centred_norms,
        is_parallel=config.family.is_parallel,
        beside=load_experts_beside(reader) if config.family.experts_beside and _has_experts(reader) else None,
        end=None if inputs is None else _input(reader, inputs),
        norm_biases=(reader.norm_bias(config.family.attention_norm), reader.norm_bias(config.family.mlp_norm)),
        scalar=_scalar(reader),
    )


def residual_eps(config: ModelConfig) -> float:
    """Of norms of the residual, which is kept divided by `residual_multiplier`: nothing that is added needs it then."""
    return config.norm_eps / config.residual_multiplier**2


def _split_fused(reader: LayerReader) -> None:
    """Makes the linears that are one in the file known by their own names."""
    for path, parts in reader.config.family.fused.items():
        block = path.partition(".")[0]
        num_rows = {name: reader.config.shape.modules[name][1] for name in parts}
        rows = {f"{reader.prefix}{block}.{name}.weight": number for name, number in num_rows.items()}
        reader.checkpoint.split(f"{reader.prefix}{path}.weight", rows)


def _mixer(reader: LayerReader) -> Mixer:
    if reader.index in (reader.config.mlp_layers or ()):
        return _ungated_mlp(reader)
    if reader.config.family.has_halves and _has_experts(reader):
        return load_experts(reader)
    if reader.index not in reader.config.attention_layers:
        return _recurrent(reader)
    if reader.config.latent is not None:
        return load_latent_attention(reader, reader.config.latent)
    return load_attention(reader, _recurrent(reader) if reader.index in reader.config.recurrent_layers else None)


def _has_experts(reader: LayerReader) -> bool:
    return reader.config.experts is not None and reader.config.experts.layers[reader.index]


def _mlp(reader: LayerReader) -> Mlp | None:
    """The second half; None: the layer has one half."""
    config = reader.config
    if config.family.has_halves:
        return None
    if not _has_experts(reader) or config.family.experts_beside:
        return _gated_mlp(reader) if config.family.has_gates else _ungated_mlp(reader)
    assert config.family.experts is not None
    return load_experts(reader, _gated_mlp(reader) if config.family.experts.beside_dense else None)


def _recurrent(reader: LayerReader) -> RecurrentMixer:
    config, shape, part = reader.config.recurrent, reader.config.shape, reader.sharding.recurrent
    assert config is not None
    *names, last = shape.recurrent_modules
    places = [shape.dense_modules.index(name) for name in (*names, last)]
    rows, biases = list[StoredWeight](), list[torch.Tensor]()
    for name in names:
        weight, groups = reader.stored(shape.path(name), *shape.modules[name]), shape.output_groups.get(name)
        outputs = [slice(*piece) if groups is None else groups.order(*piece) for piece in part.outputs[name]]
        rows += [some_rows(weight, each) for each in outputs]
        if config.has_bias:
            bias = reader.checkpoint.take(f"{reader.prefix}{shape.path(name)}.bias", (shape.modules[name][1],))
            biases += [bias[each] for each in outputs]
    num_in, at = shape.modules[last][0], (config, reader.sharding, f"{reader.prefix}{config.block}.", reader.checkpoint)
    return RecurrentMixer(
        LoraLinear(reader.packed(rows), torch.cat(biases) if biases else None, tuple(places[:-1])),
        reader.row_linear(last, num_in, part.inputs, tuple(places[-1:]), config.output_has_bias),
        load_rule(*at),
        reader.config.recurrent_layers.index(reader.index),
        load_group_norm(*at),
    )


def _input(reader: LayerReader, inputs: LayerInputs) -> LayerInput:
    config, hidden, part = reader.config, reader.config.hidden_size, reader.sharding.layer_inputs
    projection, table = inputs.of(reader.index)
    gate, project, _ = (reader.places(module) for module in PER_LAYER_MODULES)
    norm = reader.norm("post_per_layer_input_norm")
    assert norm is not None
    return LayerInput(
        LoraLinear(reader.pack_layer(projection), None, reader.places(PER_LAYER_MODULES[2])),
        inputs.norm,
        inputs.eps,
        table,
        inputs.table_scale,
        part,
        LoraLinear(reader.packed([reader.stored("per_layer_input_gate", hidden, inputs.width, part)]), None, gate),
        reader.row_linear("per_layer_projection", inputs.width, part, project, False),
        norm,
        config.norm_eps,
        config.activation,
    )


def _scalar(reader: LayerReader) -> float:
    if not reader.config.family.has_layer_scalars:
        return 1.0
    return float(reader.checkpoint.take(f"{reader.prefix}layer_scalar", (1,)))


def _gated_mlp(reader: LayerReader) -> GatedMlp:
    config, part = reader.config, reader.sharding.intermediate_of(reader.index)
    width = config.layer_sizes.intermediate_sizes[reader.index]
    names = [reader.path(name) for name in ("gate_proj", "up_proj")]
    biases = [
        reader.checkpoint.take(f"{reader.prefix}{name}.bias", (width,), rows=part) for name in names if config.mlp_bias
    ]
    weights = [reader.stored(name, config.hidden_size, width, part) for name in names]
    return GatedMlp(
        LoraLinear(
            reader.packed(weights), torch.cat(biases) if biases else None, reader.places("gate_proj", "up_proj")
        ),
        reader.row_linear("down_proj", width, part, reader.places("down_proj"), config.mlp_bias),
        config.activation,
    )


def _ungated_mlp(reader: LayerReader) -> UngatedMlp:
    config, part, name = reader.config, reader.sharding.intermediate_of(reader.index), reader.path("up_proj")
    hidden, width, bias = config.hidden_size, config.intermediate_size, None
    if config.mlp_bias:
        bias = reader.checkpoint.take(f"{reader.prefix}{name}.bias", (width,), rows=part)
    assert isinstance(config.activation, Ungated)
    return UngatedMlp(
        LoraLinear(reader.packed([reader.stored(name, hidden, width, part)]), bias, reader.places("up_proj")),
        reader.row_linear("down_proj", width, part, reader.places("down_proj"), config.mlp_bias),
        _activation(reader, config.activation),
    )


def _activation(reader: LayerReader, activation: Ungated) -> Ungated:
    """With the layer's parameters, if it has such: of the two factors what softplus is of."""
    if activation.name != XIELU:
        return activation
    path = f"{reader.prefix}{reader.path('up_proj').rpartition('.')[0]}.act_fn."
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    stored = (reader.checkpoint.take(f"{path}{name}", shape, in_floats=True) for name, shape in shapes.items())
    positive, negative, slope, limit = map(float, stored)
    return Ungated(XIELU, (_softplus(positive), slope + _softplus(negative), slope, limit))


def _softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)
