"""The facts of a base model, read from a folder in Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ...adapters.adapter import EXPERT_MODULES, BaseShape, ExpertShape
from ..config import KVDtype
from ..window_pages import FullLayers
from .expert_config import ExpertConfig
from .families import Family, family_of
from .rotary_config import RotaryConfig, layer_rotaries

Activation = Literal["silu", "gelu_pytorch_tanh"]
_MOST_LAYERS = 10_000


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

    @staticmethod
    def from_folder(folder: Path) -> ModelConfig:
        """Reads config.json and generation_config.json. Raises ValueError when motet cannot compute such a model."""
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no config.json: a model folder in Hugging Face format is needed")
        raw, generation = _object_of(path), folder / "generation_config.json"
        eos = _object_of(generation).get("eos_token_id") if generation.is_file() else None
        try:
            return _parse(raw, eos)
        except KeyError as error:
            raise ValueError(f"{path} lacks {error.args[0]!r}") from None
        except (TypeError, AttributeError, OverflowError) as error:  # a value of another type than its key has
            raise ValueError(f"{path} cannot be read: {error}") from error

    @property
    def shape(self) -> BaseShape:
        """The shape that adapters must fit. A base with experts takes adapters of its attention and its experts."""
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = {
            "q_proj": (hidden, query),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (query, hidden),
        }
        dense = {
            "gate_proj": (hidden, self.intermediate_size),
            "up_proj": (hidden, self.intermediate_size),
            "down_proj": (self.intermediate_size, hidden),
        }
        experts, names = self.experts, self.family.experts
        if experts is None or names is None:
            return BaseShape(self.num_layers, attention | dense)
        width, gate, up, down = experts.intermediate_size, *EXPERT_MODULES
        sparse = {gate: (hidden, width), up: (hidden, width), down: (width, hidden)}
        layers = tuple(layer for layer, has_experts in enumerate(experts.layers) if has_experts)
        called = {gate: names.gate, up: names.up, down: names.down}
        return BaseShape(
            self.num_layers, attention | sparse, ExpertShape(experts.num_experts, layers, names.block, called)
        )

    @property
    def window(self) -> int | None:
        """Newest tokens that a token sees in the layers with a window, itself included.

        None: too few have one for pages to be given back.
        """
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) * 2 >= self.num_layers else None

    @property
    def full_layers(self) -> FullLayers | None:
        """The layers that see all tokens; None: none does, or too many for pages to be given back."""
        full = tuple(layer for layer, window in enumerate(self.sliding_windows) if window is None)
        return FullLayers(full, self.num_layers) if full and self.window is not None else None

    def slab(self, block_size: int, kv_dtype: KVDtype = "dtype", element_bytes: int = 2) -> int:
        """Elements that a page of `block_size` tokens holds in one layer; see `slab_of_head`."""
        return self.num_kv_heads * slab_of_head(self.head_dim, block_size, kv_dtype, element_bytes)


def slab_of_head(head_dim: int, block_size: int, kv_dtype: KVDtype, element_bytes: int) -> int:
    """Elements that a page holds of one KV head in one layer: K, then V, and in float8 the scales of both.

    `element_bytes`: of an element of the pool; an element of KV in float8 takes one byte, and each scale four. Raises
    ValueError for sizes of which kernels could not read 16 bytes at a time.
    """
    if kv_dtype == "dtype":
        return block_size * 2 * head_dim
    if head_dim % 16 or block_size % 8:
        raise ValueError(
            f"kv_dtype = {kv_dtype!r}: this base has KV heads of {head_dim} and pages have {block_size} tokens, and KV "
            "of eight bits takes heads of a multiple of 16 and a block_size that is a multiple of 8; with kv_dtype = "
            "'dtype' others are served"
        )
    return block_size * 2 * (head_dim + 4) // element_bytes


def _object_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def _size(raw: Mapping[str, Any], key: str, most: int = 1 << 31) -> int:
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{key} = {value!r}: a whole number from 1 to {most} is needed")
    return value


def _parse(raw: Mapping[str, Any], generation_eos: Any) -> ModelConfig:
    architectures = raw.get("architectures") or ["none named"]
    family = family_of(str(architectures[0]))
    _refuse_unsupported(raw, family)
    num_heads, hidden_size = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    num_kv_heads = _size(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else num_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads are no multiple of {num_kv_heads} KV heads")
    head_dim = _size(raw, "head_dim") if raw.get("head_dim") else max(1, hidden_size // num_heads)
    attention_bias = bool(raw.get("attention_bias", False))
    num_layers = _size(raw, "num_hidden_layers", _MOST_LAYERS)
    slides = tuple(family.slides(raw, layer) for layer in range(num_layers))
    window = raw.get("sliding_window", family.window)
    return ModelConfig(
        family=family,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=raw.get(family.activation_key, family.activation),
        rotaries=layer_rotaries(raw, slides, family.rope_theta, family.local_rope_theta),
        max_model_len=_size(raw, "max_position_embeddings"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tied_embedding)),
        qkv_bias=attention_bias or bool(raw.get("qkv_bias", family.qkv_bias)),
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        attention_scale=float(raw["query_pre_attn_scalar"] if family.query_scalar else head_dim) ** -0.5,
        attention_softcap=_number(raw["attn_logit_softcapping"]) if family.attention_softcap else None,
        logit_softcap=_number(raw.get("final_logit_softcapping")),
        sliding_windows=tuple(int(window) if slide and window else None for slide in slides),
        experts=ExpertConfig.from_model_config(raw, family),
        eos_token_ids=tuple(sorted(_token_ids(raw.get("eos_token_id")) | _token_ids(generation_eos))),
    )


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    activation = raw.get(family.activation_key, family.activation)
    if activation not in get_args(Activation):
        accepted = ", ".join(get_args(Activation))
        raise ValueError(f"{family.activation_key} {activation!r} is not supported: {accepted} are accepted")
    if raw.get("quantization_config"):
        raise ValueError("quantized checkpoints are not supported: float32, float16 or bfloat16 weights are accepted")
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: only causal decoders are accepted")
    if raw.get("is_causal") is False:
        raise ValueError("is_causal = false is not supported: only causal decoders are accepted")
    if raw.get("attn_logit_softcapping") is not None and not family.attention_softcap:
        raise ValueError(f"attn_logit_softcapping is not supported for {family.name}: null is accepted")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _token_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(value)} if isinstance(value, int) else {int(item) for item in value}
