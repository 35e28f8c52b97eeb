"""What motet reads of a model folder, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import load_decoder
from motet.workers.models.weights import Checkpoint

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(RAW | changes))
    return tmp_path


def tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    found = {
        "model.embed_tokens.weight": torch.randn(config.vocab_size, config.hidden_size),
        "lm_head.weight": torch.randn(config.vocab_size, config.hidden_size),
        "model.norm.weight": torch.ones(config.hidden_size),
    }
    for layer in range(config.num_layers):
        for name, (num_in, num_out) in config.shape.modules.items():
            block = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            found[f"model.layers.{layer}.{block}.{name}.weight"] = torch.randn(num_out, num_in)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = torch.ones(config.hidden_size)
    return found


def checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(path, torch.float32, torch.device("cpu"))


def test_shapes_follow_the_config(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(folder(tmp_path))
    assert config.shape.modules["k_proj"] == (8, 4)
    assert config.shape.modules["down_proj"] == (12, 8)
    assert config.slab(block_size=16) == 16 * 2 * 2 * 2
    assert config.eos_token_ids == (2,)


def test_end_of_sequence_ids_of_both_files_count(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert ModelConfig.from_folder(folder(tmp_path)).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 7}, (7, 7)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 7}, (None, None)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}, (None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 7),
        ),
    ],
)
def test_sliding_windows_are_those_of_the_family(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert ModelConfig.from_folder(folder(tmp_path, **changes)).sliding_windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported: silu"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(folder(tmp_path, **changes))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_sharded_checkpoints_are_read_through_their_index(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(folder(tmp_path))
    whole = tensors(config)
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: whole[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    decoder = load_decoder(config, checkpoint(tmp_path))
    qkv = torch.cat([whole[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])
    torch.testing.assert_close(decoder.layers[1].attention.qkv.weight, qkv)
    assert decoder.head is not decoder.embedding


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"no tensor 'model\.norm\.weight'"),
        (lambda t: t.update({"model.norm.weight": torch.ones(9)}), r"has shape \(9,\): config\.json needs \(8,\)"),
        (lambda t: t.update({"model.layers.2.mlp.w": torch.ones(1)}), r"no place for: model\.layers\.2\.mlp\.w"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path, break_it: Any, message: str) -> None:
    config = ModelConfig.from_folder(folder(tmp_path))
    broken = tensors(config)
    break_it(broken)
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_decoder(config, checkpoint(tmp_path))
