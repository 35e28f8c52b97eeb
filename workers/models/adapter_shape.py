"""The shape that adapters of a base must fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...adapters.adapter import (
    LATENT_EXPERT_MODULES,
    MODULES,
    PER_LAYER_MODULES,
    ROUTER,
    SHARED_MODULES,
    BaseEnds,
    BaseShape,
    ExpertShape,
    name_of,
    packing_order,
)
from .layer_sizes import LayerSizes

if TYPE_CHECKING:
    from .config import ModelConfig


def adapter_shape(config: ModelConfig) -> BaseShape:
    """The shape that adapters must fit."""
    hidden, query, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gated = config.family.gated_attention
    all_query = 2 * query if gated else query
    attn = {
        "q_proj": (hidden, all_query),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (query, hidden),
    }
    if config.latent is not None:
        attn = config.latent.modules(hidden, config.num_heads)
    dense = {
        "gate_proj": (hidden, config.intermediate_size),
        "up_proj": (hidden, config.intermediate_size),
        "down_proj": (config.intermediate_size, hidden),
    }
    experts, names = config.experts, config.family.experts
    dense_paths = {} if names is None else {each: f"{names.mlp}.{each}" for each in dense}
    if config.sizes is not None:
        return _shape_of_sizes(config, config.sizes)
    if not config.family.has_gates:
        del dense["gate_proj"]
    if experts is None or names is None:
        if config.mlp_layers is None:
            return _shape_of(config, attn | dense, paths=dense_paths)
        modules = dense if config.mlp_layers else {}
        return _shape_of(config, attn | modules, some_layers=dict.fromkeys(modules, config.mlp_layers))
    shape = experts.shape(names)
    layers = shape.layers
    dense_layers = config.mlp_layers
    if dense_layers is None:
        dense_layers = tuple(layer for layer in range(config.num_layers) if layer not in layers)
    modules = attn | experts.routed_modules(hidden) | {ROUTER: (hidden, experts.num_experts)}
    some_layers = dict.fromkeys((ROUTER, *LATENT_EXPERT_MODULES), layers)
    paths = {ROUTER: f"{names.mlp}.{names.router.removesuffix('.layer')}"}
    paths |= {module: f"{names.mlp}.{module}" for module in LATENT_EXPERT_MODULES}
    if dense_layers or names.beside_dense:
        modules |= dense
        some_layers |= {} if names.beside_dense else dict.fromkeys(dense, dense_layers)
        paths |= dense_paths
    if experts.shared_intermediate_size:
        shared = experts.shared_modules(hidden)
        modules |= shared
        some_layers |= dict.fromkeys(shared, layers)
        paths |= {each: f"{names.mlp}.{names.shared}.{each.partition('.')[2]}" for each in SHARED_MODULES}
    return _shape_of(config, modules, shape, some_layers, paths)


def _shape_of_sizes(config: ModelConfig, sizes: LayerSizes) -> BaseShape:
    """Of layers of different sizes: those of a size that is not the first layer's have entries of their own."""
    hidden, width = config.hidden_size, sizes.input_size
    modules: dict[str, tuple[int, int]] = {}
    layers: dict[str, tuple[int, ...]] = {}
    copies: dict[str, str] = {}

    def add(layer: int, module: str, is_first: bool, kind: str, num_in: int, num_out: int) -> str:
        entry = module if is_first else f"{kind}:{module}"
        modules[entry], layers[entry] = (num_in, num_out), (*layers.get(entry, ()), layer)
        return entry

    for layer in range(config.num_layers):
        dim, kv_heads, are_values, mlp = (
            size[layer]
            for size in (sizes.head_dims, sizes.num_kv_heads, sizes.keys_are_values, sizes.intermediate_sizes)
        )
        query, kv = config.num_heads * dim, kv_heads * dim
        is_first = (dim, kv_heads, are_values) == (config.head_dim, config.num_kv_heads, False)
        add(layer, "q_proj", is_first, "full", hidden, query)
        add(layer, "o_proj", is_first, "full", query, hidden)
        if sizes.kv_sources[layer] == layer:
            add(layer, "k_proj", is_first, "full", hidden, kv)
            values = add(layer, "v_proj", is_first, "full", hidden, kv)
            if are_values:
                copies[values] = "k_proj"
        for module in ("gate_proj", "up_proj"):
            add(layer, module, mlp == config.intermediate_size, "wide", hidden, mlp)
        add(layer, "down_proj", mlp == config.intermediate_size, "wide", mlp, hidden)
    if width:
        modules |= dict(zip(PER_LAYER_MODULES, ((hidden, width), (width, hidden), (hidden, width)), strict=True))
    shape, paths, experts = None, dict[str, str](), config.experts
    if experts is not None and config.family.experts is not None:
        modules |= experts.routed_modules(hidden) | {ROUTER: (hidden, experts.num_experts)}
        paths = {ROUTER: config.family.experts.router}
        shape = experts.shape(config.family.experts)
    return replace(_shape_of(config, modules, shape, layers, paths), copies=copies)


def _shape_of(
    config: ModelConfig,
    modules: dict[str, tuple[int, int]],
    experts: ExpertShape | None = None,
    some_layers: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    paths: Mapping[str, str] = MappingProxyType({}),
) -> BaseShape:
    """`modules`: without those of layers with a recurrent state. `some_layers`: of modules that not all have."""
    recurrent = {} if config.recurrent is None else config.recurrent.modules(config.hidden_size)
    layers = {**some_layers, **dict.fromkeys(recurrent, config.recurrent_layers)}
    block = "" if config.recurrent is None else f"{config.recurrent.block}."
    if recurrent:
        layers |= dict.fromkeys(MODULES[:4], config.attention_layers)
    return BaseShape(
        config.num_layers,
        dict(sorted((modules | recurrent).items(), key=lambda item: packing_order(name_of(item[0])))),
        experts,
        fused={path.rpartition(".")[2]: parts for path, parts in config.family.fused.items()},
        head_order=config.head_order,
        gated_head_dim=config.head_dim if config.family.gated_attention else None,
        layers=layers,
        paths={**{name: f"{block}{name}" for name in recurrent}, **paths, **config.family.paths},
        output_groups={} if config.recurrent is None else config.recurrent.output_groups,
        output_scales={} if config.scales is None else config.scales.weights,
        is_wrapped=config.is_wrapped,
        ends=BaseEnds(
            config.vocab_size,
            config.hidden_size,
            is_tied=config.tie_word_embeddings,
            head_has_bias=config.family.head_has_bias and config.mlp_bias,
        ),
    )
