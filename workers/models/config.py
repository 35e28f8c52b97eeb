"""The facts of a base model, read from a folder in Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...adapters.adapter import BaseShape
from .families import Family, family_of
from .rotary import RotaryConfig


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
    rotary: RotaryConfig
    max_model_len: int  # tokens
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of o_proj
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]  # tokens that a layer's queries see, themselves included; None: all
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_folder(folder: Path) -> ModelConfig:
        """Reads config.json and generation_config.json. Raises ValueError when motet cannot compute such a model."""
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no config.json: a model folder in Hugging Face format is needed")
        raw = json.loads(path.read_text())
        generation = folder / "generation_config.json"
        eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
        return _parse(raw, eos)

    @property
    def shape(self) -> BaseShape:
        """What adapters must fit."""
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return BaseShape(
            self.num_layers,
            {
                "q_proj": (hidden, query),
                "k_proj": (hidden, kv),
                "v_proj": (hidden, kv),
                "o_proj": (query, hidden),
                "gate_proj": (hidden, self.intermediate_size),
                "up_proj": (hidden, self.intermediate_size),
                "down_proj": (self.intermediate_size, hidden),
            },
        )

    def slab(self, block_size: int) -> int:
        """Elements that a page of `block_size` tokens holds in one layer: K, then V."""
        return block_size * 2 * self.num_kv_heads * self.head_dim


def _parse(raw: Mapping[str, Any], generation_eos: Any) -> ModelConfig:
    architectures = raw.get("architectures") or ["none named"]
    family = family_of(str(architectures[0]))
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported: silu is accepted")
    if raw.get("quantization_config"):
        raise ValueError("quantized checkpoints are not supported: float32, float16 or bfloat16 weights are accepted")
    num_heads = int(raw["num_attention_heads"])
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads are no multiple of {num_kv_heads} KV heads")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rotary=RotaryConfig.from_model_config(raw),
        max_model_len=int(raw["max_position_embeddings"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        sliding_windows=_sliding_windows(raw, family),
        eos_token_ids=tuple(sorted(_token_ids(raw.get("eos_token_id")) | _token_ids(generation_eos))),
    )


def _sliding_windows(raw: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """The window of each layer. Missing keys have the defaults that transformers gives them."""
    num_layers, window = int(raw["num_hidden_layers"]), raw.get("sliding_window", 4096)
    if family.sliding_window == "never" or not window:
        return (None,) * num_layers
    if family.sliding_window == "always":
        return (int(window),) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    first = int(raw.get("max_window_layers", 28))
    kinds = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _token_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(value)} if isinstance(value, int) else {int(item) for item in value}
