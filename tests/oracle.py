"""What transformers and PEFT say: tiny random models, random adapters, and greedy decoding of one request at a time.

Weights are drawn wider than any real initialisation, so that the best token leads the second by far more than float32
noise, norms and biases differ from their trivial values, and every adapter changes the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 160
NUM_LAYERS = 3
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
WIDE_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1_000_000.0}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Variant:
    """One model to compare on. `legacy_json` writes config.json as transformers 4 did; `sharded` splits the weights."""

    config: Callable[[], PreTrainedConfig]
    legacy_json: bool = False
    sharded: bool = False


VARIANTS: Mapping[str, Variant] = {
    "llama": Variant(lambda: LlamaConfig(**SHAPE)),
    "llama_tied_llama3_rope": Variant(
        lambda: LlamaConfig(**SHAPE | {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}), legacy_json=True
    ),
    "llama_bias": Variant(lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "mistral": Variant(lambda: MistralConfig(**SHAPE, sliding_window=None), sharded=True),
    "mistral_window": Variant(lambda: MistralConfig(**SHAPE, sliding_window=12)),
    "qwen2": Variant(lambda: Qwen2Config(**SHAPE, rope_parameters=WIDE_ROPE), legacy_json=True),
    "qwen2_window_yarn": Variant(
        lambda: Qwen2Config(
            **SHAPE, use_sliding_window=True, sliding_window=10, max_window_layers=1, rope_parameters=YARN_ROPE
        )
    ),
    "qwen3": Variant(
        lambda: Qwen3Config(**SHAPE | {"tie_word_embeddings": True}, head_dim=32, rope_parameters=WIDE_ROPE)
    ),
}


@dataclass(frozen=True)
class AdapterRecipe:
    """Arguments of `LoraConfig`, under the name that tests call the adapter by."""

    name: str
    lora: Mapping[str, Any] = field(default_factory=dict)


RECIPES: tuple[AdapterRecipe, ...] = (
    AdapterRecipe("rank1", {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj"]}),
    AdapterRecipe("rank3", {"r": 3, "lora_alpha": 5, "target_modules": ["v_proj", "o_proj", "down_proj"]}),
    AdapterRecipe("rank8", {"r": 8, "lora_alpha": 16, "target_modules": list(ATTENTION)}),
    AdapterRecipe("rank16_rslora", {"r": 16, "lora_alpha": 8, "target_modules": list(ALL_LINEAR), "use_rslora": True}),
    AdapterRecipe(
        "patterns",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": list(ALL_LINEAR),
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.gate_proj": 7, r".*\.0\.mlp\.(up|down)_proj": 5},
            "alpha_pattern": {"k_proj": 3, "layers.2.self_attn.v_proj": 20},
        },
    ),
    AdapterRecipe(
        "patterns_rslora",
        {
            "r": 8,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "gate_proj", "up_proj"],
            "use_rslora": True,
            "rank_pattern": {"gate_proj": 3},
            "alpha_pattern": {"up_proj": 11},
        },
    ),
    AdapterRecipe(
        "one_layer", {"r": 8, "lora_alpha": 16, "target_modules": list(ATTENTION), "layers_to_transform": [1]}
    ),
)


def write_model(name: str, folder: Path) -> Path:
    """Writes the variant's random model in Hugging Face format, in float32."""
    variant = VARIANTS[name]
    config = variant.config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _redraw(model, torch.Generator().manual_seed(list(VARIANTS).index(name)))
    model.save_pretrained(folder, max_shard_size="100KB" if variant.sharded else "1GB")
    if variant.legacy_json:
        _write_legacy_json(folder / "config.json")
    return folder


def write_adapters(model_path: Path, folder: Path, recipes: Sequence[AdapterRecipe] = RECIPES) -> dict[str, Path]:
    """Writes one PEFT folder for each recipe, by PEFT's own `save_pretrained`; returns them by name."""
    found: dict[str, Path] = {}
    for seed, recipe in enumerate(recipes):
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **recipe.lora))
        generator = torch.Generator().manual_seed(1_000 + seed)
        for module in model.modules():
            if not hasattr(module, "lora_A") or "default" not in module.lora_A:
                continue
            a, b, scaling = module.lora_A["default"].weight, module.lora_B["default"].weight, module.scaling["default"]
            _draw(a, a.shape[1] ** -0.5, generator)
            _draw(b, 0.5 / (scaling * a.shape[0] ** 0.5), generator)
        model.save_pretrained(folder / recipe.name)
        found[recipe.name] = folder / recipe.name
    return found


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and, for each of them, the logits it was chosen from."""

    token_ids: list[int]
    logits: torch.Tensor  # [num_tokens, vocab], float32

    @property
    def logprobs(self) -> torch.Tensor:
        return self.logits.log_softmax(dim=-1)

    @property
    def margin(self) -> float:
        """By how much the best token led the second at the closest call."""
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())


class Oracle:
    """transformers with all adapters loaded by PEFT; answers one request at a time, recomputing all of it per token."""

    def __init__(self, model_path: Path, adapters: Mapping[str, Path]) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
        first, *others = adapters
        model = PeftModel.from_pretrained(base, adapters[first], adapter_name=first)
        for name in others:
            model.load_adapter(adapters[name], adapter_name=name)
        self._model = model.eval()

    def answer(self, prompt: Sequence[int], adapter: str | None, num_tokens: int) -> Answer:
        """Greedy decoding that never stops early."""
        token_ids, rows = list(prompt), []
        for _ in range(num_tokens):
            rows.append(self.logits(token_ids, adapter)[-1])
            token_ids.append(int(rows[-1].argmax()))
        return Answer(token_ids[len(prompt) :], torch.stack(rows))

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        """`[num_tokens, vocab]`: row i is what the token after token i is chosen from."""
        if adapter is None:
            with self._model.disable_adapter():
                return self._forward(token_ids)
        self._model.set_adapter(adapter)
        return self._forward(token_ids)

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


def _redraw(model: PreTrainedModel, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            _draw(parameter, 0.2, generator)  # biases around 0, norms around 1
            if "norm" in name:
                parameter.data += 1.0
        elif "embed_tokens" in name:
            _draw(parameter, 0.4, generator)  # small enough that a tied head does not just repeat the input
        else:
            _draw(parameter, (3.0 if "lm_head" in name else 1.2) * parameter.shape[1] ** -0.5, generator)


def _draw(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _write_legacy_json(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
