"""Reads one worker's part of a decoder layer from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ...adapters.adapter import ABSORBED, NARROW_MODULES, PER_LAYER_MODULES, ROUTER, SHARED_MODULES
from ...kernels.backend import Kernels, LinearWeight
from ...kernels.quantised import QuantisedWeight, joined
from .config import ModelConfig
from .family import ExpertNames
from .latent_attention import AbsorbedWeights, LatentAttention
from .latent_config import LatentConfig
from .layer_input import LayerInput, LayerInputs
from .layers import (
    Attention,
    DecoderLayer,
    ExpertMlp,
    ExpertsBeside,
    GatedMlp,
    HeadNorm,
    LoraLinear,
    Mixer,
    NarrowLinear,
    RecurrentMixer,
    SharedExpert,
    SquaredReluMlp,
    WideLinear,
)
from .recurrent_rules import load_group_norm, load_rule
from .rotary_config import NO_ROTARY, QUERY_SCALING
from .sharding import ModelSharding, Range
from .weights import WeightSource


def load_layer(
    index: int,
    sharding: ModelSharding,
    checkpoint: WeightSource,
    kernels: Kernels,
    inputs: LayerInputs | None = None,
) -> DecoderLayer:
    """The layer. `inputs`: of all layers, where they have such. Raises ValueError for missing and misshapen tensors."""
    loader, config = _LayerLoader(index, sharding, checkpoint, kernels), sharding.config
    assert config.residual_multiplier == 1.0 or config.family.post_norms is None
    has_experts = config.experts is not None and config.experts.layers[index]
    is_beside = has_experts and config.family.experts_beside
    post_norms = config.family.post_norms or (None, None)
    loader.split_fused()
    return DecoderLayer(
        index,
        loader.mixer(),
        loader.experts() if has_experts and not is_beside else loader.mlp() if config.mlp_layers is None else None,
        attention_norm=loader.norm(config.family.attention_norm),
        mlp_norm=loader.norm(config.family.mlp_norm),
        attention_post_norm=loader.norm(post_norms[0]),
        mlp_post_norm=loader.norm(post_norms[1]),
        norm_eps=residual_eps(config),
        centred_norms=config.family.centred_norms,
        is_parallel=config.family.is_parallel,
        beside=loader.experts_beside() if is_beside else None,
        end=None if inputs is None else loader.input(inputs),
        scalar=loader.scalar(),
    )


def residual_eps(config: ModelConfig) -> float:
    """Of norms of the residual, which is kept divided by `residual_multiplier`: nothing that is added needs it then."""
    return config.norm_eps / config.residual_multiplier**2


def load_norm(
    name: str, width: int, sharding: ModelSharding, checkpoint: WeightSource, part: Range | None = None
) -> torch.Tensor:
    """A norm's weights, or a part of them.

    Families that store them less `norm_offset`, or say so by `wide_norms`, compute them in float32: these are float32.
    """
    weight, offset = checkpoint.take(f"{name}.weight", (width,), rows=part), sharding.config.family.norm_offset
    return weight.float() + offset if offset or sharding.config.family.wide_norms else weight


StoredWeight = torch.Tensor | QuantisedWeight  # `[out, in]`


class _LayerLoader:
    def __init__(self, index: int, sharding: ModelSharding, checkpoint: WeightSource, kernels: Kernels) -> None:
        self.prefix = f"model.layers.{index}."
        self._index, self._sharding, self._checkpoint = index, sharding, checkpoint
        self._config, self._pack, self._pack_experts = sharding.config, kernels.pack_linear, kernels.pack_experts
        self._path = sharding.config.shape.path
        self._float8, self._quantised = kernels.float8, kernels.quantised
        self._pack_layer = kernels.pack_linear if kernels.float8 is None else kernels.float8.pack

    def norm(self, name: str | None) -> torch.Tensor | None:
        """None: the layer has no such norm."""
        if name is None:
            return None
        return load_norm(f"{self.prefix}{name}", self._config.hidden_size, self._sharding, self._checkpoint)

    def split_fused(self) -> None:
        """Makes the linears that are one in the file known by their own names."""
        for path, parts in self._config.family.fused.items():
            block = path.partition(".")[0]
            num_rows = {name: self._config.shape.modules[name][1] for name in parts}
            rows = {f"{self.prefix}{block}.{name}.weight": number for name, number in num_rows.items()}
            self._checkpoint.split(f"{self.prefix}{path}.weight", rows)

    def mixer(self) -> Mixer:
        if self._index in (self._config.mlp_layers or ()):
            return self.squared_relu_mlp()
        if self._index not in self._config.attention_layers:
            return self.recurrent()
        return self.attention() if self._config.latent is None else self.latent_attention(self._config.latent)

    def latent_attention(self, sizes: LatentConfig) -> LatentAttention:
        config, shape = self._config, self._config.shape
        (start, stop), options = self._sharding.heads, config.rotaries[self._index].options
        of_queries, queries, query_norm = (start * sizes.query_dim, stop * sizes.query_dim), None, None
        if sizes.query_rank is None:
            parts = {"q_proj": of_queries, "kv_a_proj_with_mqa": None}
        else:
            parts = {"q_a_proj": None, "kv_a_proj_with_mqa": None}
            weight = self._stored("self_attn.q_b_proj", *shape.modules["q_b_proj"], of_queries)
            queries = LoraLinear(self._packed([weight]), None, self._places("q_b_proj"))
            query_norm = self._attention_norm("q_a_layernorm", sizes.query_rank)
        weights = [self._stored(f"self_attn.{name}", *shape.modules[name], part) for name, part in parts.items()]
        of_head, num_in = sizes.plain_dim + sizes.value_dim, config.num_heads * sizes.value_dim
        rows = self._rows(f"self_attn.{ABSORBED}", *shape.modules[ABSORBED], (start * of_head, stop * of_head))
        keys, values = rows.unflatten(0, (-1, of_head)).split([sizes.plain_dim, sizes.value_dim], dim=1)
        part = start * sizes.value_dim, stop * sizes.value_dim
        return LatentAttention(
            LoraLinear(self._packed(weights), self._latent_bias(sizes), self._places(*parts)),
            queries,
            query_norm,
            self._attention_norm("kv_a_layernorm", sizes.rank),
            AbsorbedWeights(
                self._pack_experts(keys.transpose(1, 2).contiguous()), self._pack_experts(values.contiguous())
            ),
            self._row_linear("o_proj", num_in, part, self._places("o_proj"), config.output_bias),
            sizes,
            stop - start,
            config.attention_scale,
            options if QUERY_SCALING in options else None,
            config.kv_layers.index(self._index),
        )

    def _latent_bias(self, sizes: LatentConfig) -> torch.Tensor | None:
        if not sizes.has_input_bias:
            return None
        biases = [self._checkpoint.take(f"{self.prefix}self_attn.kv_a_proj_with_mqa.bias", (sizes.width,))]
        if sizes.query_rank is not None:
            biases.insert(0, self._checkpoint.take(f"{self.prefix}self_attn.q_a_proj.bias", (sizes.query_rank,)))
        else:  # q_proj has none
            start, stop = self._sharding.heads
            biases.insert(0, biases[0].new_zeros((stop - start) * sizes.query_dim))
        return torch.cat(biases)

    def _attention_norm(self, name: str, width: int) -> torch.Tensor:
        return load_norm(f"{self.prefix}self_attn.{name}", width, self._sharding, self._checkpoint)

    def attention(self) -> Attention:
        config, sharding, sizes, layer = self._config, self._sharding, self._config.layer_sizes, self._index
        dim, hidden, kv_heads = sizes.head_dims[layer], self._config.hidden_size, sharding.kv_heads_of(layer)
        query, kv = ((start * dim, stop * dim) for start, stop in (sharding.heads, kv_heads))
        num_query, num_kv = config.num_heads * dim, sizes.num_kv_heads[layer] * dim
        gated = 2 if config.family.gated_attention else 1
        parts = {"q_proj": (gated * num_query, (gated * query[0], gated * query[1]))}
        if has_kv := sizes.kv_sources[layer] == layer:
            parts |= dict.fromkeys(("k_proj", "v_proj"), (num_kv, kv))
        weights = self._qkv_weights(parts, hidden)
        biases = {
            name: self._checkpoint.take(f"{self.prefix}{self._path(name)}.bias", (size,), rows=part)
            for name, (size, part) in parts.items()
            if config.qkv_bias
        }
        for name in ("q_proj", "k_proj") if has_kv else ("q_proj",):
            weights[name] = self._weight_in_order(weights[name], name)
            if name in biases:
                biases[name] = self._in_order(biases[name], name)
        bias, some = torch.cat([*biases.values()]) if biases else None, weights["q_proj"]
        return Attention(
            qkv=LoraLinear(self._packed([*weights.values()]), bias, self._places(*parts)),
            output=self._row_linear("o_proj", num_query, query, self._places("o_proj"), config.output_bias),
            head_norm=self._head_norm(has_kv, some.device if isinstance(some, torch.Tensor) else some.codes.device),
            num_heads=sharding.heads[1] - sharding.heads[0],
            num_kv_heads=kv_heads[1] - kv_heads[0],
            head_dim=dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            window=config.sliding_windows[layer],
            kv_index=config.kv_layers.index(sizes.kv_sources[layer]),
            has_kv=has_kv,
            is_gated=config.family.gated_attention,
            sinks=self._sinks(),
            beside=self.recurrent() if layer in config.recurrent_layers else None,
        )

    def _qkv_weights(self, parts: Mapping[str, tuple[int, Range]], hidden: int) -> dict[str, StoredWeight]:
        """`parts`: rows of each weight, and which of them are this worker's."""
        are_values = self._config.layer_sizes.keys_are_values[self._index]
        weights = {
            name: self._stored(self._path(name), hidden, size, part)
            for name, (size, part) in parts.items()
            if not (are_values and name == "v_proj")
        }
        if are_values and "v_proj" in parts:
            weights["v_proj"] = weights["k_proj"]
        elif "v_proj" not in parts:  # files have what nothing computes with
            for name in ("k_proj", "v_proj", "k_norm"):
                self._checkpoint.drop(prefix=f"{self.prefix}self_attn.{name}.")
        return weights

    def _places(self, *modules: str) -> tuple[int, ...]:
        """Indices of this layer's modules in `BaseShape.dense_modules`."""
        shape = self._config.shape
        return tuple(shape.dense_modules.index(shape.placed(self._index, module)) for module in modules)

    def recurrent(self) -> RecurrentMixer:
        config, shape, part = self._config.recurrent, self._config.shape, self._sharding.recurrent
        assert config is not None
        *names, last = shape.recurrent_modules
        places = [shape.dense_modules.index(name) for name in (*names, last)]
        rows, biases = list[StoredWeight](), list[torch.Tensor]()
        for name in names:
            weight, groups = self._stored(shape.path(name), *shape.modules[name]), shape.output_groups.get(name)
            outputs = [slice(*piece) if groups is None else groups.order(*piece) for piece in part.outputs[name]]
            rows += [_some_rows(weight, each) for each in outputs]
            if config.has_bias:
                bias = self._checkpoint.take(f"{self.prefix}{shape.path(name)}.bias", (shape.modules[name][1],))
                biases += [bias[each] for each in outputs]
        num_in, at = shape.modules[last][0], (config, self._sharding, f"{self.prefix}{config.block}.", self._checkpoint)
        return RecurrentMixer(
            LoraLinear(self._packed(rows), torch.cat(biases) if biases else None, tuple(places[:-1])),
            self._row_linear(last, num_in, part.inputs, tuple(places[-1:]), config.output_has_bias),
            load_rule(*at),
            self._config.recurrent_layers.index(self._index),
            load_group_norm(*at),
        )

    def input(self, inputs: LayerInputs) -> LayerInput:
        config, hidden, part = self._config, self._config.hidden_size, self._sharding.layer_inputs
        projection, table = inputs.of(self._index)
        gate, project, _ = (self._places(module) for module in PER_LAYER_MODULES)
        norm = self.norm("post_per_layer_input_norm")
        assert norm is not None
        return LayerInput(
            LoraLinear(self._pack_layer(projection), None, self._places(PER_LAYER_MODULES[2])),
            inputs.norm,
            inputs.eps,
            table,
            inputs.table_scale,
            part,
            LoraLinear(self._packed([self._stored("per_layer_input_gate", hidden, inputs.width, part)]), None, gate),
            self._row_linear("per_layer_projection", inputs.width, part, project, False),
            norm,
            config.norm_eps,
            config.activation,
        )

    def scalar(self) -> float:
        if not self._config.family.has_layer_scalars:
            return 1.0
        return float(self._checkpoint.take(f"{self.prefix}layer_scalar", (1,)))

    def _sinks(self) -> torch.Tensor | None:
        config = self._config
        if not config.family.has_sinks:
            return None
        name = f"{self.prefix}self_attn.sinks"
        return self._checkpoint.take(name, (config.num_heads,), rows=self._sharding.heads).float()

    def mlp(self) -> GatedMlp:
        config, part = self._config, self._sharding.intermediate_of(self._index)
        width = config.layer_sizes.intermediate_sizes[self._index]
        names = [self._path(name) for name in ("gate_proj", "up_proj")]
        biases = [
            self._checkpoint.take(f"{self.prefix}{name}.bias", (width,), rows=part) for name in names if config.mlp_bias
        ]
        weights = [self._stored(name, config.hidden_size, width, part) for name in names]
        return GatedMlp(
            LoraLinear(
                self._packed(weights), torch.cat(biases) if biases else None, self._places("gate_proj", "up_proj")
            ),
            self._row_linear("down_proj", width, part, self._places("down_proj"), config.mlp_bias),
            config.activation,
        )

    def squared_relu_mlp(self) -> SquaredReluMlp:
        config, part, name = self._config, self._sharding.intermediate_of(self._index), self._path("up_proj")
        hidden, width, bias = config.hidden_size, config.intermediate_size, None
        if config.mlp_bias:
            bias = self._checkpoint.take(f"{self.prefix}{name}.bias", (width,), rows=part)
        return SquaredReluMlp(
            LoraLinear(self._packed([self._stored(name, hidden, width, part)]), bias, self._places("up_proj")),
            self._row_linear("down_proj", width, part, self._places("down_proj"), config.mlp_bias),
        )

    def experts(self) -> ExpertMlp:
        config, names = self._config.experts, self._config.family.experts
        assert config is not None
        assert names is not None
        hidden, (first, stop) = self._config.hidden_size, self._sharding.experts
        if names.are_fused:
            gate_up, down = self._fused_experts(names)
        elif names.are_stacked or f"{self.prefix}{names.prefix}{names.stacked[0]}" in self._checkpoint:
            gate_up, down = self._stacked_experts(names)
        else:
            gate_up, down = self._single_experts(names)
        router, biases = f"{names.prefix}{names.router}", self._expert_biases(names) if names.take_turns else {}
        return ExpertMlp(
            router=self._narrow(ROUTER, router, hidden, config.num_experts, biases.pop("router_bias", None)),
            gate_up=self._pack_experts(torch.stack(gate_up)),
            down=self._pack_experts(torch.stack(down)),
            first=first,
            num_experts=stop - first,
            routing=config.routing,
            activation=self._config.activation,
            shared=self._shared_expert(names),
            dense=self.mlp() if names.beside_dense else None,
            choice_bias=self._choice_bias(f"{names.prefix}{names.bias}"),
            factors=self._factors(names),
            **biases,
        )

    def _single_experts(self, names: ExpertNames) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """gate and up, and down, of this worker's experts, `[2 * features, hidden]` and `[hidden, features]` each."""
        config = self._config.experts
        assert config is not None
        hidden, width = self._config.hidden_size, config.intermediate_size
        (first, stop), part = self._sharding.experts, self._sharding.expert_features
        gate_up, down = [], []
        for expert in range(config.num_experts):
            path = f"{names.prefix}experts.{expert}."
            if first <= expert < stop:
                halves = [self._rows(path + name, hidden, width, part) for name in (names.gate, names.up)]
                gate_up.append(torch.cat(halves))
                down.append(self._columns(path + names.down, width, hidden, part))
            else:  # an expert of another worker: its shapes are checked, and nothing is read
                for name in (names.gate, names.up):
                    self._rows(path + name, hidden, width, (0, 0))
                self._rows(path + names.down, width, hidden, (0, 0))
        return gate_up, down

    def _stacked_experts(self, names: ExpertNames) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The same of files where a layer's experts are one tensor, as transformers holds them."""
        config = self._config.experts
        assert config is not None
        hidden, width = self._config.hidden_size, config.intermediate_size
        part = slice(*self._sharding.expert_features)
        gate_up, down = (
            self._one_by_one(f"{names.prefix}{name}", shape)
            for name, shape in zip(names.stacked, ((2 * width, hidden), (hidden, width)), strict=True)
        )
        return [torch.cat((both[:width][part], both[width:][part])) for both in gate_up], [
            each[:, part] for each in down
        ]

    def _one_by_one(self, name: str, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
        """Of a tensor that holds all experts of a layer, this worker's, each read as a whole. `shape`: of one."""
        config, path, (first, stop) = self._config.experts, f"{self.prefix}{name}", self._sharding.experts
        assert config is not None
        self._checkpoint.split(path, {f"{path}.{expert}": 1 for expert in range(config.num_experts)})
        for expert in range(config.num_experts):
            rows = (0, 1 if first <= expert < stop else 0)  # of another worker's the shape is checked
            yield from self._checkpoint.take(f"{path}.{expert}", (1, *shape), rows=rows)

    def _fused_experts(self, names: ExpertNames) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The same of tensors whose columns are outputs (Llama 4, gpt-oss)."""
        config = self._config.experts
        assert config is not None
        hidden, width = self._config.hidden_size, config.intermediate_size
        part = slice(*self._sharding.expert_features)
        gate_up, down = (
            self._one_by_one(f"{names.prefix}experts.{name}", shape)
            for name, shape in (("gate_up_proj", (hidden, 2 * width)), ("down_proj", (width, hidden)))
        )
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if names.take_turns else (slice(width), slice(width, None))
        halves = [torch.cat((both[:, gate][:, part], both[:, up][:, part]), dim=1).T for both in gate_up]
        return halves, [each[part].T for each in down]

    def _expert_biases(self, names: ExpertNames) -> dict[str, torch.Tensor | None]:
        """The biases of fused experts. Workers that share an expert's features add up its outputs: one has the bias."""
        config = self._config.experts
        assert config is not None
        hidden, width, num_experts = self._config.hidden_size, config.intermediate_size, config.num_experts
        experts, part = self._sharding.experts, slice(*self._sharding.expert_features)
        path = f"{self.prefix}{names.block}"
        gate_up = self._checkpoint.take(f"{path}.experts.gate_up_proj_bias", (num_experts, 2 * width), rows=experts)
        down = self._checkpoint.take(f"{path}.experts.down_proj_bias", (num_experts, hidden), rows=experts)
        return {
            "router_bias": self._checkpoint.take(f"{path}.{names.router}.bias", (num_experts,)),
            "gate_up_bias": torch.cat((gate_up[:, 0::2][:, part], gate_up[:, 1::2][:, part]), dim=1),
            "down_bias": down if part.start == 0 else None,
        }

    def experts_beside(self) -> ExpertsBeside:
        config, names = self._config, ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2")
        dense_post_norm, norm, post_norm = (self.norm(name) for name in (*names, "post_feedforward_layernorm_2"))
        assert dense_post_norm is not None and norm is not None and post_norm is not None
        router = self._checkpoint.take(f"{self.prefix}router.scale", (config.hidden_size,)).float()
        norms = router * config.hidden_size**-0.5, norm, post_norm, dense_post_norm
        return ExpertsBeside(self.experts(), *norms, config.norm_eps)

    def _factors(self, names: ExpertNames) -> torch.Tensor | None:
        config = self._config.experts
        assert config is not None
        if not names.factors:
            return None
        return self._checkpoint.take(f"{self.prefix}{names.factors}", (config.num_experts,)).float()

    def _choice_bias(self, name: str) -> torch.Tensor | None:
        config = self._config.experts
        assert config is not None
        if not config.routing.has_bias:
            return None
        shape = (1, config.num_experts) if ".moe_statics." in name else (config.num_experts,)
        return self._checkpoint.take(f"{self.prefix}{name}", shape, in_floats=True).flatten()

    def _shared_expert(self, names: ExpertNames) -> SharedExpert | None:
        config, hidden, part = self._config.experts, self._config.hidden_size, self._sharding.shared_features
        if config is None or config.shared_intermediate_size is None:
            return None
        path, width = f"{names.prefix}{names.shared}", config.shared_intermediate_size
        gate_up = torch.cat([self._rows(f"{path}.{name}_proj", hidden, width, part) for name in ("gate", "up")])
        down = self._columns(f"{path}.down_proj", width, hidden, part)
        gate = None
        if config.shared_is_gated:
            gate = self._narrow(NARROW_MODULES[0], f"{names.prefix}{names.shared_gate}", hidden, 1, None)
        places = self._places(*SHARED_MODULES)
        return SharedExpert(
            WideLinear(self._pack(gate_up), None, places[:2]), WideLinear(self._pack(down), None, places[2:]), gate
        )

    def _narrow(self, module: str, name: str, num_in: int, num_out: int, bias: torch.Tensor | None) -> NarrowLinear:
        """A linear that is whole on every worker."""
        weight, shape = self._pack(self._rows(name, num_in, num_out, None)), self._config.shape
        return NarrowLinear(weight, bias, self._places(module), num_out + shape.padding(module))

    def _head_norm(self, has_kv: bool, device: torch.device) -> HeadNorm | None:
        config, layer = self._config, self._index
        if not config.qk_norm:
            return None
        if not config.family.qk_norm_has_weights:
            # Behind the rotation it would be the same, since that leaves the norm as it is.
            if config.rotaries[layer].kind == NO_ROTARY:
                return None
            ones = torch.ones(config.head_dim, device=device)
            return HeadNorm(ones, ones, config.norm_eps)
        dim, spans = config.layer_sizes.head_dims[layer], config.family.qk_norm_spans_heads
        kv_heads = config.layer_sizes.num_kv_heads[layer], self._sharding.kv_heads_of(layer)
        of_q, of_k = config.family.head_norms
        heads = {of_q: (config.num_heads, self._sharding.heads)} | ({of_k: kv_heads} if has_kv else {})
        norms = [
            load_norm(
                f"{self.prefix}self_attn.{name}",
                number * dim if spans else dim,
                self._sharding,
                self._checkpoint,
                (start * dim, stop * dim) if spans else None,
            )
            for name, (number, (start, stop)) in heads.items()
        ]
        ordered = [self._in_order(norm, "k_proj") for norm in norms]
        values = torch.ones(dim, device=norms[0].device) if config.family.has_value_norm else None
        return HeadNorm(ordered[0], ordered[-1], config.norm_eps, spans, values)

    def _in_order(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Rows of heads in the order in which they are rotated, those of q after their gates."""
        config, gates = self._config, rows[:0]
        if config.family.gated_attention and name == "q_proj":
            heads = rows.unflatten(0, (-1, 2, config.head_dim))
            rows, gates = heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)
        if config.head_order:
            rows = rows.unflatten(0, (-1, config.head_dim))[:, list(config.head_order)].flatten(0, 1)
        return torch.cat([gates, rows]) if len(gates) else rows

    def _weight_in_order(self, weight: StoredWeight, name: str) -> StoredWeight:
        if isinstance(weight, torch.Tensor):
            return self._in_order(weight, name)
        return weight.rows(self._in_order(torch.arange(len(weight.codes), device=weight.codes.device), name))

    def _row_linear(
        self, module: str, num_in: int, part: Range, modules: tuple[int, ...], has_bias: bool
    ) -> LoraLinear:
        hidden, name = self._config.hidden_size, self._path(module)
        if self._float8 is None:
            packed = self._packed_columns(name, num_in, hidden, part)
        else:  # a row's scale is that of all its inputs, so that gangs of all sizes have the same weights
            packed = self._float8.pack(self._rows(name, num_in, hidden, None), part)
        bias = self._checkpoint.take(f"{self.prefix}{name}.bias", (hidden,)) if has_bias else None
        return LoraLinear(packed, bias if self._sharding.rank == 0 else None, modules)

    def _stored(
        self, name: str, num_in: int, num_out: int, rows: Range | None = None, columns: Range | None = None
    ) -> StoredWeight:
        """A weight or a part of it, in few bits if the file has it so and the kernels multiply such."""
        path, shape = f"{self.prefix}{name}.weight", (num_out, num_in)
        if self._quantised is not None and (weight := self._checkpoint.take_quantised(path, shape, rows, columns)):
            return weight
        return self._checkpoint.take(path, shape, rows=rows, columns=columns)

    def _packed(self, weights: Sequence[StoredWeight]) -> LinearWeight:
        """The outputs of all, side by side: in few bits if all are, or are to be rounded to eight."""
        if self._quantised is None:
            return self._pack_layer(torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)]))
        narrow = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
        together = joined(narrow) if len(narrow) == len(weights) else None
        if together is not None and (packed := self._quantised.pack(together)) is not None:
            return packed
        dtype = self._quantised.dtype
        wide = [each.dequantised().to(dtype) if isinstance(each, QuantisedWeight) else each for each in weights]
        if self._quantised.rounds:
            return self._quantised.pack(QuantisedWeight.of_eight_bits(torch.cat(wide)))
        return self._pack_layer(torch.cat(wide))

    def _packed_columns(self, name: str, num_in: int, num_out: int, part: Range) -> LinearWeight:
        if self._quantised is None or not self._quantised.rounds:
            return self._packed([self._stored(name, num_in, num_out, columns=part)])
        # A row's scale is that of all its inputs, so that gangs of all sizes have the same weights.
        stored = self._stored(name, num_in, num_out)
        if isinstance(stored, QuantisedWeight):
            if (packed := self._quantised.pack(stored.columns(*part))) is not None:
                return packed
            stored = stored.dequantised().to(self._quantised.dtype)
        return self._quantised.pack(QuantisedWeight.of_eight_bits(stored).columns(*part))

    def _rows(self, name: str, num_in: int, num_out: int, part: Range | None) -> torch.Tensor:
        return self._checkpoint.take(f"{self.prefix}{name}.weight", (num_out, num_in), rows=part)

    def _columns(self, name: str, num_in: int, num_out: int, part: Range) -> torch.Tensor:
        return self._checkpoint.take(f"{self.prefix}{name}.weight", (num_out, num_in), columns=part)


def _some_rows(weight: StoredWeight, rows: slice | list[int]) -> StoredWeight:
    return weight[rows] if isinstance(weight, torch.Tensor) else weight.rows(rows)
