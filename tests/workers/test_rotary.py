"""Rotary frequencies against those of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from motet.workers.models.config import ModelConfig
from motet.workers.models.rotary import rotary_table, rotary_tables
from motet.workers.models.rotary_config import RotaryConfig, layer_rotaries

PARAMETERS = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
]


def read_model(config: PreTrainedConfig) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return ModelConfig.from_folder(Path(folder))


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: str(p["rope_type"]))
def test_table_is_that_of_transformers(parameters: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=1024, rope_parameters=dict(parameters)
    )
    positions = torch.arange(1024)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 64), positions.unsqueeze(0))
    raw = {"rope_parameters": parameters, "max_position_embeddings": 1024}
    table = rotary_table(RotaryConfig.from_model_config(raw), 64, 1024)
    torch.testing.assert_close(table[:, 0], cos[0, :, :32], atol=0, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0, :, :32], atol=0, rtol=0)


def test_old_and_new_spelling_agree() -> None:
    old = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 8}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}, "max_position_embeddings": 8}
    assert RotaryConfig.from_model_config(old) == RotaryConfig.from_model_config(new)


OLD_GEMMA3 = {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
NEW_GEMMA3 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
}


@pytest.mark.parametrize("raw", [OLD_GEMMA3, NEW_GEMMA3], ids=["old", "new"])
def test_layers_that_slide_may_have_their_own(raw: dict[str, object]) -> None:
    raw = {**raw, "max_position_embeddings": 64}
    wide, local, again = layer_rotaries(raw, (False, True, False), 1e6, 1e4)
    assert wide == again == RotaryConfig(5e5, "linear", {"factor": 8.0})
    assert local == RotaryConfig(300.0, "default", {})
    tables = rotary_tables((wide, local, again), (8, 8, 8), 16, torch.device("cpu"))
    assert tables[0] is tables[2]
    torch.testing.assert_close(tables[1], rotary_table(local, 8, 16))
    only = {"max_position_embeddings": 64}
    assert [found.theta for found in layer_rotaries(only, (True, False), 1e6, 1e4)] == [1e4, 1e6]
    assert [found.theta for found in layer_rotaries(only, (True, False), 1e6, None)] == [1e6, 1e6]


def test_queries_are_scaled_as_by_transformers() -> None:
    parameters = {**PARAMETERS[3], "llama_4_scaling_beta": 0.1}
    raw = {"rope_parameters": parameters, "max_position_embeddings": 4096}
    config = RotaryConfig.from_model_config(raw, scales_queries=True)
    table = rotary_table(config, 64, 2000)
    plain = rotary_table(RotaryConfig.from_model_config({**raw, "rope_parameters": PARAMETERS[3]}), 64, 2000)
    scale = get_llama_4_attn_scale(torch.arange(2000).unsqueeze(0), 0.1, 256)[0, 0]
    torch.testing.assert_close(table, torch.cat((plain, plain * scale.unsqueeze(1)), dim=1), atol=1e-6, rtol=0)
    assert scale.max() > 1.19
    del parameters["llama_4_scaling_beta"]
    with pytest.raises(KeyError, match="llama_4_scaling_beta"):
        RotaryConfig.from_model_config(raw, scales_queries=True)


def test_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'longrope' is not supported: default, linear, llama3, yarn"):
        RotaryConfig.from_model_config({"rope_scaling": {"rope_type": "longrope"}})


@pytest.mark.parametrize("num_positions", [100, 1024])
def test_the_context_that_is_served_decides_the_factors_of_longrope(num_positions: int) -> None:
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + place / 8 for place in range(12)],
        "long_factor": [2.0 + place for place in range(12)],
        "partial_rotary_factor": 0.75,
    }
    config = Phi3Config(
        hidden_size=128,
        num_attention_heads=4,
        num_hidden_layers=1,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        original_max_position_embeddings=256,
        rope_parameters=dict(parameters),
    )
    config.architectures = ["Phi3ForCausalLM"]
    (rotary,) = read_model(config).rotaries
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1, 1, 32), torch.arange(num_positions).unsqueeze(0))
    table = rotary_table(rotary, 32, num_positions)
    torch.testing.assert_close(table[:, 0, :12], cos[0, :, :12], atol=0, rtol=0)
    torch.testing.assert_close(table[:, 1, :12], sin[0, :, :12], atol=0, rtol=0)
    assert (table[:, 0, 12:] == 1).all() and (table[:, 1, 12:] == 0).all()
