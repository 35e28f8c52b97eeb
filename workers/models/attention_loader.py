"""Reads one worker's part of a layer's attention from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...adapters.adapter import ABSORBED
from .latent_attention import AbsorbedWeights, LatentAttention
from .latent_config import LatentConfig
from .layer_reader import LayerReader, StoredWeight, load_norm
from .layers import Attention, HeadNorm, LoraLinear, RecurrentMixer
from .rotary_config import NO_ROTARY, NORM_AMPLITUDE, QUERY_SCALING
from .sharding import Range


def load_latent_attention(reader: LayerReader, sizes: LatentConfig) -> LatentAttention:
    config, shape = reader.config, reader.config.shape
    (start, stop), options = reader.sharding.heads, config.rotaries[reader.index].options
    of_queries, queries, query_norm = (start * sizes.query_dim, stop * sizes.query_dim), None, None
    if sizes.query_rank is None:
        parts = {"q_proj": of_queries, "kv_a_proj_with_mqa": None}
    else:
        parts = {"q_a_proj": None, "kv_a_proj_with_mqa": None}
        weight = reader.stored("self_attn.q_b_proj", *shape.modules["q_b_proj"], of_queries)
        queries = LoraLinear(reader.packed([weight]), None, reader.places("q_b_proj"))
        query_norm = _attention_norm(reader, "q_a_layernorm", sizes.query_rank)
    weights = [reader.stored(f"self_attn.{name}", *shape.modules[name], part) for name, part in parts.items()]
    of_head, num_in = sizes.plain_dim + sizes.value_dim, config.num_heads * sizes.value_dim
    rows = reader.rows(f"self_attn.{ABSORBED}", *shape.modules[ABSORBED], (start * of_head, stop * of_head))
    keys, values = rows.unflatten(0, (-1, of_head)).split([sizes.plain_dim, sizes.value_dim], dim=1)
    part = start * sizes.value_dim, stop * sizes.value_dim
    return LatentAttention(
        LoraLinear(reader.packed(weights), _latent_bias(reader, sizes), reader.places(*parts)),
        queries,
        query_norm,
        _attention_norm(reader, "kv_a_layernorm", sizes.rank),
        AbsorbedWeights(
            reader.pack_experts(keys.transpose(1, 2).contiguous()), reader.pack_experts(values.contiguous())
        ),
        reader.row_linear("o_proj", num_in, part, reader.places("o_proj"), config.output_bias),
        sizes,
        stop - start,
        config.attention_scale,
        options if QUERY_SCALING in options else None,
        config.kv_layers.index(reader.index),
    )


def _latent_bias(reader: LayerReader, sizes: LatentConfig) -> torch.Tensor | None:
    if not sizes.has_input_bias:
        return None
    biases = [reader.checkpoint.take(f"{reader.prefix}self_attn.kv_a_proj_with_mqa.bias", (sizes.width,))]
    if sizes.query_rank is not None:
        biases.insert(0, reader.checkpoint.take(f"{reader.prefix}self_attn.q_a_proj.bias", (sizes.query_rank,)))
    else:  # q_proj has none
        start, stop = reader.sharding.heads
        biases.insert(0, biases[0].new_zeros((stop - start) * sizes.query_dim))
    return torch.cat(biases)


def _attention_norm(reader: LayerReader, name: str, width: int) -> torch.Tensor:
    return load_norm(f"{reader.prefix}self_attn.{name}", width, reader.sharding, reader.checkpoint)


def load_attention(reader: LayerReader, beside: RecurrentMixer | None) -> Attention:
    config, sharding, sizes, layer = reader.config, reader.sharding, reader.config.layer_sizes, reader.index
    dim, hidden, kv_heads = sizes.head_dims[layer], reader.config.hidden_size, sharding.kv_heads_of(layer)
    query, kv = ((start * dim, stop * dim) for start, stop in (sharding.heads, kv_heads))
    num_query, num_kv = config.num_heads * dim, sizes.num_kv_heads[layer] * dim
    gated = 2 if config.family.gated_attention else 1
    parts = {"q_proj": (gated * num_query, (gated * query[0], gated * query[1]))}
    if has_kv := sizes.kv_sources[layer] == layer:
        parts |= dict.fromkeys(("k_proj", "v_proj"), (num_kv, kv))
    weights = _qkv_weights(reader, parts, hidden)
    stored = parts.keys() - ({"v_proj"} if sizes.keys_are_values[layer] else set())
    biases = {
        name: reader.checkpoint.take(f"{reader.prefix}{reader.path(name)}.bias", (size,), rows=part)
        for name, (size, part) in parts.items()
        if config.qkv_bias and name in stored
    }
    if biases and has_kv:
        biases.setdefault("v_proj", biases["k_proj"])  # of values that are made of keys
    for name in ("q_proj", "k_proj") if has_kv else ("q_proj",):
        weights[name] = _weight_in_order(reader, weights[name], name)
        if name in biases:
            biases[name] = _in_order(reader, biases[name], name)
    bias, some = torch.cat([*biases.values()]) if biases else None, weights["q_proj"]
    return Attention(
        qkv=LoraLinear(reader.packed([*weights.values()]), bias, reader.places(*parts)),
        output=reader.row_linear("o_proj", num_query, query, reader.places("o_proj"), config.output_bias),
        head_norm=_head_norm(reader, has_kv, some.device if isinstance(some, torch.Tensor) else some.codes.device),
        num_heads=sharding.heads[1] - sharding.heads[0],
        num_kv_heads=kv_heads[1] - kv_heads[0],
        head_dim=dim,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        window=config.sliding_windows[layer],
        kv_index=config.kv_layers.index(sizes.kv_sources[layer]),
        has_kv=has_kv,
        is_gated=config.family.gated_attention,
        sinks=_sinks(reader),
        beside=beside,
        query_factors=_query_factors(reader),
    )


def _qkv_weights(reader: LayerReader, parts: Mapping[str, tuple[int, Range]], hidden: int) -> dict[str, StoredWeight]:
    """`parts`: rows of each weight, and which of them are this worker's."""
    are_values = reader.config.layer_sizes.keys_are_values[reader.index]
    weights = {
        name: reader.stored(reader.path(name), hidden, size, part)
        for name, (size, part) in parts.items()
        if not (are_values and name == "v_proj")
    }
    if are_values and "v_proj" in parts:
        weights["v_proj"] = weights["k_proj"]
    elif "v_proj" not in parts:  # files have what nothing computes with
        for name in ("k_proj", "v_proj", "k_norm"):
            reader.checkpoint.drop(prefix=f"{reader.prefix}self_attn.{name}.")
    return weights


def _sinks(reader: LayerReader) -> torch.Tensor | None:
    config = reader.config
    if not config.family.has_sinks:
        return None
    name = f"{reader.prefix}self_attn.sinks"
    return reader.checkpoint.take(name, (config.num_heads,), rows=reader.sharding.heads).float()


def _head_norm(reader: LayerReader, has_kv: bool, device: torch.device) -> HeadNorm | None:
    config, layer = reader.config, reader.index
    if not config.qk_norm:
        return None
    ones = torch.ones(config.head_dim, device=device)
    rotated_eps = config.norm_eps / config.rotaries[layer].options.get(NORM_AMPLITUDE, 1.0) ** 2
    if not config.family.qk_norm_has_weights:
        # Behind the rotation it would be the same, since that leaves the norm as it is.
        if config.rotaries[layer].kind == NO_ROTARY:
            return None
        return HeadNorm(ones, ones, rotated_eps)
    if config.family.qk_norm_is_centred:
        return HeadNorm(ones, ones, config.norm_eps, of_columns=_column_weights(reader))
    if config.family.qk_norm_is_last:  # the weights are in `_query_factors`
        return HeadNorm(ones, ones, rotated_eps)
    dim, spans = config.layer_sizes.head_dims[layer], config.family.qk_norm_spans_heads
    kv_heads = config.layer_sizes.num_kv_heads[layer], reader.sharding.kv_heads_of(layer)
    of_q, of_k = config.family.head_norms
    heads = {of_q: (config.num_heads, reader.sharding.heads)} | ({of_k: kv_heads} if has_kv else {})
    norms = [
        load_norm(
            f"{reader.prefix}self_attn.{name}",
            number * dim if spans else dim,
            reader.sharding,
            reader.checkpoint,
            (start * dim, stop * dim) if spans else None,
        )
        for name, (number, (start, stop)) in heads.items()
    ]
    ordered = [_in_order(reader, norm, "k_proj") for norm in norms]
    values = torch.ones(dim, device=norms[0].device) if config.family.has_value_norm else None
    return HeadNorm(ordered[0], ordered[-1], config.norm_eps, spans, values)


def _column_weights(reader: LayerReader) -> tuple[torch.Tensor, torch.Tensor]:
    """Of norms whose heads have weights of their own: those of all columns of q, and of k."""
    config, sharding, layer = reader.config, reader.sharding, reader.index
    numbers = config.num_heads, config.layer_sizes.num_kv_heads[layer]
    parts = sharding.heads, sharding.kv_heads_of(layer)
    stored = (
        reader.checkpoint.take(f"{reader.prefix}self_attn.{name}.weight", (number, config.head_dim), rows=part)
        for name, number, part in zip(config.family.head_norms, numbers, parts, strict=True)
    )
    of_q, of_k = (_in_order(reader, weight.flatten(), "k_proj").float() for weight in stored)
    return of_q, of_k


def _query_factors(reader: LayerReader) -> torch.Tensor | None:
    """Weights of norms behind the rotary embedding. Those of k have a product with q's, so that q can have both."""
    config, dim = reader.config, reader.config.head_dim
    if not config.family.qk_norm_is_last:
        return None
    of_q, of_k = (_attention_norm(reader, name, dim).float() for name in config.family.head_norms)
    start, stop = reader.sharding.heads
    return _in_order(reader, (of_q * of_k).repeat(stop - start), "k_proj")


def _in_order(reader: LayerReader, rows: torch.Tensor, name: str) -> torch.Tensor:
    """Rows of heads in the order in which they are rotated, those of q after their gates."""
    config, gates = reader.config, rows[:0]
    if config.family.gated_attention and name == "q_proj":
        heads = rows.unflatten(0, (-1, 2, config.head_dim))
        rows, gates = heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)
    if config.head_order:
        rows = rows.unflatten(0, (-1, config.head_dim))[:, list(config.head_order)].flatten(0, 1)
    return torch.cat([gates, rows]) if len(gates) else rows


def _weight_in_order(reader: LayerReader, weight: StoredWeight, name: str) -> StoredWeight:
    if isinstance(weight, torch.Tensor):
        return _in_order(reader, weight, name)
    return weight.rows(_in_order(reader, torch.arange(len(weight.codes), device=weight.codes.device), name))
