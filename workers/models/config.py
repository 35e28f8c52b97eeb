"""The facts of a base model, read from a folder in Hugging Face format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ...adapters.adapter import (
    BaseShape,
)
from ...kernels.norms import ACTIVATIONS, UNGATED, XIELU, Activation, ClampedSwiglu, Ungated
from ...kernels.windows import AttentionChunk
from ..config import KVDtype
from .adapter_shape import adapter_shape
from .config_keys import read_keys
from .expert_config import ExpertConfig
from .families import family_of, wrapper_of
from .family import Family, Wrapper
from .latent_config import LatentConfig
from .layer_sizes import LayerSizes
from .module_scales import ModuleScales
from .quantised_config import Quantisation, read_quantisation
from .recurrent_config import RecurrentConfig, kinds_of_layers, read_recurrent
from .rotary_config import (
    CHUNK_SCALING,
    NO_ROTARY,
    RotaryConfig,
    head_order,
    layer_rotaries,
    with_default_rope,
    with_stretched_theta,
    without_amplitude,
    without_axes,
)
from .sliding import has_rotary, mlp_layers, sliding_layers
from .stored_tensor import folder_has_head

_GENERATION_CONFIG: Final = "generation_config.json"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only base. Counts are of the whole model, before any sharding."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    rotaries: tuple[RotaryConfig, ...]  # by layer
    max_model_len: int  # tokens
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of o_proj
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    sliding_windows: tuple[int | None, ...]  # by layer: newest tokens that a token sees, itself included; None: all
    experts: ExpertConfig | None
    eos_token_ids: tuple[int, ...]
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what each half of a layer adds to the residual
    logit_multiplier: float = 1.0
    head_order: tuple[int, ...] = ()  # see `rotary_config.head_order`
    is_wrapped: bool = False  # the text model of one that takes pictures too
    qk_norm: bool = False  # RMS norm over each head of q and k before the rotary embedding
    recurrent: RecurrentConfig | None = None
    scales: ModuleScales | None = None  # of its linears
    latent: LatentConfig | None = None  # all heads attend to one KV head, which holds it
    sizes: LayerSizes | None = None  # see `layer_sizes`
    mlp_layers: tuple[int, ...] | None = None  # that are an MLP and nothing else; None: all layers have both halves
    quantisation: Quantisation | None = None  # of the files; None: their weights have 16 or 32 bits

    @staticmethod
    def from_folder(folder: Path) -> ModelConfig:
        """Reads config.json and generation_config.json. Raises ValueError when motet cannot compute such a model."""
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no config.json: a model folder in Hugging Face format is needed")
        try:
            raw = _object_of(path)
            config = _parse(raw, _generation_config(folder).get("eos_token_id"))
        except KeyError as error:
            raise ValueError(f"{path} lacks {error.args[0]!r}") from None
        except (TypeError, AttributeError, ArithmeticError) as error:  # a value of another type than its key has
            raise ValueError(f"{path} cannot be read: {error}") from error
        if config.is_wrapped and config.tie_word_embeddings and "tie_word_embeddings" not in raw:
            # Mistral Small 3.1 has a head of its own and does not say so: transformers takes it from the file.
            config = replace(config, tie_word_embeddings=not folder_has_head(folder))
        return config

    @cached_property
    def layer_sizes(self) -> LayerSizes:
        """Of layers that all are alike, unless `sizes` says otherwise."""
        if self.sizes is not None:
            return self.sizes
        return LayerSizes.uniform(self.num_layers, self.head_dim, self.num_kv_heads, self.intermediate_size)

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """By layer, elements of a head that its rotary table is for."""
        return self.layer_sizes.head_dims if self.latent is None else (self.latent.rotated_dim,) * self.num_layers

    @property
    def kv_sides(self) -> int:
        """1: V is read where K is. 2: each has a place of its own in a page."""
        return 1 if self.latent is not None else 2

    @cached_property
    def shape(self) -> BaseShape:
        """The shape that adapters must fit."""
        return adapter_shape(self)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a recurrent state."""
        return () if self.recurrent is None else tuple(i for i, has in enumerate(self.recurrent.layers) if has)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention."""
        if self.family.recurrent == "parallel_mamba":
            return tuple(range(self.num_layers))
        without = {*self.recurrent_layers, *(self.mlp_layers or ())}
        if self.family.has_halves and self.experts is not None:
            without |= {layer for layer, has in enumerate(self.experts.layers) if has}
        return tuple(layer for layer in range(self.num_layers) if layer not in without)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention and a KV of their own."""
        return tuple(layer for layer in self.attention_layers if layer == self.layer_sizes.kv_sources[layer])

    @property
    def longest(self) -> int | None:
        """Tokens to which the rotary embedding was stretched, whatever the context is; None: config.json says none."""
        lengths = [int(rotary.longest) for rotary in self.rotaries if rotary.longest is not None]
        return max(lengths, default=None)

    def slab(self, block_size: int, kv_dtype: KVDtype = "dtype", element_bytes: int = 2) -> int:
        """Elements that a page of `block_size` tokens holds in one layer; see `slab_of_head`."""
        return self.num_kv_heads * slab_of_head(self.head_dim, block_size, kv_dtype, element_bytes, self.kv_sides)


_UP_TO_1: Final = ("0 to 1", 0.0, 1.0)
# What vLLM 0.33 takes of generation_config.json: what is accepted. It does not look at `do_sample`, which is of
# transformers' own `generate`; greedy is temperature = 0.
_SAMPLING_KEYS: Final = {
    "temperature": ("0 to 2", 0.0, 2.0),
    "top_k": ("a whole number from -1; 0 and -1: off", -1.0, 2.0**31 - 1),
    "top_p": _UP_TO_1,
    "min_p": _UP_TO_1,
    "repetition_penalty": ("0.001 to 100", 0.001, 100.0),
    "max_new_tokens": ("a whole number from 1", 1.0, 2.0**31 - 1),
}
_WHOLE: Final = frozenset({"top_k", "max_new_tokens"})


def sampling_defaults(folder: Path) -> dict[str, int | float]:
    """What generation_config.json says of requests that leave it open, by the request's field.

    Raises ValueError for a value that requests could not have.
    """
    defaults: dict[str, int | float] = {}
    for key, value in _generation_config(folder).items():
        if key not in _SAMPLING_KEYS or value is None:
            continue
        accepted, low, high = _SAMPLING_KEYS[key]
        is_number = isinstance(value, int if key in _WHOLE else int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise ValueError(
                f"{folder / _GENERATION_CONFIG}: {key} = {value!r}: {accepted} is accepted; with --sampling-defaults "
                "openai it is not read"
            )
        defaults["max_tokens" if key == "max_new_tokens" else key] = value
    return defaults


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / _GENERATION_CONFIG
    return _object_of(path) if path.is_file() else {}


def slab_of_head(head_dim: int, block_size: int, kv_dtype: KVDtype, element_bytes: int, num_sides: int = 2) -> int:
    """Elements that a page holds of one KV head in one layer: K, then V, and in float8 the scales of both.

    `num_sides`: 1: of K alone, see `ModelConfig.kv_sides`.

    `element_bytes`: of an element of the pool; an element of KV in float8 takes one byte, and each scale four. Raises
    ValueError for sizes of which kernels could not read 16 bytes at a time.
    """
    if kv_dtype == "dtype":
        return block_size * num_sides * head_dim
    if num_sides == 1:
        raise ValueError(f"kv_dtype = {kv_dtype!r} is not supported for latent attention: kv_dtype = 'dtype' is needed")
    if head_dim % 16 or block_size % 8:
        raise ValueError(
            f"kv_dtype = {kv_dtype!r}: this base has KV heads of {head_dim} and pages have {block_size} tokens, and KV "
            "of eight bits takes heads of a multiple of 16 and a block_size that is a multiple of 8; with kv_dtype = "
            "'dtype' others are served"
        )
    return block_size * 2 * (head_dim + 4) // element_bytes


def _object_of(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no JSON object")
    return document


def _parse(raw: Mapping[str, Any], generation_eos: Any) -> ModelConfig:
    quantisation = read_quantisation(raw)
    wrapper = wrapper_of(_architecture(raw))
    if wrapper is not None:
        _refuse_unsupported(raw, wrapper.text)
        raw, family = _text_config(raw, wrapper)
        quantisation = quantisation or read_quantisation(raw)
    else:
        family = _family(raw)
    _refuse_unsupported(raw, family)
    if family.reads_wrapped:
        raw = without_axes(raw, has_axes=False)
    raw = with_default_rope(raw, family.default_rope)
    values = read_keys(raw, family)
    num_heads, hidden_size = values["num_attention_heads"], values["hidden_size"]
    latent = LatentConfig.from_values(values, family) if family.is_latent else None
    num_kv_heads = values["num_key_value_heads"] or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads are no multiple of {num_kv_heads} KV heads")
    head_dim = values["head_dim"] or max(1, hidden_size // num_heads)
    if family.qk_norm_is_last:
        raw = with_stretched_theta(raw, head_dim, family.rope_theta)
        values = {**values, **{key: raw.get(key) for key in ("rope_scaling", "rope_parameters") if key in raw}}
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.width
    attention_bias = values.get("attention_bias", values.get("use_bias", False))
    if family.model_type == "internlm3" and values["mlp_bias"] != attention_bias:
        raise ValueError(
            f"qkv_bias = {attention_bias} and bias = {values['mlp_bias']}: both or neither are supported, as by "
            "transformers"
        )
    slides = sliding_layers(
        values, family.slides, extra_kinds=kinds_of_layers(family), last_is_full=family.last_is_full
    )
    window, ties = values.get("sliding_window"), values.get("tie_embedding")
    if (chunk := values.get("attention_chunk_size")) is not None:
        window = AttentionChunk(chunk)
    rotary_values = {**raw, **values}
    if values.get("rotary_dim") is not None:
        rotary_values.setdefault("partial_rotary_factor", values["rotary_dim"] / head_dim)
    if latent is not None and family.rotated_share is not None:
        rotary_values.setdefault("partial_rotary_factor", latent.rotated_dim / latent.query_dim)
    rotaries = layer_rotaries(
        rotary_values,
        slides,
        family.rope_theta,
        family.local_rope_theta,
        family.rotated_share,
        family.rope_kinds,
        family.scales_queries,
    )
    if family.qk_norm_is_last or (values.get("use_qk_norm") and not family.qk_norm_has_weights):
        rotaries = without_amplitude(rotaries)
    if rotaries[0].factors:
        rotaries = (_with_amplitude(rotaries[0], int(values["max_position_embeddings"]), head_dim),) * len(rotaries)
    if latent is not None:
        rotaries = (latent.rotary(rotaries[0]),) * len(rotaries)
    context = _context(values, rotaries, family)
    if "no_rope_layers" in values:
        scaling = {key: float(values[key]) for key in CHUNK_SCALING} if values.get("attn_temperature_tuning") else {}
        rotaries = _rotated(rotaries, _rotating_layers(values), scaling)
    elif family.only_windows_rotate and window is not None:
        rotaries = _rotated(rotaries, slides, {})
    elif not family.rotates or values.get("position_embedding_type", "rope") != "rope":
        rotaries = _rotated(rotaries, [False] * len(rotaries), {})
    if window is not None and window >= context:  # it hides nothing, as those of Phi-4 mini and Ministral 8B
        window = None
    sizes = LayerSizes.from_values(values, slides) if family.sizes_differ else None
    config = ModelConfig(
        family=family,
        vocab_size=values["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(values),
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(values[family.norm_eps_key]),
        activation=_activation(values, family),
        rotaries=rotaries,
        max_model_len=context,
        tie_word_embeddings=values["tie_word_embeddings"] if ties is None else ties,
        qkv_bias=latent is None and (attention_bias or values.get("qkv_bias", family.qkv_bias)),
        output_bias=values.get("attention_out_bias", attention_bias and family.output_has_bias),
        mlp_bias=values.get("mlp_bias", values.get("use_bias", False)),
        attention_scale=_attention_scale(values, family, head_dim) if latent is None else latent.scale(rotaries[0]),
        attention_softcap=_number(values.get("attn_logit_softcapping")),
        logit_softcap=_number(values.get("final_logit_softcapping")),
        sliding_windows=tuple(window if slide else None for slide in slides),
        experts=ExpertConfig.from_values(values, family),
        eos_token_ids=tuple(sorted(_token_ids(raw.get("eos_token_id")) | _token_ids(generation_eos))),
        embedding_multiplier=float(values.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(values.get("residual_multiplier", 1.0)),
        logit_multiplier=_logit_multiplier(values),
        head_order=_head_order(family, rotaries, sizes, head_dim) if latent is None else (),
        is_wrapped=wrapper is not None or family.reads_wrapped,
        qk_norm=values.get("use_qk_norm", family.qk_norm),
        recurrent=read_recurrent(values, family),
        mlp_layers=mlp_layers(values) if family.has_halves else None,
        latent=latent,
        sizes=sizes,
        quantisation=quantisation,
    )
    scales = ModuleScales.from_values(values, config.shape.modules, config.recurrent)
    return config if scales is None else replace(config, scales=scales)


def _head_order(
    family: Family, rotaries: Sequence[RotaryConfig], sizes: LayerSizes | None, head_dim: int
) -> tuple[int, ...]:
    """Of layers whose heads differ in size: as stored. Raises ValueError for heads that cannot be rotated so."""
    if sizes is None:
        return head_order(head_dim, rotaries[0].num_rotated(head_dim), family.rotates_neighbours)
    for rotary, dim in zip(rotaries, sizes.head_dims, strict=True):
        if rotary.num_rotated(dim) < dim:
            raise ValueError("partial_rotary_factor is supported with rope_type 'proportional' alone")
    return ()


def _intermediate_size(values: Mapping[str, Any]) -> int:
    """Of a dense MLP. Raises ValueError if it has no features."""
    key = next(
        key for key in ("intermediate_size_mlp", "shared_intermediate_size", "intermediate_size") if key in values
    )
    size = int(values.get("block_ff_dim") or values[key])
    if not values.get("block_auto_adjust_ff_dim", False):
        return size
    multiple = int(values["block_multiple_of"])  # LFM2
    size = -(-int(values["block_ffn_dim_multiplier"] * int(2 * size / 3)) // multiple) * multiple
    if size < 1:
        raise ValueError(f"intermediate_size = {values['intermediate_size']}: two thirds of it are less than 1")
    return size


def _logit_multiplier(values: Mapping[str, Any]) -> float:
    factor = values.get("logit_scale", values.get("lm_head_multiplier", 1.0))
    return float(factor) / float(values.get("logits_scaling", 1.0))


def _attention_scale(values: Mapping[str, Any], family: Family, head_dim: int) -> float:
    by_size = values.get("query_pre_attn_scalar", head_dim) ** -0.5
    return family.attention_scale or float(values.get("attention_multiplier", by_size))


def _activation(values: Mapping[str, Any], family: Family) -> Activation:
    name = values.get(family.activation_key, "silu")
    name = family.activations.get(name, name)
    if not family.has_gates:
        names = [each for each in UNGATED if each != XIELU or family.defaults.get(family.activation_key) == XIELU]
        if name not in names:
            raise ValueError(f"{family.activation_key} {name!r} is not supported: {', '.join(names)} are accepted")
        return Ungated(name)
    is_clamped = "swiglu_limit" in values
    if name not in ACTIVATIONS or (is_clamped and name != "silu"):
        accepted = "'silu' is" if is_clamped else f"{', '.join(ACTIVATIONS)} are"
        raise ValueError(f"{family.activation_key} {name!r} is not supported: {accepted} accepted")
    return ClampedSwiglu(float(values["swiglu_alpha"]), float(values["swiglu_limit"])) if is_clamped else name


def _architecture(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or ["none named"]
    if not isinstance(architectures, list):
        raise ValueError(f"architectures = {architectures!r}: a list with one name is needed")
    return str(architectures[0])


def _family(raw: Mapping[str, Any]) -> Family:
    architecture = _architecture(raw)
    if raw.get("model_type") == "internlm3" and architecture == "LlamaForCausalLM":  # as transformers saves it
        architecture = "InternLM3ForCausalLM"
    family = family_of(architecture)
    _check_model_type(raw, family.model_type)
    return family


def _check_model_type(raw: Mapping[str, Any], needed: str) -> None:
    """transformers chooses by `model_type`, and motet by `architectures`."""
    model_type = raw.get("model_type")
    if model_type == "kimi_k2":  # of released files; transformers takes it for the other, too
        model_type = "deepseek_v3"
    if model_type is not None and model_type != needed:
        raise ValueError(
            f"model_type = {raw['model_type']!r} contradicts architectures = {raw['architectures']!r}, whose "
            f"model_type is {needed!r}: correct one of them"
        )


def _text_config(raw: Mapping[str, Any], wrapper: Wrapper) -> tuple[Mapping[str, Any], Family]:
    """The keys of the text model, as a model of text alone has them, and its family."""
    _check_model_type(raw, wrapper.model_type)
    family = wrapper.text
    if wrapper.may_be_flat and "text_config" not in raw:
        text = {key: value for key, value in raw.items() if key not in ("model_type", "vision_config")}
    else:
        text = dict(raw["text_config"])
        families = {each.model_type: each for each in wrapper.texts}
        model_type = text.get("model_type", family.model_type)
        if model_type not in families:
            accepted = ", ".join(map(repr, families))
            raise ValueError(
                f"text_config.model_type = {model_type!r} is not supported in a {wrapper.model_type}: {accepted} "
                f"{'is' if len(families) == 1 else 'are'} accepted"
            )
        family = families[model_type]
        text["eos_token_id"] = raw.get("eos_token_id") or text.get("eos_token_id")
    if isinstance(text.get("tie_word_embeddings", False), bool):  # else it is refused
        text["tie_word_embeddings"] = raw.get("tie_word_embeddings", wrapper.ties_by_default)
    return without_axes(text, wrapper.has_axes), family


def _context(values: Mapping[str, Any], rotaries: Sequence[RotaryConfig], family: Family) -> int:
    """Tokens. Where vLLM multiplies: `linear` says how much more positions there are than before it."""
    positions, rotary = int(values["max_position_embeddings"]), rotaries[0]
    if rotary.kind == "linear" and not family.linear_is_in_context:
        return int(positions * rotary.options["factor"])
    return positions


def _with_amplitude(rotary: RotaryConfig, max_positions: int, head_dim: int) -> RotaryConfig:
    """A `longrope` whose amplitude is known. Raises ValueError for lists that do not fit the heads."""
    num_pairs, options = rotary.num_rotated(head_dim) // 2, rotary.options
    if any(len(factors) != num_pairs for factors in rotary.factors):
        raise ValueError(f"short_factor and long_factor of a rotary embedding: {num_pairs} numbers each are needed")
    original = options["original_max_position_embeddings"]
    factor = options.get("factor", max_positions / original)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(rotary, options={"attention_factor": amplitude, **options})


def _rotating_layers(values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Raises ValueError for `no_rope_layers` that do not fit the layers."""
    layers, num_layers = values["no_rope_layers"], values["num_hidden_layers"]
    if layers and len(layers) != num_layers:
        raise ValueError(f"no_rope_layers has {len(layers)} entries: num_hidden_layers = {num_layers} needs as many")
    return tuple(has_rotary(values, layer) for layer in range(num_layers))


def _rotated(
    rotaries: Sequence[RotaryConfig], rotates: Sequence[bool], scaling: Mapping[str, float]
) -> tuple[RotaryConfig, ...]:
    """The embedding of each layer, where some do not rotate. `scaling`: of these layers' queries."""
    return tuple(
        rotary if does else replace(rotary, kind=NO_ROTARY, options=scaling)
        for rotary, does in zip(rotaries, rotates, strict=True)
    )


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    key = "use_bidirectional_attention"
    if raw.get(key) and raw[key] != family.computes.get(key):
        raise ValueError("use_bidirectional_attention is not supported: only causal decoders are accepted")
    if raw.get("is_causal") is False:
        raise ValueError("is_causal = false is not supported: only causal decoders are accepted")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _token_ids(value: Any) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"eos_token_id = {value!r}: a whole number, a list of them or null is needed")
    return {*ids}
