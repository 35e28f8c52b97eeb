"""The shapes of published bases, as their config.json has them. No weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from motet.workers.models.config import ModelConfig

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}


def _shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **_LLAMA,
        **more,
    }


BASES = {
    "Llama-2-7B": _shape(4096, 11008, 32, 32, 32, 32000),
    "Llama-3-8B": _shape(4096, 14336, 32, 32, 8, 128256),
    "Llama-2-70B": _shape(8192, 28672, 80, 64, 8, 32000),
    "Llama-3-405B": _shape(16384, 53248, 126, 128, 8, 128256),
    "Mistral-7B": _shape(4096, 14336, 32, 32, 8, 32000),
    "Mixtral-8x7B": _shape(
        4096,
        14336,
        32,
        32,
        8,
        32000,
        architectures=["MixtralForCausalLM"],
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "Qwen2-72B": _shape(8192, 29568, 80, 64, 8, 152064, architectures=["Qwen2ForCausalLM"]),
}


def published_base(name: str) -> ModelConfig:
    """As it is read from a folder."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(BASES[name]))
        return ModelConfig.from_folder(Path(folder))
