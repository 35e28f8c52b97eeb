"""Families of bases with mixtures of experts and attention over keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...kernels.experts import Routing
from .dense_families import COMMON, KV_HEADS, OLMO2, QWEN, QWEN_LAYERS
from .family import ExpertNames, Family
from .sliding import below_layer_alternating, every_other, if_enabled, if_rotated, throughout

QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
# DeepSeek V3's names and routing, which others have taken over.
DEEPSEEK_EXPERTS = replace(QWEN_EXPERTS, bias="gate.e_score_correction_bias", shared="shared_experts", shared_gate="")
DEEPSEEK_ROUTING = Routing(scoring="sigmoid", has_bias=True, eps=1e-20)
GRANITE_EXPERTS = replace(
    QWEN_EXPERTS,
    block="block_sparse_moe",
    router="router.layer",
    mlp="block_sparse_moe",
    stacked=("input_linear.weight", "output_linear.weight"),
    are_parameters=True,
)

QWEN_MOE: dict[str, Any] = {
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}

_OLMO_MOE: dict[str, Any] = {"attention_bias": False, "norm_topk_prob": False}

MIXTURE_FAMILIES = {
    "Llama4ForCausalLM": Family(
        "llama4",
        "llama4_text",
        COMMON
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "intermediate_size_mlp": 16_384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        nullable=frozenset({"num_key_value_heads", "head_dim", "attention_chunk_size"}),
        qk_norm_has_weights=False,
        slides=if_rotated,
        rope_theta=500_000.0,
        rotates_neighbours=True,
        experts=ExpertNames(
            "feed_forward",
            "gate_proj",
            "up_proj",
            "down_proj",
            router="router",
            shared_gate="",
            are_fused=True,
            mlp="feed_forward",
        ),
        routing=Routing(scoring="sigmoid", scales_inputs=True),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "mixtral",
        COMMON
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        computes={"norm_topk_prob": True},
        slides=throughout,
        rope_theta=1_000_000.0,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        always_normalized=True,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        "qwen2_moe",
        QWEN
        | QWEN_LAYERS
        | QWEN_MOE
        | {
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        slides=below_layer_alternating,
        experts=QWEN_EXPERTS,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "qwen3_moe",
        QWEN
        | QWEN_MOE
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        computes={"use_qk_norm": True},
        qk_norm=True,
        slides=if_enabled,
        experts=QWEN_EXPERTS,
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        "granitemoe",
        COMMON
        | {
            "attention_bias": False,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        experts=GRANITE_EXPERTS,
        always_normalized=True,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        "ernie4_5_moe",
        COMMON
        | {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": False,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
            "num_nextn_predict_layers": 0,
        },
        nullable=KV_HEADS,
        rope_theta=500_000.0,
        rotates_neighbours=True,
        experts=replace(DEEPSEEK_EXPERTS, bias="moe_statics.e_score_correction_bias"),
        head_has_bias=True,
        routing=Routing(has_bias=True),
        always_normalized=True,
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "hunyuan_v1_moe",
        "hunyuan_v1_moe",
        COMMON | {"rms_norm_eps": 1e-5, "attention_bias": False, "num_experts": 1, "moe_topk": 1},
        computes={"use_qk_norm": True},
        qk_norm=True,
        qk_norm_is_last=True,
        head_norms=("query_layernorm", "key_layernorm"),
        experts=replace(QWEN_EXPERTS, router="gate.wg", shared="shared_mlp", shared_gate=""),
        always_normalized=True,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        "glm4_moe",
        COMMON
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        output_has_bias=False,
        rotated_share=0.5,
        experts=DEEPSEEK_EXPERTS,
        routing=DEEPSEEK_ROUTING,
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        "minimax_m2",
        COMMON
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rotary_dim": None,
        },
        computes={"use_qk_norm": True, "scoring_func": "sigmoid"},
        qk_norm=True,
        qk_norm_spans_heads=True,
        rope_theta=5_000_000.0,
        rotated_share=1.0,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", bias="e_score_correction_bias", shared_gate=""),
        routing=Routing(scoring="sigmoid", has_bias=True),
        always_normalized=True,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        "gpt_oss",
        COMMON
        | {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        wide_norms=True,
        has_sinks=True,
        slides=every_other,
        rope_theta=150_000.0,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        experts=ExpertNames(
            "mlp", "gate_proj", "up_proj", "down_proj", router="router", are_fused=True, take_turns=True
        ),
        always_normalized=True,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        "olmoe",
        COMMON | _OLMO_MOE | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
        qk_norm=True,
        qk_norm_spans_heads=True,
        experts=QWEN_EXPERTS,
    ),
    "FlexOlmoForCausalLM": replace(
        OLMO2,
        name="flex_olmo",
        model_type="flex_olmo",
        defaults=COMMON | _OLMO_MOE | {"num_experts": 7, "num_experts_per_tok": 5},
        rope_theta=500_000.0,
        experts=QWEN_EXPERTS,
    ),
}
