"""What motet reads from a model folder, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, Ministral3Config, Olmo3Config, PreTrainedConfig

from motet.adapters.adapter import EXPERT_MODULES, MODULES, SHARED_MODULES
from motet.kernels.norms import ACTIVATIONS
from motet.kernels.windows import AttentionChunk
from motet.tests.rigs.oracle import write_model
from motet.workers.config import ExpertSharding
from motet.workers.models.config import ModelConfig, sampling_defaults
from motet.workers.models.decoder import load_decoder
from motet.workers.models.layers import Attention, ExpertMlp
from motet.workers.models.rotary import rotary_table
from motet.workers.models.rotary_config import NO_ROTARY
from motet.workers.models.sharding import ModelSharding
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
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "query_pre_attn_scalar": 4,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
WIDE = {"max_position_embeddings": 8192}
GLM_MOE: dict[str, Any] = {
    **{"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 6, "n_shared_experts": 2, "num_hidden_layers": 3, "head_dim": 4},
}
LLAMA4: dict[str, Any] = {
    **{"architectures": ["Llama4ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "moe_layers": [0, 2]},
    **{"num_hidden_layers": 3, "head_dim": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 20},
}
ERNIE_MOE: dict[str, Any] = {
    **{"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 6},
    **{"num_hidden_layers": 3, "moe_layer_end_index": 1},
}
QWEN3_5: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2}


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
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 31}, (31, 31)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, (None, None)),  # all that there can be
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": None}, (None, None)),
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
        ({"architectures": ["MixtralForCausalLM"], **EXPERTS}, (None, None)),
        ({"architectures": ["MixtralForCausalLM"], **EXPERTS, "sliding_window": 7}, (7, 7)),
        ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "sliding_window": 7}, (None, None)),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "sliding_window": 7, "use_sliding_window": True},
            (7, 7),
        ),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS, "sliding_window": 7, "use_sliding_window": True},
            (7, None),
        ),
        (GEMMA | {"sliding_window": 7}, (7, None)),
        (GEMMA | WIDE | {"layer_types": ["full_attention", "sliding_attention"]}, (None, 4096)),
        (GEMMA | WIDE | {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None}, (4096, 4096)),
        (
            GEMMA
            | {
                "architectures": ["Gemma3ForCausalLM"],
                "attn_logit_softcapping": None,
                "sliding_window": 7,
                "sliding_window_pattern": 2,
            },
            (7, None),
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
        ({"hidden_act": "tanhshrink"}, f"'tanhshrink' is not supported: {', '.join(ACTIVATIONS)} are accepted"),
        (GEMMA | {"hidden_activation": "sin"}, "hidden_activation 'sin' is not supported: silu"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (GEMMA | {"architectures": ["Gemma3ForCausalLM"]}, "attn_logit_softcapping = 50.0 is not supported for gemma3"),
        ({"sliding_window": 7}, "sliding_window = 7 is not supported for llama: .* leave it out or set it to null"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types = .* is not supported for llama"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported for llama"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': true or false is needed"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings = None: true or false is needed, or no such key"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": None}, "head_dim = None: a whole number from 1"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -1},
            "sliding_window = -1: a whole number from 1 or null",
        ),
        (GEMMA | {"layer_types": ["full_attention"]}, "layer_types has 1 entries: num_hidden_layers = 2"),
        (
            GEMMA | {"layer_types": ["chunked_attention"] * 2},
            "layer_types has 'chunked_attention': sliding_attention, full",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention = .* is not supported for a rot",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 9.0}},
            "beside .*: keep one",
        ),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling = .* is not supported for llama"),
        ({"model_type": "qwen2"}, "model_type = 'qwen2' contradicts architectures = .*, whose model_type is 'llama'"),
        ({"eos_token_id": "12"}, "eos_token_id = '12': a whole number"),
        ({"is_causal": False}, "is_causal = false is not supported: only causal"),
        ({"architectures": ["Gemma3Model"]}, "lacks 'text_config'"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "is not supported: .*Gemma3ForCausalLM"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts": 2, "num_local_experts": 4},
            "num_experts = 2 contradicts num_local_experts = 4",
        ),
        (EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 5}, "= 5: 1 to 4, the number"),
        (EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 0}, "= 0: 1 to 4, the number"),
        (GLM_MOE | {"n_group": 3}, "n_group = 3: a divisor of 4, the number of experts"),
        (GLM_MOE | {"n_group": 4}, "n_group = 4: .* with two experts in each group"),
        (
            GLM_MOE | {"n_group": 2, "num_experts_per_tok": 3},
            "topk_group = 1: .* have num_experts_per_tok = 3",
        ),
        (GLM_MOE | {"topk_group": 2}, "topk_group = 2: up to n_group = 1"),
        (
            {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}},
            "rope_theta = 1: with rope_type 'yarn'",
        ),
        ({"quantization_config": {"bits": 4}}, "quant_method = None is not supported"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
        (
            QWEN3_5 | {"full_attention_interval": 4},
            "full_attention_interval = 4: of num_hidden_layers = 2 at least one",
        ),
        (
            QWEN3_5 | {"layer_types": ["linear_attention"] * 2},
            r"layer_types = \[.*\]: of num_hidden_layers = 2 at least",
        ),
        (QWEN3_5 | {"linear_num_value_heads": 24}, "linear_num_value_heads = 24: a multiple of linear_num_key_heads ="),
        (QWEN3_5 | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1: a whole number from 2"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(folder(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "layers", "sizes"),
    [
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
            (0, 1),
            (12, None),
        ),
        ({"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS}, (0, 1), (6, 10)),
        ({"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS, "mlp_only_layers": [1]}, (0,), (6, 10)),
        ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "decoder_sparse_step": 2}, (1,), (6, None)),
        (GLM_MOE, (1, 2), (6, 12)),
        (LLAMA4, (0, 2), (12, 12)),
        (ERNIE_MOE, (1,), (6, 12)),
        (ERNIE_MOE | {"moe_layer_start_index": 0, "moe_layer_end_index": -1}, (0, 1, 2), (6, 12)),
        (ERNIE_MOE | {"moe_num_shared_experts": 0, "moe_layer_interval": 2}, (1,), (6, None)),
        (LLAMA4 | {"moe_layers": None, "interleave_moe_layer_step": 2}, (1,), (12, 12)),
    ],
)
def test_layers_with_experts(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...], sizes: tuple[int, int | None]
) -> None:
    config = ModelConfig.from_folder(folder(tmp_path, **changes))
    assert config.experts is not None
    assert tuple(layer for layer, sparse in enumerate(config.experts.layers) if sparse) == layers
    assert (config.experts.intermediate_size, config.experts.shared_intermediate_size) == sizes
    assert (config.experts.num_experts, config.experts.top_k) == (4, 2)
    assert config.shape.experts is not None
    assert (config.shape.experts.num_experts, config.shape.experts.layers) == (4, layers)
    dense = MODULES[4:] if len(layers) < config.num_layers else ()
    shared = () if sizes[1] is None else SHARED_MODULES
    gate = ("shared_expert_gate",) if config.experts.shared_is_gated and shared else ()
    assert tuple(config.shape.modules) == (*MODULES[:4], *dense, *EXPERT_MODULES, *shared, *gate, "router")
    assert config.shape.modules["experts.down_proj"] == (sizes[0], 8)


@pytest.mark.parametrize(
    "changes", [{"num_experts": 0}, {"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}], ids=str
)
def test_a_base_may_have_no_layer_with_experts(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, **changes}
    config = ModelConfig.from_folder(folder(tmp_path, **changes))
    assert config.experts is None
    assert "down_proj" in config.shape.modules


def test_a_gang_shares_experts_or_their_features(tmp_path: Path) -> None:
    changes = {"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS, "num_key_value_heads": 4, "num_experts": 5}
    config = ModelConfig.from_folder(folder(tmp_path, **changes))
    features = [ModelSharding(config, 2, rank) for rank in range(2)]
    assert [(part.experts, part.expert_features) for part in features] == [((0, 5), (0, 3)), ((0, 5), (3, 6))]
    whole = [ModelSharding(config, 2, rank, "expert") for rank in range(2)]
    assert [(part.experts, part.expert_features) for part in whole] == [((0, 2), (0, 6)), ((2, 5), (0, 6))]
    assert [part.shared_features for part in whole] == [(0, 5), (5, 10)]


@pytest.mark.parametrize(
    ("degree", "sharding", "changes", "message"),
    [
        (4, "tensor", {}, "cannot share 10 features of the shared expert"),
        (4, "tensor", {"shared_expert_intermediate_size": 8}, "cannot share 6 features of an expert"),
        (4, "expert", {"shared_expert_intermediate_size": 8, "num_experts": 3}, "cannot share 3 experts"),
    ],
)
def test_gangs_that_cannot_share_the_experts_are_refused(
    tmp_path: Path, degree: int, sharding: ExpertSharding, changes: dict[str, Any], message: str
) -> None:
    changes = {"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS, **changes}
    config = ModelConfig.from_folder(folder(tmp_path, **changes))
    with pytest.raises(ValueError, match=message):
        ModelSharding(config, degree, 0, sharding)


def test_what_gemma_does_not_say_is_as_in_its_family(tmp_path: Path) -> None:
    gemma2 = ModelConfig.from_folder(folder(tmp_path, **GEMMA))
    assert gemma2.tie_word_embeddings
    assert gemma2.activation == "gelu_pytorch_tanh"
    assert (gemma2.attention_scale, gemma2.attention_softcap, gemma2.logit_softcap) == (0.5, 50.0, 30.0)
    assert {rotary.theta for rotary in gemma2.rotaries} == {10_000.0}


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
    decoder = load_decoder(ModelSharding(config), checkpoint(tmp_path))
    qkv = torch.cat([whole[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])
    attention = decoder.layers[1].attention
    assert isinstance(attention, Attention)
    torch.testing.assert_close(attention.qkv.weight, qkv)
    assert decoder.head is not decoder.embedding


def test_a_single_file_is_read_and_not_the_index_beside_it(tmp_path: Path) -> None:
    """As transformers chooses between them."""
    config = ModelConfig.from_folder(folder(tmp_path))
    whole = tensors(config)
    save_file(whole, tmp_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in whole.items()}, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(whole, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    decoder = load_decoder(ModelSharding(config), checkpoint(tmp_path))
    torch.testing.assert_close(decoder.embedding, whole["model.embed_tokens.weight"])


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
        load_decoder(ModelSharding(config), checkpoint(tmp_path))


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1": {
        **{"model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
        **{"initializer_range": 0.02, "pretraining_tp": 1, "use_cache": True, "torch_dtype": "bfloat16"},
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
            "rope_type": "llama3",
        },
    },
    "SmolLM": {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None},
    "Mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096},
    "Mixtral": {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8},
        **{"num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02},
        "sliding_window": None,
    },
    "Qwen2.5": {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 28, "use_mrope": False},
        **{"sliding_window": 131072, "use_sliding_window": False, "bos_token_id": 151643},
    },
    "Qwen3": {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 2},
        **{"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None},
    },
    "Qwen3-MoE": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1},
        **{"mlp_only_layers": [], "moe_intermediate_size": 8, "norm_topk_prob": True, "num_experts": 128},
        **{"num_experts_per_tok": 8, "output_router_logits": False, "max_window_layers": 48, "sliding_window": None},
    },
    "Gemma-2": {
        **{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "cache_implementation": "hybrid"},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096},
    },
    "Gemma-3": {
        **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None},
        **{"final_logit_softcapping": None, "rope_local_base_freq": 10000, "rope_scaling": None},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256},
    },
    "gpt-oss": {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64},
        **{"experts_per_token": 4, "hidden_act": "silu", "initial_context_length": 4096, "num_local_experts": 32},
        **{"layer_types": ["sliding_attention", "full_attention"], "num_experts_per_tok": 4, "sliding_window": 128},
        **{"output_router_logits": False, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0},
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"rope_type": "yarn", "truncate": False},
        },
    },
    "GLM-4.5": {
        **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 2},
        **{"use_qk_norm": True, "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1, "rope_scaling": None},
        **{"n_group": 1, "topk_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "first_k_dense_replace": 1},
        **{"num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "attention_dropout": 0.0},
        "moe_intermediate_size": 8,
    },
    "ERNIE-4.5-21B-A3B": {
        **{"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_gate": "topk", "moe_k": 6},
        **{"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 27},
        **{"moe_layer_interval": 1, "moe_capacity": [64, 64, 64], "moe_use_aux_free": True, "use_bias": False},
        **{"moe_intermediate_size": 8, "rope_theta": 500000, "tie_word_embeddings": True},
        "num_nextn_predict_layers": 1,
    },
    "Granite 4.0 H Micro": {
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "mamba_d_state": 128},
        **{"layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 2},
        **{"attention_multiplier": 0.015625, "embedding_multiplier": 12, "logits_scaling": 8, "mamba_d_head": 8},
        **{"position_embedding_type": "nope", "shared_intermediate_size": 12, "residual_multiplier": 0.22},
        **{"mamba_expand": 2, "mamba_chunk_size": 256, "normalization_function": "rmsnorm", "init_method": "mup"},
    },
    "Falcon-H1": {
        **{"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "attn_layer_indices": None},
        **{
            "mamba_d_ssm": 16,
            "mamba_n_heads": 2,
            "mamba_d_head": 8,
            "mamba_d_state": 16,
            "mamba_norm_before_gate": False,
        },
        **{"time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": "auto"},
        **{"mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_expansion_factor": 8},
        **{"rope_theta": 100000000000.0, "mamba_norm_before_gate": False, "num_logits_to_keep": 1},
    },
    "Granite 3.1 MoE": {
        **{"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "attention_multiplier": 0.015625},
        **{"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22, "num_local_experts": 40},
        **{"num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None, "tie_word_embeddings": True},
    },
    "Llama 4 Scout": {
        **{
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "head_dim": 8,
            "for_llm_compressor": False,
        },
        **{"attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192},
        **{"interleave_moe_layer_step": 1, "intermediate_size_mlp": 16, "moe_layers": [0, 1], "no_rope_layers": [1, 0]},
        **{"num_local_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True, "output_router_logits": False},
        "layer_types": ["chunked_attention", "full_attention"],
        "rope_scaling": {
            **{"factor": 16.0, "high_freq_factor": 1.0001, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "original_max_position_embeddings": 8192,
        },
    },
    "MiniMax-M2": {
        **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1, 1]},
        **{"head_dim": 8, "rotary_dim": 4, "num_local_experts": 256, "num_experts_per_tok": 8, "use_mtp": True},
        **{"num_mtp_modules": 3, "mtp_transformer_layers": 1, "qk_norm_type": "per_layer", "use_qk_norm": True},
        **{"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0},
    },
    "DeepSeek-V3": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4},
        **{
            "attention_bias": False,
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
        },
        **{
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        **{"n_group": 8, "topk_group": 4, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        **{"num_nextn_predict_layers": 1, "pretraining_tp": 1, "seq_aux": True, "moe_intermediate_size": 8},
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
            "original_max_position_embeddings": 4096,
        },
    },
    "DeepSeek-V2-Lite": {
        **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 4},
        **{"attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        **{
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        **{"n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy"},
        **{"seq_aux": True, "moe_intermediate_size": 8},
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "type": "yarn"},
            "original_max_position_embeddings": 4096,
        },
    },
    "GLM-4.7-Flash": {
        **{"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "num_key_value_heads": 4},
        **{"attention_bias": False, "first_k_dense_replace": 1, "topk_method": "noaux_tc", "norm_topk_prob": True},
        **{"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
        **{"n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4},
        **{"num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rope_scaling": None, "rope_theta": 1000000},
        **{"routed_scaling_factor": 1.8, "moe_intermediate_size": 8},
    },
    "Command R7B": {
        **{"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "cache_implementation": "hybrid"},
        **{"attention_bias": False, "head_dim": 128, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25},
        **{"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"},
        **{"rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096},
        **{"sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True},
        **{"use_parallel_block": True, "use_parallel_embedding": True, "rms_norm_eps": None},
    },
    "Gemma 4 E2B": {
        **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 2},
        **{"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 512, "head_dim": 256},
        **{"use_bidirectional_attention": "vision", "attention_k_eq_v": False, "num_global_key_value_heads": None},
        **{"enable_moe_block": False, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144},
        **{"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0, "use_double_wide_mlp": True},
    },
    "EXAONE 4.0 32B": {
        **{"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 128, "hidden_act": "silu"},
        **{"sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False},
        **{"layer_types": ["sliding_attention", "full_attention"], "rope_theta": 1000000},
        "rope_scaling": {
            **{"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "original_max_position_embeddings": 8192,
        },
    },
    "EXAONE 4.0 1.2B": {
        **{"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "tie_word_embeddings": True},
        **{"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 2},
    },
    "OLMo 3": {
        **{"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": False, "rope_theta": 500000},
        **{"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"], "hidden_act": "silu"},
        "rope_scaling": {
            **{"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0},
            **{"original_max_position_embeddings": 8192, "rope_type": "yarn"},
        },
    },
    "Ministral 3": {
        **{"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": 128},
        "sliding_window": None,
        "rope_parameters": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
            **{"max_position_embeddings": 262144, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384},
            **{"rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
        },
    },
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2: num_attention_heads = 4 is needed, or null"),
        ({"kv_lora_rank": 511}, "kv_lora_rank = 511: an even number is needed"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63: an even number is needed"),
        ({"head_dim": 192}, "head_dim = 192: leave it out, or set it to 64"),
        ({"qk_head_dim": 64}, "qk_head_dim = 64: leave it out, or set it to 192"),
    ],
)
def test_sizes_of_latents_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_folder(folder(tmp_path, **PUBLISHED["DeepSeek-V3"] | changes))


def test_latents_of_eight_bits_are_refused(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(folder(tmp_path, **PUBLISHED["DeepSeek-V3"]))
    with pytest.raises(ValueError, match="kv_dtype = 'float8' is not supported for latent attention"):
        model.slab(16, "float8")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_keys_of_published_bases_are_accepted(tmp_path: Path, name: str) -> None:
    ModelConfig.from_folder(folder(tmp_path, **PUBLISHED[name]))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (8, 8, 8)),
        ({"no_rope_layers": [1, 0, 1]}, (8, None, 8)),
        ({"no_rope_layers": [0, 0, 1], "layer_types": ["chunked_attention"] * 3}, (8, 8, 8)),
        ({"attention_chunk_size": None}, (None, None, None)),
        ({"attention_chunk_size": 32}, (None, None, None)),  # all that there can be
    ],
)
def test_layers_that_see_chunks(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = ModelConfig.from_folder(folder(tmp_path, **LLAMA4 | changes))
    assert config.sliding_windows == windows
    assert all(window is None or isinstance(window, AttentionChunk) for window in config.sliding_windows)
    assert config.intermediate_size == 20
    kinds = {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 3}
    path = folder(tmp_path, **LLAMA4 | kinds)
    with pytest.raises(ValueError, match="attention_chunk_size = null, and layers see chunks"):
        ModelConfig.from_folder(path)


def test_a_number_of_rotated_dimensions_is_a_share_of_the_head(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(folder(tmp_path, **PUBLISHED["MiniMax-M2"]))
    assert config.rotaries[0].num_rotated(8) == 4
    other = ModelConfig.from_folder(folder(tmp_path, **PUBLISHED["MiniMax-M2"], partial_rotary_factor=0.25))
    assert other.rotaries[0].num_rotated(8) == 2


def test_layers_that_guess_tokens_are_left_out_and_the_choice_stays_in_float32(tmp_path: Path) -> None:
    path = write_model("glm4_moe", tmp_path / "base")
    stored = load_file(path / "model.safetensors")
    beyond = {
        name.replace("layers.2.", "layers.3."): value.clone() for name, value in stored.items() if "layers.2." in name
    }
    beyond["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(stored | beyond, path / "model.safetensors")
    sharding = ModelSharding(ModelConfig.from_folder(path))
    decoder = load_decoder(sharding, Checkpoint(path, torch.bfloat16, torch.device("cpu")))
    mlp = decoder.layers[2].mlp
    assert isinstance(mlp, ExpertMlp)
    assert mlp.choice_bias is not None and mlp.router.weight.dtype == torch.bfloat16
    expected = stored["model.layers.2.mlp.gate.e_score_correction_bias"]
    torch.testing.assert_close(mlp.choice_bias, expected, atol=0, rtol=0)


@pytest.mark.parametrize("keys", [{"rope_theta": 77.0}, PUBLISHED["OLMo 3"] | {"rope_theta": 77.0}])
def test_what_olmo_3_says_of_its_rotary_embedding_outside_of_layers_is_of_full_attention(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """As transformers reads it: the others have the family's default."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "architectures": ["Olmo3ForCausalLM"]}
    raw = {key: value for key, value in RAW.items() if key != "rope_theta"} | keys | kinds
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected = Olmo3Config(**raw).rope_parameters
    actual = ModelConfig.from_folder(tmp_path).rotaries
    for rotary, kind in zip(actual, kinds["layer_types"], strict=True):
        assert (rotary.theta, rotary.kind) == (expected[kind]["rope_theta"], expected[kind]["rope_type"])
    assert [rotary.theta for rotary in actual] == [500_000.0, 77.0]


@pytest.mark.parametrize(
    ("window", "kinds", "rotated"),
    [
        (8, ["sliding_attention", "full_attention"], [True, False]),
        (1 << 20, ["full_attention", "sliding_attention"], [False, True]),  # it hides nothing
        (8, ["full_attention", "full_attention"], [False, False]),
        (None, ["full_attention", "full_attention"], [True, True]),
    ],
)
def test_of_exaone_4_only_windows_rotate_if_there_are_any(
    tmp_path: Path, window: int | None, kinds: list[str], rotated: list[bool]
) -> None:
    changes = {"architectures": ["Exaone4ForCausalLM"], "sliding_window": window, "layer_types": kinds}
    config = ModelConfig.from_folder(folder(tmp_path, **changes))
    assert [rotary.kind != NO_ROTARY for rotary in config.rotaries] == rotated


def test_a_pattern_of_windows_is_a_number_where_no_list_says_which_layers_have_them(tmp_path: Path) -> None:
    changes = {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 8}
    config = ModelConfig.from_folder(folder(tmp_path, **changes, sliding_window_pattern=2))
    assert config.sliding_windows == (8, None)
    with pytest.raises(ValueError, match="sliding_window_pattern = 'LLLG': a whole number"):
        ModelConfig.from_folder(folder(tmp_path, **changes, sliding_window_pattern="LLLG"))


def test_an_absent_key_means_what_the_family_says(tmp_path: Path) -> None:
    path = folder(tmp_path)
    for architecture, eps in (("MixtralForCausalLM", 1e-5), ("LlamaForCausalLM", 1e-6)):
        raw = {key: value for key, value in RAW.items() if key != "rms_norm_eps"} | {"architectures": [architecture]}
        (path / "config.json").write_text(json.dumps(raw))
        assert ModelConfig.from_folder(path).norm_eps == eps


@pytest.mark.parametrize("config", [GptOssConfig, Ministral3Config])
def test_a_file_without_its_rotary_embedding_has_the_one_of_its_family(
    tmp_path: Path, config: type[PreTrainedConfig]
) -> None:
    """As transformers writes it out."""
    default = config()
    default.architectures = [f"{config.__name__.removesuffix('Config')}ForCausalLM"]
    default.save_pretrained(tmp_path)
    written = ModelConfig.from_folder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    silent = ModelConfig.from_folder(tmp_path)
    expected, actual = (rotary_table(each.rotaries[0], 64, 20_000) for each in (written, silent))
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("rope", "context", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 128, None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 32, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 32, 128),
        (PUBLISHED["Llama-3.1"]["rope_scaling"], 32, None),
    ],
)
def test_the_context_of_a_stretched_base(
    tmp_path: Path, rope: dict[str, Any], context: int, longest: int | None
) -> None:
    config = ModelConfig.from_folder(folder(tmp_path, rope_scaling=rope))
    assert (config.max_model_len, config.longest) == (context, longest)


def test_numbers_that_cannot_be_computed_with_are_refused(tmp_path: Path) -> None:
    changes = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 1}
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    with pytest.raises(ValueError, match=r"config\.json cannot be read: .*division by zero"):
        ModelConfig.from_folder(folder(tmp_path, **changes, rope_scaling=rope))


def test_sampling_defaults_are_those_that_vllm_takes(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert sampling_defaults(tmp_path) == {}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": None, "max_length": 9}))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    path.write_text(json.dumps({"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 7, "num_beams": 1}))
    assert sampling_defaults(tmp_path) == {"min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 7}


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("temperature", 2.5, "0 to 2"),
        ("temperature", True, "0 to 2"),
        ("top_k", 2.5, "a whole number from -1"),
        ("top_p", "0.9", "0 to 1"),
        ("repetition_penalty", 0, "0.001 to 100"),
        ("max_new_tokens", 0, "a whole number from 1"),
    ],
)
def test_sampling_defaults_that_no_request_could_have_are_refused(
    tmp_path: Path, key: str, value: Any, accepted: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=re.escape(f"{key} = {value!r}: {accepted}")):
        sampling_defaults(tmp_path)


def test_experts_lie_in_one_tensor_or_one_by_one(tmp_path: Path) -> None:
    whole = write_model("qwen3_5_moe", tmp_path / "many")
    stored = load_file(whole / "model.safetensors")
    num_experts = 1 + max(int(found[1]) for name in stored if (found := re.search(r"experts\.(\d+)\.", name)))
    stacked = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for block in {name.partition(".experts.")[0] for name in stored if ".experts." in name}:
        weights = {
            kind: torch.stack([stored[f"{block}.experts.{expert}.{kind}.weight"] for expert in range(num_experts)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        stacked[f"{block}.experts.gate_up_proj"] = torch.cat([weights["gate_proj"], weights["up_proj"]], dim=1)
        stacked[f"{block}.experts.down_proj"] = weights["down_proj"]
    shutil.copytree(whole, tmp_path / "one")
    save_file(stacked, tmp_path / "one" / "model.safetensors")
    config = ModelConfig.from_folder(whole)
    for rank in range(2):
        shardings: tuple[ExpertSharding, ...] = ("tensor", "expert")
        for sharding in shardings:
            part = ModelSharding(config, 2, rank, sharding)
            mlps = [load_decoder(part, checkpoint(tmp_path / folder)).layers[1].mlp for folder in ("one", "many")]
            one, many = (mlp for mlp in mlps if isinstance(mlp, ExpertMlp))
            assert torch.equal(one.gate_up, many.gate_up)
            assert torch.equal(one.down, many.down)


@pytest.mark.parametrize("number", ["5", "05"])
def test_heads_of_layers_by_their_number(tmp_path: Path, number: str) -> None:
    """transformers writes as many digits as the last layer has."""
    keys = {"architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "num_hidden_layers": 12, "vocab_size": 50}
    kinds = ["full_attention" if layer in (5, 11) else "sliding_attention" for layer in range(12)]
    heads = {number: {"head_dim": 32, "num_key_value_heads": 1}, "11": {"head_dim": 32, "num_key_value_heads": 1}}
    sizes = ModelConfig.from_folder(folder(tmp_path, **keys, layer_types=kinds, per_layer_config=heads)).layer_sizes
    assert [layer for layer, dim in enumerate(sizes.head_dims) if dim == 32] == [5, 11]
    assert {sizes.num_kv_heads[layer] for layer in (5, 11)} == {1}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"per_layer_config": {"12": {"head_dim": 32}}}, "per_layer_config has '12': layers 0 to 11"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 2}}}, "'rms_norm_eps': head_dim and num_key_value_heads"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "layers of one kind heads of different sizes"),
        ({"num_kv_shared_layers": 12}, "layer 0 has no layer of its kind"),
        ({"vocab_size_per_layer_input": 10}, "vocab_size_per_layer_input = 10: at least vocab_size = 50"),
        ({"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}, "transformers computes no such base"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"enable_moe_block": True}, "lacks 'num_experts'"),
    ],
)
def test_sizes_of_layers_that_cannot_be(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    keys = {"architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "num_hidden_layers": 12, "vocab_size": 50}
    with pytest.raises(ValueError, match=problem):
        ModelConfig.from_folder(folder(tmp_path, **keys | changes))


NEMOTRON_H: dict[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 50, "hidden_size": 32},
    **{"intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 99},
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "layers",
    [
        {"hybrid_override_pattern": "M-*-"},
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "hybrid_override_pattern": "E"},
        {"layer_types": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ],
)
def test_layers_of_one_half(tmp_path: Path, layers: dict[str, Any]) -> None:
    """They alone say how many layers there are."""
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON_H | layers))
    config = ModelConfig.from_folder(tmp_path)
    assert (config.recurrent_layers, config.attention_layers, config.mlp_layers) == ((0,), (2,), (1, 3))
    shape = config.shape
    assert [shape.has(layer, "up_proj") for layer in range(4)] == [False, True, False, True]
    assert (shape.path("up_proj"), shape.path("in_proj"), shape.path("q_proj")) == (
        *("mixer.up_proj", "mixer.in_proj", "mixer.q_proj"),
    )


def test_an_internlm3_as_published_and_as_saved(tmp_path: Path) -> None:
    """Files of its own code have other names of biases; transformers saves it as a Llama of that `model_type`."""
    base = write_model("internlm3", tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"] and raw["attention_bias"] and raw["mlp_bias"]
    published = {key: value for key, value in raw.items() if key not in ("attention_bias", "mlp_bias")}
    published |= {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True}
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_folder(base)
    (tmp_path / "config.json").write_text(json.dumps(published | {"bias": False}))
    with pytest.raises(ValueError, match="qkv_bias = True and bias = False: both or neither"):
        ModelConfig.from_folder(tmp_path)


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """Its own `model_type`, which transformers takes for that of DeepSeek V3."""
    base = write_model("deepseek_v3", tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k2"}))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_folder(base)
    (tmp_path / "config.json").write_text(
        json.dumps(raw | {"model_type": "kimi_k2", "architectures": ["LlamaForCausalLM"]})
    )
    with pytest.raises(ValueError, match="model_type = 'kimi_k2' contradicts"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ({"n_group": None}, "lacks 'n_group'"),
        ({"n_group": 4}, "n_group = 4: a divisor of 6, the number of experts, with an expert in each group"),
        ({"topk_group": 1}, "topk_group = 1: up to n_group = 3, and groups that have num_experts_per_tok = 3"),
    ],
)
def test_groups_of_deepseek_v2_that_cannot_be(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    base = write_model("deepseek_v2_groups", tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ValueError, match=re.escape(problem)):
        ModelConfig.from_folder(tmp_path)


def test_layers_of_experts_alone(tmp_path: Path) -> None:
    """As published: with a key by two names, and one of what rotates nothing."""
    named_twice = {"layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "rope_theta": 10000, "partial_rotary_factor": 1.0}
    experts = {"n_routed_experts": 4, "moe_latent_size": 16, "moe_shared_expert_intermediate_size": 24}
    raw = NEMOTRON_H | {"hybrid_override_pattern": "ME*E", "mlp_bias": True} | named_twice | experts
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_folder(tmp_path)
    assert (config.recurrent_layers, config.attention_layers, config.mlp_layers) == ((0,), (2,), ())
    assert config.experts is not None and config.experts.layers == (False, True, False, True)
    shape = config.shape
    assert {layer for layer in range(4) if shape.has(layer, "fc1_latent_proj")} == {1, 3}
    assert not shape.has(1, "up_proj") and not shape.has(1, "experts.0.gate_proj")
    assert shape.sides(1, "experts.3.up_proj") == (16, 7688) and shape.sides(1, "fc2_latent_proj") == (16, 32)
    assert shape.path("experts.3.up_proj") == "mixer.experts.3.up_proj"
    assert shape.path("shared_expert.up_proj") == "mixer.shared_experts.up_proj"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "hybrid_override_pattern = None, without layers_block_type"),
        ({"hybrid_override_pattern": "M*x"}, "hybrid_override_pattern = 'M*x'"),
        ({"hybrid_override_pattern": "M*E", "n_routed_experts": 0}, "num_experts_per_tok = 2: 1 to 0"),
        ({"hybrid_override_pattern": "M*E", "n_group": 3}, "n_group = 3: a divisor of 8"),
        ({"hybrid_override_pattern": "M*E", "norm_eps": 1e-4}, "norm_eps = 0.0001 is not supported"),
        ({"hybrid_override_pattern": "M-"}, "layers with attention and with a recurrent state are needed"),
        ({"hybrid_override_pattern": "*-"}, "layers with attention and with a recurrent state are needed"),
        ({"hybrid_override_pattern": "M*-", "mlp_hidden_act": "gelu"}, "mlp_hidden_act 'gelu' is not supported"),
        ({"hybrid_override_pattern": "M*-", "mamba_hidden_act": "relu"}, "mamba_hidden_act = 'relu'"),
        ({"hybrid_override_pattern": "M*-", "attention_bias": True}, "attention_bias = True"),
        ({"hybrid_override_pattern": "M*-", "rope_scaling": {"rope_type": "linear"}}, "which rotates nothing"),
    ],
)
def test_layers_of_one_half_that_cannot_be(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON_H | changes))
    with pytest.raises(ValueError, match=re.escape(problem)):
        ModelConfig.from_folder(tmp_path)


def test_older_names_of_tensors_are_read(tmp_path: Path) -> None:
    """Nemotron-H's as published and as transformers writes them."""
    stored = load_file(write_model("nemotron_h", tmp_path / "base") / "model.safetensors")
    newer = {name.replace("backbone.", "model.", 1): tensor for name, tensor in stored.items()}
    older = {name.replace("model.", "backbone.", 1): tensor for name, tensor in newer.items()}
    decoders = []
    for kind, tensors in {"older": older, "newer": newer}.items():
        shutil.copytree(tmp_path / "base", tmp_path / kind)
        save_file(tensors, tmp_path / kind / "model.safetensors")
        part = ModelSharding(ModelConfig.from_folder(tmp_path / kind))
        decoders.append(load_decoder(part, checkpoint(tmp_path / kind)))
    assert torch.equal(decoders[0].embedding, decoders[1].embedding)
    assert torch.equal(decoders[0].norm, decoders[1].norm)
