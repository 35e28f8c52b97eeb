"""Reads one worker's part of a layer's mixture of experts from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...adapters.adapter import LATENT_EXPERT_MODULES, NARROW_MODULES, ROUTER, SHARED_MODULES
from .family import ExpertNames
from .layer_reader import LayerReader, StoredWeight, some_columns, some_rows
from .layers import ExpertMlp, ExpertsBeside, GatedMlp, LoraLinear, SharedExpert


def load_experts(reader: LayerReader, dense: GatedMlp | None = None) -> ExpertMlp:
    """`dense`: an MLP that computes every row beside the experts."""
    config, names = reader.config.experts, reader.config.family.experts
    assert config is not None
    assert names is not None
    hidden, (first, stop) = reader.config.hidden_size, reader.sharding.experts
    if names.are_fused:
        gate_up, down = _fused_experts(reader, names)
    elif names.are_stacked or any(
        f"{reader.prefix}{names.prefix}{name}" in reader.checkpoint for name in names.stacked
    ):
        gate_up, down = _stacked_experts(reader, names)
    else:
        gate_up, down = _single_experts(reader, names)
    router, biases = f"{names.prefix}{names.router}", _expert_biases(reader, names) if names.take_turns else {}
    return ExpertMlp(
        router=reader.narrow(ROUTER, router, hidden, config.num_experts, biases.pop("router_bias", None)),
        gate_up=reader.packed_experts(gate_up),
        down=reader.packed_experts(down),
        first=first,
        num_experts=stop - first,
        routing=config.routing,
        activation=reader.config.activation,
        shared=_shared_expert(reader, names),
        dense=dense,
        choice_bias=_choice_bias(reader, f"{names.prefix}{names.bias}"),
        factors=_factors(reader, names),
        latent=_latent_linears(reader),
        **biases,
    )


_Weights = tuple[list[StoredWeight], list[StoredWeight]]


def _single_experts(reader: LayerReader, names: ExpertNames) -> _Weights:
    """gate and up, and down, of this worker's experts, `[2 * features, hidden]` and `[hidden, features]` each.

    Without a gate the first is up alone; `hidden` is what experts read.
    """
    config = reader.config.experts
    assert config is not None
    hidden, width, ups = config.num_in(reader.config.hidden_size), config.intermediate_size, names.ups
    (first, stop), part = reader.sharding.experts, reader.sharding.expert_features
    gate_up, down = list[StoredWeight](), list[StoredWeight]()
    for expert in range(config.num_experts):
        path = f"{names.prefix}experts.{expert}."
        if first <= expert < stop:
            gate_up.append(reader.joined([reader.stored(path + name, hidden, width, part) for name in ups]))
            down.append(reader.stored(path + names.down, width, hidden, columns=part))
        else:  # an expert of another worker: its shapes are checked, and nothing is read
            for name in ups:
                reader.rows(path + name, hidden, width, (0, 0))
            reader.rows(path + names.down, width, hidden, (0, 0))
    return gate_up, down


def _stacked_experts(reader: LayerReader, names: ExpertNames) -> _Weights:
    """The same of files where a layer's experts are one tensor, as transformers holds them."""
    config = reader.config.experts
    assert config is not None
    hidden, width, num_ups = config.num_in(reader.config.hidden_size), config.intermediate_size, len(names.ups)
    part = slice(*reader.sharding.expert_features)
    gate_up, down = (
        _one_by_one(reader, f"{names.prefix}{name}", shape)
        for name, shape in zip(names.stacked, ((num_ups * width, hidden), (hidden, width)), strict=True)
    )
    return [torch.cat([half[part] for half in both.split(width)]) for both in gate_up], [each[:, part] for each in down]


def _one_by_one(reader: LayerReader, name: str, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Of a tensor that holds all experts of a layer, this worker's, each read as a whole. `shape`: of one."""
    config, path, (first, stop) = reader.config.experts, f"{reader.prefix}{name}", reader.sharding.experts
    assert config is not None
    reader.checkpoint.split(path, {f"{path}.{expert}": 1 for expert in range(config.num_experts)})
    for expert in range(config.num_experts):
        rows = (0, 1 if first <= expert < stop else 0)  # of another worker's the shape is checked
        yield from reader.checkpoint.take(f"{path}.{expert}", (1, *shape), rows=rows)


def _fused_experts(reader: LayerReader, names: ExpertNames) -> _Weights:
    """The same of tensors whose columns are outputs (Llama 4, gpt-oss)."""
    config = reader.config.experts
    assert config is not None
    hidden, width, part = reader.config.hidden_size, config.intermediate_size, reader.sharding.expert_features
    gate_up = _with_rows(reader, f"{names.prefix}experts.gate_up_proj", hidden, 2 * width)
    down = _with_rows(reader, f"{names.prefix}experts.down_proj", width, hidden)
    gate, up = (slice(0, None, 2), slice(1, None, 2)) if names.take_turns else (slice(width), slice(width, None))
    halves = ([some_rows(some_rows(both, half), slice(*part)) for half in (gate, up)] for both in gate_up)
    return [reader.joined(each) for each in halves], [some_columns(each, part) for each in down]


def _with_rows(reader: LayerReader, name: str, num_in: int, num_out: int) -> Iterator[StoredWeight]:
    """Of such a tensor this worker's experts, `[out, in]` each. In few bits outputs are rows in the file, too."""
    config, (first, stop) = reader.config.experts, reader.sharding.experts
    assert config is not None
    shape, rows = (config.num_experts * num_out, num_in), (first * num_out, stop * num_out)
    narrow = reader.stored_narrow(f"{reader.prefix}{name}", shape, rows)
    if narrow is None:
        yield from (each.T for each in _one_by_one(reader, name, (num_in, num_out)))
        return
    for start in range(0, len(narrow.codes), num_out):
        yield narrow.rows(slice(start, start + num_out))


def _expert_biases(reader: LayerReader, names: ExpertNames) -> dict[str, torch.Tensor | None]:
    """The biases of fused experts. Workers that share an expert's features add up its outputs: one has the bias."""
    config = reader.config.experts
    assert config is not None
    hidden, width, num_experts = reader.config.hidden_size, config.intermediate_size, config.num_experts
    experts, part = reader.sharding.experts, slice(*reader.sharding.expert_features)
    path = f"{reader.prefix}{names.block}"
    gate_up = reader.checkpoint.take(f"{path}.experts.gate_up_proj_bias", (num_experts, 2 * width), rows=experts)
    down = reader.checkpoint.take(f"{path}.experts.down_proj_bias", (num_experts, hidden), rows=experts)
    return {
        "router_bias": reader.checkpoint.take(f"{path}.{names.router}.bias", (num_experts,)),
        "gate_up_bias": torch.cat((gate_up[:, 0::2][:, part], gate_up[:, 1::2][:, part]), dim=1),
        "down_bias": down if part.start == 0 else None,
    }


def load_experts_beside(reader: LayerReader) -> ExpertsBeside:
    config, names = reader.config, ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2")
    dense_post_norm, norm, post_norm = (reader.norm(name) for name in (*names, "post_feedforward_layernorm_2"))
    assert dense_post_norm is not None and norm is not None and post_norm is not None
    router = reader.checkpoint.take(f"{reader.prefix}router.scale", (config.hidden_size,)).float()
    norms = router * config.hidden_size**-0.5, norm, post_norm, dense_post_norm
    return ExpertsBeside(load_experts(reader), *norms, config.norm_eps)


def _factors(reader: LayerReader, names: ExpertNames) -> torch.Tensor | None:
    config = reader.config.experts
    assert config is not None
    if not names.factors:
        return None
    return reader.checkpoint.take(f"{reader.prefix}{names.factors}", (config.num_experts,)).float()


def _choice_bias(reader: LayerReader, name: str) -> torch.Tensor | None:
    config = reader.config.experts
    assert config is not None
    if not config.routing.has_bias:
        return None
    shape = (1, config.num_experts) if ".moe_statics." in name else (config.num_experts,)
    return reader.checkpoint.take(f"{reader.prefix}{name}", shape, in_floats=True).flatten()


def _shared_expert(reader: LayerReader, names: ExpertNames) -> SharedExpert | None:
    config, hidden, part = reader.config.experts, reader.config.hidden_size, reader.sharding.shared_features
    if config is None or config.shared_intermediate_size is None:
        return None
    path, width, has_bias = f"{names.prefix}{names.shared}", config.shared_intermediate_size, reader.config.mlp_bias
    ups = [f"{path}.{name}_proj" for name in ("gate", "up") if name == "up" or names.gate]
    gate_up = [reader.stored(name, hidden, width, part) for name in ups]
    bias = torch.cat([reader.bias(name, width, part) for name in ups]) if has_bias else None
    down = reader.packed_columns(f"{path}.down_proj", width, hidden, part)
    gate = None
    if config.shared_is_gated:
        gate = reader.narrow(NARROW_MODULES[0], f"{names.prefix}{names.shared_gate}", hidden, 1, None)
    *places, last = reader.places(*SHARED_MODULES[len(SHARED_MODULES) - 1 - len(ups) :])
    return SharedExpert(
        LoraLinear(reader.packed(gate_up), bias, tuple(places)),
        LoraLinear(down, reader.sum_bias(f"{path}.down_proj", hidden, has_bias), (last,)),
        gate,
    )


def _latent_linears(reader: LayerReader) -> tuple[LoraLinear, LoraLinear] | None:
    """Whole on every worker: the second one is linear, so that it may have a partial sum of the experts."""
    config, hidden = reader.config.experts, reader.config.hidden_size
    if config is None or config.latent_size is None:
        return None
    first, second = (reader.path(module) for module in LATENT_EXPERT_MODULES)
    weights = reader.stored(first, hidden, config.latent_size), reader.stored(second, config.latent_size, hidden)
    has_bias = reader.config.mlp_bias
    biases = (
        reader.bias(first, config.latent_size) if has_bias else None,
        reader.sum_bias(second, hidden, has_bias),
    )
    places = map(reader.places, LATENT_EXPERT_MODULES)
    parts = zip(weights, biases, places, strict=True)
    read, written = (LoraLinear(reader.packed([weight]), bias, at) for weight, bias, at in parts)
    return read, written
