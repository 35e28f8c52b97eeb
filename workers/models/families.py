"""The model families that motet's decoder computes, by the architecture named in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """What a family's checkpoints have that config.json does not say."""

    name: str
    qkv_bias: bool = False  # always there, whatever `attention_bias` says
    qk_norm: bool = False  # RMS norm over each head of q and k before the rotary embedding
    sliding_window: Literal["never", "always", "by layer"] = "never"  # where the config's `sliding_window` counts


FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", sliding_window="always"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, sliding_window="by layer"),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, sliding_window="by layer"),
}


def family_of(architecture: str) -> Family:
    """The family of an architecture. Raises ValueError for one that motet does not compute."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ValueError(f"architecture {architecture!r} is not supported: {', '.join(FAMILIES)} are accepted")
    return family
