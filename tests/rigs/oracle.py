"""The answers of transformers and PEFT: tiny random models, random adapters, greedy decoding of one request at a time.

Weights are drawn wider than any real initialisation, so that the best token leads the second by far more than float32
noise, norms and biases differ from their trivial values, and every adapter changes the answer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    InternLM3Config,
    Lfm2Config,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from motet.adapters.adapter import LATENT_EXPERT_MODULES, LATENT_MODULES, PER_LAYER_MODULES, RECURRENT_MODULES

VOCAB_SIZE = 160
NUM_LAYERS = 3
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
OF_SOME = (*LATENT_MODULES, *RECURRENT_MODULES, *PER_LAYER_MODULES, *LATENT_EXPERT_MODULES)

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
SCALED_ROPE: dict[str, Any] = {  # queries are scaled, more often within a short prompt
    **YARN_ROPE,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Odd scales and narrow caps, so that each of them changes the answer.
COHERE: dict[str, Any] = {key: value for key, value in SHAPE.items() if not key.startswith(("rms", "tie"))} | {
    "layer_norm_eps": 1e-5,
    "logit_scale": 1.3,
}
GEMMA: dict[str, Any] = SHAPE | {"tie_word_embeddings": True, "head_dim": 24, "query_pre_attn_scalar": 6}
GEMMA3_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


NEMOTRON_H: dict[str, Any] = {"n_routed_experts": 0, "layer_norm_epsilon": 1e-5}
GRANITE_HYBRID: dict[str, Any] = {"num_local_experts": 0, "shared_intermediate_size": 112}


def _without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


@dataclass(frozen=True)
class Variant:
    """One model to compare on. `legacy_json` writes config.json as transformers 4 did; `sharded` splits the weights.

    `seed`: of its weights, where those of its place in the table leave close calls; None: its place.
    """

    config: Callable[[], PreTrainedConfig]
    legacy_json: bool = False
    sharded: bool = False
    seed: int | None = None


FIRST_WRAPPED_SEED = 58  # of `WRAPPED`, which is drawn by place behind the variants that there were

# New ones come last: the others' weights are drawn by their places.
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
    "gemma2": Variant(
        lambda: Gemma2Config(**GEMMA, sliding_window=12, attn_logit_softcapping=4.0, final_logit_softcapping=6.0)
    ),
    "gemma3": Variant(
        lambda: Gemma3TextConfig(
            **GEMMA | {"num_key_value_heads": 1},  # as the smaller ones of the family have
            sliding_window=12,
            sliding_window_pattern=2,
            rope_parameters=deepcopy(GEMMA3_ROPE),
        )
    ),
    "mixtral": Variant(
        lambda: MixtralConfig(**SHAPE | {"intermediate_size": 40}, num_local_experts=4, sliding_window=20),
    ),
    "qwen2_moe": Variant(
        lambda: Qwen2MoeConfig(
            **SHAPE,
            **EXPERTS,
            shared_expert_intermediate_size=56,
            mlp_only_layers=[1],
            use_sliding_window=True,
            sliding_window=10,
        ),
        sharded=True,
    ),
    "qwen3_moe": Variant(
        lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, norm_topk_prob=True, rope_parameters=WIDE_ROPE),
        legacy_json=True,
    ),
    "ministral": Variant(
        lambda: MinistralConfig(
            **SHAPE,
            head_dim=24,
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "granite": Variant(
        lambda: GraniteConfig(
            **SHAPE | {"tie_word_embeddings": True},
            attention_bias=True,
            mlp_bias=True,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
            logits_scaling=1.6,
        )
    ),
    "smollm3": Variant(
        lambda: SmolLM3Config(**SHAPE, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=12)
    ),
    "seed_oss": Variant(lambda: SeedOssConfig(**SHAPE, head_dim=24)),
    "gemma": Variant(
        lambda: GemmaConfig(**SHAPE | {"tie_word_embeddings": True, "num_key_value_heads": 1}, head_dim=24)
    ),
    "phi3": Variant(lambda: Phi3Config(**SHAPE, sliding_window=14)),
    "phi3_partial": Variant(
        lambda: Phi3Config(
            **SHAPE | {"tie_word_embeddings": True},
            rope_parameters={"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.75},
        )
    ),
    "phi3_longrope": Variant(  # of a context as it was trained on, so that transformers takes one of both for all
        lambda: Phi3Config(
            **SHAPE | {"tie_word_embeddings": True},
            original_max_position_embeddings=512,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "short_factor": [1.0 + place / 4 for place in range(8)],
                "long_factor": [1.0 + place for place in range(8)],
            },
        )
    ),
    "glm4": Variant(lambda: Glm4Config(**SHAPE, head_dim=24)),
    "ernie4_5": Variant(lambda: Ernie4_5Config(**SHAPE | {"tie_word_embeddings": True}, head_dim=20, use_bias=True)),
    "ministral3": Variant(
        lambda: Ministral3Config(
            **SHAPE | {"num_key_value_heads": 1}, head_dim=20, sliding_window=30, rope_parameters=deepcopy(SCALED_ROPE)
        )
    ),
    "glm4_moe": Variant(
        lambda: Glm4MoeConfig(
            **SHAPE,
            head_dim=22,  # of which 11 are rotated: transformers rotates 12
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            n_shared_experts=2,
            routed_scaling_factor=1.7,
            n_group=3,
            topk_group=2,
        )
    ),
    "minimax_m2": Variant(
        lambda: MiniMaxM2Config(
            **SHAPE | {"intermediate_size": 40},
            head_dim=24,
            num_local_experts=6,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
        )
    ),
    "ernie4_5_moe": Variant(
        lambda: Ernie4_5_MoeConfig(
            **SHAPE | {"tie_word_embeddings": True},
            head_dim=20,
            moe_num_experts=5,
            moe_k=2,
            moe_intermediate_size=24,
            moe_num_shared_experts=2,
        )
    ),
    "granitemoe": Variant(
        lambda: GraniteMoeConfig(
            **SHAPE | {"intermediate_size": 40},
            num_local_experts=5,
            num_experts_per_tok=2,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
            logits_scaling=1.6,
        )
    ),
    "llama4": Variant(
        lambda: Llama4TextConfig(
            **SHAPE | {"intermediate_size": 40},
            head_dim=24,
            intermediate_size_mlp=56,
            num_local_experts=4,
            moe_layers=[0, 2],
            no_rope_layers=[1, 0, 1],
            attention_chunk_size=10,
            floor_scale=8,
            attn_scale=0.3,
        )
    ),
    "gpt_oss": Variant(
        lambda: GptOssConfig(
            **SHAPE | {"intermediate_size": 48},
            head_dim=20,
            sliding_window=12,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_alpha=1.3,
            swiglu_limit=0.6,
            rope_parameters={**YARN_ROPE, "truncate": False},
        ),
        sharded=True,
    ),
    "gemma4": Variant(  # as the small ones: inputs of layers, shared KV
        lambda: Gemma4TextConfig(
            **SHAPE | {"num_hidden_layers": 5, "tie_word_embeddings": True},
            head_dim=16,
            global_head_dim=24,
            sliding_window=12,
            layer_types=[
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
        ),
        seed=101,
    ),
    "gemma4_dense": Variant(  # as the large one: values of keys
        lambda: Gemma4TextConfig(
            **SHAPE,
            head_dim=20,
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            sliding_window=14,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            final_logit_softcapping=6.0,
        ),
        sharded=True,
    ),
    "gemma4_moe": Variant(
        lambda: Gemma4TextConfig(
            **SHAPE,
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            sliding_window=14,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=3,
            moe_intermediate_size=40,
        )
    ),
    "cohere": Variant(lambda: CohereConfig(**COHERE | {"num_key_value_heads": 1}, tie_word_embeddings=True)),
    "cohere2": Variant(
        lambda: Cohere2Config(
            **COHERE,
            tie_word_embeddings=False,
            attention_bias=True,
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        sharded=True,
    ),
    "exaone4": Variant(
        lambda: Exaone4Config(
            **SHAPE,
            head_dim=20,
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={**LLAMA3_ROPE},
        )
    ),
    "olmoe": Variant(
        lambda: OlmoeConfig(
            **SHAPE | {"intermediate_size": 40}, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
        )
    ),
    "flex_olmo": Variant(
        lambda: FlexOlmoConfig(
            **SHAPE | {"intermediate_size": 40, "num_key_value_heads": 1}, num_experts=5, num_experts_per_tok=3
        )
    ),
    "olmo2": Variant(lambda: Olmo2Config(**SHAPE, attention_bias=True, rope_parameters=WIDE_ROPE)),
    "olmo3": Variant(
        lambda: Olmo3Config(
            **SHAPE | {"num_key_value_heads": 1, "tie_word_embeddings": True},
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {**YARN_ROPE},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
            },
        ),
        sharded=True,
    ),
    "qwen3_5": Variant(
        lambda: Qwen3_5TextConfig(
            **SHAPE,
            head_dim=24,
            rope_parameters={"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=12,
            linear_value_head_dim=20,
        )
    ),
    "qwen3_5_moe": Variant(
        lambda: Qwen3_5MoeTextConfig(
            **{key: value for key, value in SHAPE.items() if key != "intermediate_size"},
            **EXPERTS,
            shared_expert_intermediate_size=56,
            head_dim=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        seed=101,
    ),
    "qwen3_next": Variant(
        lambda: Qwen3NextConfig(
            **SHAPE,
            **EXPERTS,
            shared_expert_intermediate_size=56,
            mlp_only_layers=[1],
            head_dim=24,
            rope_parameters={"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=12,
            linear_value_head_dim=20,
        )
    ),
    "lfm2": Variant(
        lambda: Lfm2Config(
            **_without(SHAPE, "rms_norm_eps"),
            norm_eps=1e-5,
            block_multiple_of=24,
            layer_types=["full_attention", "full_attention", "conv"],
        )
    ),
    "lfm2_bias": Variant(
        lambda: Lfm2Config(
            **_without(SHAPE, "rms_norm_eps") | {"num_hidden_layers": 4, "tie_word_embeddings": True},
            conv_bias=True,
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
            full_attn_idxs=[1, 2],
        )
    ),
    "granite_hybrid": Variant(
        lambda: GraniteMoeHybridConfig(
            **SHAPE,
            **GRANITE_HYBRID,
            layer_types=["linear_attention", "full_attention", "full_attention"],
            mamba_n_heads=8,
            mamba_d_state=12,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            logits_scaling=1.6,
        ),
        seed=103,
    ),
    "granite_hybrid_groups": Variant(
        lambda: GraniteMoeHybridConfig(
            **SHAPE | {"tie_word_embeddings": True},
            **GRANITE_HYBRID,
            layer_types=["mamba", "attention", "attention"],
            attention_multiplier=0.3,
            position_embedding_type="rope",
            mamba_n_heads=4,
            mamba_n_groups=2,
            mamba_d_state=10,
            mamba_d_conv=3,
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            time_step_limit=[0.2, 0.9],
        )
    ),
    "falcon_h1": Variant(
        lambda: FalconH1Config(
            **SHAPE,
            mamba_d_ssm=80,
            mamba_n_heads=4,
            mamba_n_groups=1,
            mamba_d_state=12,
            embedding_multiplier=1.4,
            lm_head_multiplier=0.8,
            mlp_multipliers=[0.7, 1.2],
            key_multiplier=0.6,
            attention_in_multiplier=1.3,
            attention_out_multiplier=1.8,
            ssm_multipliers=[0.8, 1.3, 0.7, 1.2, 0.9],
            ssm_in_multiplier=1.1,
            ssm_out_multiplier=0.7,
        )
    ),
    "falcon_h1_biases": Variant(
        lambda: FalconH1Config(
            **SHAPE | {"tie_word_embeddings": True},
            mamba_d_ssm=None,
            mamba_n_heads=8,
            mamba_n_groups=4,
            mamba_d_state=10,
            mamba_rms_norm=True,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
            key_multiplier=0.6,
            attention_in_multiplier=1.3,
            ssm_multipliers=[0.8, 1.3, 0.7, 1.2, 0.9],
            ssm_out_multiplier=0.7,
            time_step_limit=[0.1, 1.5],
        )
    ),
    "granite_hybrid_moe": Variant(
        lambda: GraniteMoeHybridConfig(
            **SHAPE | {"intermediate_size": 40},
            num_local_experts=6,
            num_experts_per_tok=2,
            shared_intermediate_size=56,
            layer_types=["linear_attention", "full_attention", "full_attention"],
            attention_multiplier=0.3,
            residual_multiplier=0.6,
            mamba_n_heads=8,
            mamba_d_state=12,
        )
    ),
    "granite4_dense": Variant(
        lambda: GraniteMoeHybridConfig(
            **SHAPE | {"tie_word_embeddings": True},
            **GRANITE_HYBRID,
            layer_types=["full_attention"] * 3,
            attention_multiplier=0.3,
            position_embedding_type="rope",
        )
    ),
    "deepseek_v3": Variant(
        lambda: DeepseekV3Config(
            **SHAPE | {"num_key_value_heads": 4},
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            n_shared_experts=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.7,
            n_group=3,
            topk_group=2,
            attention_bias=True,
            rope_parameters={**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.2},
        )
    ),
    "deepseek_v3_plain": Variant(  # q of the hidden state, halves that are rotated, sizes of their own
        lambda: DeepseekV3Config(
            **SHAPE | {"num_key_value_heads": 4, "tie_word_embeddings": True},
            q_lora_rank=None,
            kv_lora_rank=24,
            qk_nope_head_dim=20,
            qk_rope_head_dim=12,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            first_k_dense_replace=2,
            norm_topk_prob=False,
            n_group=1,
            topk_group=1,
            rope_interleave=False,
            rope_parameters=WIDE_ROPE,
        ),
        sharded=True,
    ),
    "deepseek_v2": Variant(
        lambda: DeepseekV2Config(
            **SHAPE | {"num_key_value_heads": 4},
            q_lora_rank=None,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
            routed_scaling_factor=1.7,
            rope_parameters={**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        )
    ),
    "glm4_moe_lite": Variant(
        lambda: Glm4MoeLiteConfig(
            **SHAPE | {"num_key_value_heads": 4},
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=8,
            v_head_dim=32,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            mlp_layer_types=["sparse", "dense", "sparse"],
        )
    ),
    "mistral4": Variant(
        lambda: Mistral4Config(
            **SHAPE | {"num_key_value_heads": 4},
            q_lora_rank=40,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=20,
            v_head_dim=20,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            routed_scaling_factor=1.3,
            n_group=2,
            topk_group=1,
            rope_parameters=deepcopy(SCALED_ROPE),
        )
    ),
    "nemotron_h": Variant(
        lambda: NemotronHConfig(
            **_without(SHAPE, "rms_norm_eps", "num_hidden_layers"),
            **NEMOTRON_H,
            layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention", "mlp"],
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=12,
            n_groups=2,
            ssm_state_size=10,
        )
    ),
    "nemotron_h_biases": Variant(
        lambda: NemotronHConfig(
            **_without(SHAPE, "rms_norm_eps", "num_hidden_layers"),
            **NEMOTRON_H,
            layers_block_type=["mlp", "full_attention", "full_attention", "linear_attention"],
            head_dim=20,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=1,
            ssm_state_size=12,
            conv_kernel=3,
            use_conv_bias=False,
            use_bias=True,
            mlp_bias=True,
            time_step_min=0.3,
        ),
        seed=101,
    ),
    "nemotron_h_moe": Variant(  # as the large ones: experts of fewer features than the layer
        lambda: NemotronHConfig(
            **_without(SHAPE, "rms_norm_eps", "num_hidden_layers"),
            layers_block_type=["moe", "full_attention", "moe", "linear_attention", "mlp"],
            layer_norm_epsilon=1e-5,
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=12,
            n_groups=2,
            ssm_state_size=10,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            moe_shared_expert_intermediate_size=56,
            moe_latent_size=32,
            routed_scaling_factor=1.7,
            n_group=3,
            topk_group=2,
            mlp_bias=True,
        ),
        seed=103,
    ),
    "nemotron_h_experts": Variant(
        lambda: NemotronHConfig(
            **_without(SHAPE, "rms_norm_eps", "num_hidden_layers"),
            layers_block_type=["linear_attention", "full_attention", "moe", "moe"],
            layer_norm_epsilon=1e-5,
            head_dim=20,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=1,
            ssm_state_size=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=40,
            norm_topk_prob=False,
        ),
        sharded=True,
    ),
    "starcoder2": Variant(
        lambda: Starcoder2Config(**_without(SHAPE, "rms_norm_eps", "tie_word_embeddings"), sliding_window=14), seed=101
    ),
    "starcoder2_plain": Variant(
        lambda: Starcoder2Config(
            **_without(SHAPE, "rms_norm_eps") | {"num_key_value_heads": 4}, use_bias=False, hidden_act="silu"
        ),
        seed=101,
    ),
    "apertus": Variant(lambda: ApertusConfig(**SHAPE, head_dim=24, rope_parameters={**LLAMA3_ROPE}), seed=101),
    "hunyuan_dense": Variant(
        lambda: HunYuanDenseV1Config(
            **SHAPE,
            head_dim=24,
            attention_bias=True,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 7.0, "factor": 1.0},
        ),
        seed=101,
    ),
    "hunyuan_moe": Variant(
        lambda: HunYuanMoEV1Config(
            **SHAPE | {"intermediate_size": 40, "tie_word_embeddings": True},
            head_dim=20,
            num_experts=6,
            moe_topk=[3, 3, 3],
            rope_parameters={**YARN_ROPE},
        ),
        seed=101,
    ),
    "deepseek_v2_groups": Variant(
        lambda: DeepseekV2Config(
            **SHAPE | {"num_key_value_heads": 4},
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
            routed_scaling_factor=1.7,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=2,
        ),
        seed=102,
    ),
    "ernie4_5_moe_bias": Variant(
        lambda: Ernie4_5_MoeConfig(
            **SHAPE,
            head_dim=20,
            use_bias=True,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=24,
            moe_num_shared_experts=1,
        ),
        seed=101,
    ),
    "llama4_stretched": Variant(
        lambda: Llama4TextConfig(
            **SHAPE | {"intermediate_size": 40},
            head_dim=24,
            intermediate_size_mlp=56,
            num_local_experts=4,
            moe_layers=[0],
            no_rope_layers=[1, 0, 1],
            attention_chunk_size=16,
            rope_parameters={**YARN_ROPE},
        ),
        seed=101,
    ),
    "cohere_qk_norm": Variant(lambda: CohereConfig(**COHERE, tie_word_embeddings=True, use_qk_norm=True), seed=101),
    "internlm3": Variant(
        lambda: InternLM3Config(
            **SHAPE,
            head_dim=24,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 50_000.0, "factor": 6.0},
        ),
        seed=101,
    ),
}

WRAPPED_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": None,
}
QWEN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 90_000.0, "mrope_section": [1, 2, 3]}
QWEN_TOKENS: dict[str, Any] = {
    "vision_start_token_id": 150,
    "vision_end_token_id": 151,
    "image_token_id": 152,
    "video_token_id": 153,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL: dict[str, Any] = {**SIGLIP, "model_type": "pixtral", "head_dim": 8}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 14,
}

# Models that take pictures too.
WRAPPED: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gemma3_vision": lambda: Gemma3Config(
        text_config={**WRAPPED_TEXT, "head_dim": 16, "query_pre_attn_scalar": 6, "sliding_window": 12},
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=152,
        boi_token_index=150,
        eoi_token_index=151,
    ),
    "gemma4_vision": lambda: Gemma4Config(
        text_config={
            **WRAPPED_TEXT,
            **{"pad_token_id": 0, "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 24, "sliding_window": 12},
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            **{"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1},
        },
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        },
        audio_config=None,  # tokens of pictures have other inputs of layers, so that none is chosen here
        **dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), VOCAB_SIZE + 1),
    ),
    "mistral3_vision": lambda: Mistral3Config(
        text_config={**WRAPPED_TEXT, "model_type": "mistral", "head_dim": 20, "sliding_window": None},
        vision_config=PIXTRAL,
        image_token_index=152,
        tie_word_embeddings=False,
    ),
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config={**WRAPPED_TEXT, "rope_parameters": {**QWEN_ROPE}},
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48, "patch_size": 14},
        **QWEN_TOKENS,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={**WRAPPED_TEXT, "rope_parameters": {**QWEN_ROPE}}, vision_config=QWEN_VISION, **QWEN_TOKENS
    ),
    "qwen3_5_vision": lambda: Qwen3_5Config(
        text_config={
            **WRAPPED_TEXT,
            "head_dim": 16,
            "rope_parameters": {**QWEN_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
        vision_config={**QWEN_VISION, "num_position_embeddings": 16},
        tie_word_embeddings=True,
        **QWEN_TOKENS,
    ),
    "qwen3_5_moe_vision": lambda: Qwen3_5MoeConfig(
        text_config={
            **{key: value for key, value in WRAPPED_TEXT.items() if key != "intermediate_size"},
            **EXPERTS,
            "shared_expert_intermediate_size": 24,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
        vision_config={**QWEN_VISION, "num_position_embeddings": 16},
        tie_word_embeddings=False,
        **QWEN_TOKENS,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**WRAPPED_TEXT, "head_dim": 16, "rope_parameters": {**QWEN_ROPE, "mrope_section": [2, 3, 3]}},
        vision_config={**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
        **QWEN_TOKENS,
    ),
    "llama4_vision": lambda: Llama4Config(
        text_config={
            **WRAPPED_TEXT,
            "intermediate_size": 40,
            "head_dim": 16,
            "intermediate_size_mlp": 56,
            "num_local_experts": 3,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 12,
            "tie_word_embeddings": False,
        },
        vision_config={
            **SIGLIP,
            "intermediate_size": 64,
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        image_token_index=152,
        boi_token_index=150,
        eoi_token_index=151,
    ),
    "mistral4_vision": lambda: Mistral3Config(
        text_config={
            **WRAPPED_TEXT,
            "model_type": "mistral4",
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "rope_parameters": deepcopy(SCALED_ROPE),
        },
        vision_config=PIXTRAL,
        image_token_index=152,
        tie_word_embeddings=False,
    ),
    "ministral3_vision": lambda: Mistral3Config(
        text_config={
            **WRAPPED_TEXT,
            "model_type": "ministral3",
            "head_dim": 20,
            "rope_parameters": deepcopy(SCALED_ROPE),
        },
        vision_config=PIXTRAL,
        image_token_index=152,
    ),
}


GRANITE_NAMES: Mapping[str, str] = {
    "gate_proj": "input_linear",
    "up_proj": "input_linear",
    "down_proj": "output_linear",
}
WITHOUT_OUT_PROJ = ("falcon_h1", "nemotron_h")  # PEFT refuses it
STARCODER2_NAMES: Mapping[str, str] = {"up_proj": "c_fc", "down_proj": "c_proj"}
LFM2_NAMES: Mapping[str, str] = {"o_proj": "out_proj", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class AdapterRecipe:
    """The name of a test's adapter, and its arguments of `LoraConfig`."""

    name: str
    lora: Mapping[str, Any] = field(default_factory=dict)

    def config(self, targets: Sequence[str], fused: Mapping[str, str]) -> LoraConfig:
        """PEFT's config of this recipe, for those of its modules that are among `targets`.

        `fused`: the names of modules that have others in this base.
        """
        modules = [
            *dict.fromkeys(fused.get(module, module) for module in self.lora["target_modules"] if module in targets)
        ]
        return LoraConfig(task_type="CAUSAL_LM", **{**self.lora, "target_modules": modules})


RECIPES: tuple[AdapterRecipe, ...] = (
    AdapterRecipe("rank1", {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj"]}),
    AdapterRecipe("rank3", {"r": 3, "lora_alpha": 5, "target_modules": ["v_proj", "o_proj", "down_proj", "out_proj"]}),
    AdapterRecipe("rank8", {"r": 8, "lora_alpha": 16, "target_modules": list(ATTENTION)}),
    AdapterRecipe(
        "rank16_rslora",
        {
            "r": 16,
            "lora_alpha": 8,
            "target_modules": [*ALL_LINEAR, *OF_SOME],
            "use_rslora": True,
        },
    ),
    AdapterRecipe(
        "patterns",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [*ALL_LINEAR, *OF_SOME],
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


@cache
def _made_here() -> tempfile.TemporaryDirectory[str]:
    """What this process has made: dozens of test files begin with the same models and adapters."""
    return tempfile.TemporaryDirectory(prefix="motet-models-")


def write_model(name: str, folder: Path, **changes: int) -> Path:
    """Writes the variant's random model in Hugging Face format, in float32. `changes` are fields of its config."""
    shutil.copytree(_made_model(name, **changes), folder, dirs_exist_ok=True)
    return folder


@cache
def _made_model(name: str, **changes: int) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_made_here().name))
    variant = VARIANTS.get(name) or Variant(WRAPPED[name])
    config = variant.config()
    for field_name, value in changes.items():
        assert hasattr(config, field_name), field_name
        setattr(config, field_name, value)
    loader = AutoModelForImageTextToText if name in WRAPPED else AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32)
    place = FIRST_WRAPPED_SEED + [*WRAPPED].index(name) if name in WRAPPED else [*VARIANTS].index(name)
    _redraw(model, torch.Generator().manual_seed(place if variant.seed is None else variant.seed))
    model.save_pretrained(folder, max_shard_size="100KB" if variant.sharded else "1GB")
    if variant.legacy_json:
        _write_legacy_json(folder / "config.json")
    return folder


@contextmanager
def patterns_may_match_nothing() -> Iterator[None]:
    """PEFT warns of patterns for modules that a recipe leaves out, as in bases with experts; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following .*_pattern keys", RuntimeWarning)
        yield


def write_adapters(model_path: Path, folder: Path) -> dict[str, Path]:
    """Writes one PEFT folder for each recipe, by PEFT's own `save_pretrained`; returns them by name.

    Where a model has experts, a recipe's modules outside of attention are left out.
    """
    files = sorted(path for path in model_path.iterdir() if path.is_file())
    content = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()
    made = Path(_made_here().name, content)
    if not made.exists():
        _make_adapters(model_path, made)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    for recipe in RECIPES:
        path = folder / recipe.name / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(model_path)}))
    return {recipe.name: folder / recipe.name for recipe in RECIPES}


def _make_adapters(model_path: Path, folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    names = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    has_experts = hasattr(base.config, "num_experts_per_tok") and getattr(base.config, "num_local_experts", 1) > 0
    has_shared_mlp = {"shared_mlp", "input_linear"} <= names
    are_modules = has_shared_mlp or base.config.model_type == "nemotron_h"  # those that PEFT finds
    targets: tuple[str, ...] = ATTENTION if has_experts and not are_modules else ALL_LINEAR
    linears = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = (*targets, *linears.intersection(OF_SOME))
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} if "qkv_proj" in names else {}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"} if "gate_up_proj" in names else {}
    fused |= GRANITE_NAMES if has_shared_mlp else {}
    fused |= LFM2_NAMES if "w1" in names else {}
    fused |= STARCODER2_NAMES if "c_fc" in names else {}
    if "kv_b_proj" in names:
        queries = "q_b_proj" if "q_b_proj" in names else "q_proj"
        fused |= {"q_proj": queries, "k_proj": "kv_b_proj", "v_proj": "kv_a_proj_with_mqa"}
    if base.config.model_type in WITHOUT_OUT_PROJ:
        targets = tuple(name for name in targets if name != "out_proj")
    for seed, recipe in enumerate(RECIPES):
        with patterns_may_match_nothing():
            model = get_peft_model(deepcopy(base), recipe.config(targets, fused))
        generator = torch.Generator().manual_seed(1_000 + seed)
        for module in model.modules():
            if not hasattr(module, "lora_A") or "default" not in module.lora_A:
                continue
            a, b, scaling = module.lora_A["default"].weight, module.lora_B["default"].weight, module.scaling["default"]
            _draw(a, a.shape[1] ** -0.5, generator)
            _draw(b, 0.5 / (scaling * a.shape[0] ** 0.5), generator)
        model.save_pretrained(folder / recipe.name)


def write_expert_adapter(model_path: Path, folder: Path) -> Path:
    """A PEFT folder with matrices for attention and for every expert of a base whose experts are fused."""
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=experts)
    model, generator = get_peft_model(base, config), torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            _draw(parameter, parameter.shape[1] ** -0.5 if "lora_A" in name else 0.4, generator)
    model.save_pretrained(folder)
    return folder


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
        """The smallest distance between the logits of the best token and the second one."""
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())


class Oracle:
    """transformers with all adapters loaded by PEFT, without a cache: computes the whole request for every token."""

    def __init__(self, model_path: Path, adapters: Mapping[str, Path]) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
        # Adapters of a mixed batch need a row for each request, which linears around experts do not get.
        self._flattens_rows = any(
            name.endswith(LATENT_EXPERT_MODULES) and isinstance(module, torch.nn.Linear)
            for name, module in base.named_modules()
        )
        first, *others = adapters
        with patterns_may_match_nothing():
            model = PeftModel.from_pretrained(base, adapters[first], adapter_name=first)
            for name in others:
                model.load_adapter(adapters[name], adapter_name=name)
        self._model = model.eval()

    def answers(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None], num_tokens: int
    ) -> list[Answer]:
        """Greedy tokens for each prompt with its own adapter, without an early stop."""
        requests = [list(prompt) for prompt in prompts]
        rows: list[list[torch.Tensor]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            for request, own, logits in zip(requests, rows, self._last_logits(requests, adapters), strict=True):
                own.append(logits)
                request.append(int(logits.argmax()))
        return [
            Answer(request[len(prompt) :], torch.stack(own))
            for prompt, request, own in zip(prompts, requests, rows, strict=True)
        ]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        """`[num_tokens, vocab]` of one request alone: row i is what the token after token i is chosen from."""
        if adapter is None:
            with self._model.disable_adapter():
                return self._forward(token_ids)
        self._model.set_adapter(adapter)
        return self._forward(token_ids)

    @torch.inference_mode()
    def beams(
        self, prompt: Sequence[int], adapter: str | None, width: int, max_tokens: int, ends: Sequence[int]
    ) -> list[tuple[list[int], float]]:
        """Tokens after the prompt, and scores, of the beams that transformers finds, the best first."""
        with ExitStack() as stack:
            if adapter is None:
                stack.enter_context(self._model.disable_adapter())
            else:
                self._model.set_adapter(adapter)
            found = self._model.generate(
                input_ids=torch.tensor([[*prompt]]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=max_tokens,
                early_stopping="never",
                do_sample=False,
                use_cache=False,
                eos_token_id=[*ends],
                pad_token_id=VOCAB_SIZE - 2,
                return_dict_in_generate=True,
                output_scores=True,
            )
        beams = list[tuple[list[int], float]]()
        for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
            length = next((place + 1 for place, token_id in enumerate(row) if token_id in ends), max_tokens)
            beams.append((row[:length], score))
        return beams

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        """`[num_tokens, hidden]` of one request alone: the last layer's states after the norm."""
        if adapter is None:
            with self._model.disable_adapter():
                return self._last_states(token_ids)
        self._model.set_adapter(adapter)
        return self._last_states(token_ids)

    def _last_states(self, token_ids: Sequence[int]) -> torch.Tensor:
        model = self._model.get_base_model().model
        states: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def _last_logits(self, requests: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> list[torch.Tensor]:
        """The logits of one batch, padded at the right, which causal attention does not see."""
        if self._flattens_rows:
            return [self.logits(request, own)[-1] for request, own in zip(requests, adapters, strict=True)]
        width = max(len(request) for request in requests)
        token_ids = torch.tensor([[*request, *[0] * (width - len(request))] for request in requests])
        names = ["__base__" if adapter is None else adapter for adapter in adapters]
        logits = self._model(input_ids=token_ids, use_cache=False, adapter_names=names).logits
        return [row[len(request) - 1] for row, request in zip(logits, requests, strict=True)]

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


def exact_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet token by token in float64: transformers' own, by chunks in float32, is off by up to 5e-3."""
    assert use_qk_l2norm_in_kernel
    q, k, v = query.double(), key.double(), value.double()
    q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], dim=2) for each in (q, k))
    batch_size, num_tokens, num_heads, value_dim = v.shape
    state = v.new_zeros(batch_size, num_heads, k.shape[-1], value_dim)
    if initial_state is not None:
        state = initial_state.double()
    rows = list[torch.Tensor]()
    for token in range(num_tokens):
        state = state * g[:, token].double().exp()[..., None, None]
        wanted = v[:, token] - torch.einsum("bhkv,bhk->bhv", state, k[:, token])
        change = wanted * beta[:, token].double()[..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, token], change)
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, token]) * q.shape[-1] ** -0.5)
    return torch.stack(rows, dim=1).to(query.dtype), state.float() if output_final_state else None


# transformers 5.24.0 has the class and no entry for it, and its `register` leaves classes of its own out.
AutoModelForCausalLM._model_mapping._extra_content[Mistral4Config] = Mistral4ForCausalLM
modeling_qwen3_5.torch_chunk_gated_delta_rule = exact_delta_rule
modeling_qwen3_5_moe.torch_chunk_gated_delta_rule = exact_delta_rule
modeling_qwen3_next.torch_chunk_gated_delta_rule = exact_delta_rule


def _redraw(model: PreTrainedModel, generator: torch.Generator) -> None:
    gemma = model.config.model_type.startswith("gemma")
    is_gemma4 = "gemma4" in model.config.model_type
    adds_one = (gemma and not is_gemma4) or model.config.model_type.startswith(("qwen3_5", "qwen3_next"))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in name:
            _draw(parameter, 0.2, generator)  # biases around 0, norms around 1, which some families add by themselves
            if "norm" in name and (not adds_one or "linear_attn" in name):
                parameter.data += 1.0
                if is_gemma4 and "q_norm" in name:  # scores are not scaled by the heads' size
                    parameter.data *= 0.25
            elif is_gemma4 and "scale" in name:  # of the router's input, which is divided by a root, and of experts
                parameter.data += 8.0 if name.endswith("router.scale") else 1.0
            elif "A_log" in name:  # states that last for a few tokens, and for many
                parameter.data -= torch.linspace(0.0, 4.0, len(parameter))
            elif "sinks" in name:
                parameter.data *= 10.0  # as far apart as scores are
        elif "embed_tokens" in name:
            # Small enough that a tied head does not just repeat the input; Gemma scales it by 8.
            _draw(parameter, 0.2 if gemma else 0.4, generator)
        else:
            _draw(parameter, (3.0 if "lm_head" in name else 1.2) * parameter.shape[-1] ** -0.5, generator)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:  # as far apart as the scores
            _draw(buffer, 0.3, generator)
        elif "layer_scalar" in name:
            buffer.fill_(0.8)
        elif "act_fn.beta" in name or "act_fn.eps" in name:
            buffer.fill_(0.35 if "beta" in name else -0.05)


def _draw(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _write_legacy_json(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    if config.pop("num_local_experts", None):
        config["num_experts"] = EXPERTS["num_experts"]
    path.write_text(json.dumps(config))
