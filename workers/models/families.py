"""The model families that motet's decoder computes, by the architecture named in config.json."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...kernels.experts import Routing
from .family import ExpertNames, Family
from .rotary_config import LONGROPE, PROPORTIONAL, SCALINGS
from .sliding import (
    below_layer_alternating,
    every_other,
    five_of_six,
    five_of_six_always,
    from_layer,
    if_enabled,
    if_rotated,
    three_of_four,
    throughout,
    without_rotary,
)

_QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
# DeepSeek V3's names and routing, which others have taken over.
_DEEPSEEK_EXPERTS = replace(_QWEN_EXPERTS, bias="gate.e_score_correction_bias", shared="shared_experts", shared_gate="")
_DEEPSEEK_ROUTING = Routing(scoring="sigmoid", has_bias=True, eps=1e-20)

_GRANITE_EXPERTS = replace(
    _QWEN_EXPERTS,
    block="block_sparse_moe",
    router="router.layer",
    mlp="block_sparse_moe",
    stacked=("input_linear.weight", "output_linear.weight"),
    are_parameters=True,
)

COMMON: dict[str, Any] = {
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # the hidden size divided by the heads
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN: dict[str, Any] = COMMON | {"use_sliding_window": False, "sliding_window": 4096}
_QWEN_LAYERS: dict[str, Any] = {"max_window_layers": 28, "layer_types": None}
_QWEN_MOE: dict[str, Any] = {
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
_GEMMA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_KV_HEADS = frozenset({"num_key_value_heads"})
_QKV: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj")}
_GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("gate_proj", "up_proj")}

_MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_BIASES: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}

_COHERE = Family(
    "cohere",
    "cohere",
    {key: value for key, value in COMMON.items() if key != "rms_norm_eps"}
    | {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": False, "logit_scale": 0.0625},
    centred_norms=True,
    wide_norms=True,
    mlp_norm=None,
    is_parallel=True,
    rope_theta=500_000.0,
    rotates_neighbours=True,
)
_OLMO2 = Family(
    "olmo2",
    "olmo2",
    COMMON | {"rms_norm_eps": 1e-5, "attention_bias": False},
    wide_norms=True,
    qk_norm=True,
    qk_norm_spans_heads=True,
    attention_norm=None,
    mlp_norm=None,
    post_norms=_POST_NORMS,
)
_DELTA: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "deepseek_v3",
    COMMON
    | {
        "num_key_value_heads": 128,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": None,
        "v_head_dim": 128,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
    nullable=_KV_HEADS | {"q_lora_rank"},
    computes={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},  # as released files name them
    experts=_DEEPSEEK_EXPERTS,
    routing=_DEEPSEEK_ROUTING,
    is_latent=True,
)
_OLMO_MOE: dict[str, Any] = {"attention_bias": False, "norm_topk_prob": False}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, math.inf],
    # How weights were drawn before training:
    **{"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001, "time_step_rank": "auto"},
}
_QWEN3_5 = Family(
    "qwen3_5",
    "qwen3_5_text",
    COMMON | _DELTA | {"num_key_value_heads": 4, "head_dim": 256, "attention_bias": False, "layer_types": None},
    qk_norm=True,
    norm_offset=1.0,
    rotated_share=0.25,
    recurrent="delta",
    gated_attention=True,
    reads_wrapped=True,
)

_LFM2: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "intermediate_size": 12_288,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "tie_embedding": None,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": None,
    "full_attn_idxs": None,
    "layer_types": None,
}

FAMILIES = {
    "LlamaForCausalLM": Family("llama", "llama", COMMON | _BIASES),
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
        rope_kinds=("default", "linear", "llama3"),
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
    "MistralForCausalLM": Family(
        "mistral", "mistral", COMMON | {"num_key_value_heads": 8, "sliding_window": 4096}, slides=throughout
    ),
    "MinistralForCausalLM": Family(
        "ministral",
        "ministral",
        COMMON | {"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
        nullable=_KV_HEADS,
        slides=throughout,
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        "ministral3",
        COMMON | {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None},
        slides=throughout,
        default_rope={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        scales_queries=True,
    ),
    "GraniteForCausalLM": Family(
        "granite",
        "granite",
        COMMON | _BIASES | _MULTIPLIERS,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granite_hybrid",
        "granitemoehybrid",
        COMMON
        | _MULTIPLIERS
        | _MAMBA
        | {
            "attention_bias": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "layer_types": None,
        },
        experts=replace(_GRANITE_EXPERTS, beside_dense=True),
        always_normalized=True,
        recurrent="mamba",
        fused={"shared_mlp.input_linear": ("gate_proj", "up_proj")},
        paths={
            "gate_proj": "shared_mlp.gate_proj",
            "up_proj": "shared_mlp.up_proj",
            "down_proj": "shared_mlp.output_linear",
        },
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "smollm3",
        COMMON
        | _BIASES
        | {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        nullable=_KV_HEADS,
        slides=without_rotary,
        rope_theta=2_000_000.0,
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        "seed_oss",
        COMMON
        | _BIASES
        | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False},
        nullable=_KV_HEADS | {"head_dim"},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "phi3",
        COMMON | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
        slides=throughout,
        rope_kinds=("default", LONGROPE),
        fused=_QKV | _GATE_UP,
        rotated_share=1.0,
    ),
    "FalconH1ForCausalLM": Family(
        "falcon_h1",
        "falcon_h1",
        COMMON
        | _BIASES
        | _MAMBA
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "mlp_multipliers": None,
            "key_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "ssm_multipliers": None,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        },
        nullable=_KV_HEADS | {"mamba_d_ssm"},
        mlp_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
        recurrent="parallel_mamba",
        paths={module: f"feed_forward.{module}" for module in ("gate_proj", "up_proj", "down_proj")},
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        "glm4",
        COMMON | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
        post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        output_has_bias=False,
        fused=_GATE_UP,
        rotated_share=0.5,
        rotates_neighbours=True,
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        "ernie4_5",
        COMMON
        | {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        nullable=_KV_HEADS | {"head_dim"},
        rope_theta=500_000.0,
        rotates_neighbours=True,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        "ernie4_5_moe",
        COMMON
        | {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
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
        nullable=_KV_HEADS,
        rope_theta=500_000.0,
        rotates_neighbours=True,
        experts=replace(_DEEPSEEK_EXPERTS, bias="moe_statics.e_score_correction_bias"),
        routing=Routing(has_bias=True),
        always_normalized=True,
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
        experts=_GRANITE_EXPERTS,
        always_normalized=True,
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
    "Qwen2ForCausalLM": Family(
        "qwen2",
        "qwen2",
        _QWEN | _QWEN_LAYERS | {"num_key_value_heads": 32},
        nullable=_KV_HEADS,
        computes={"qkv_bias": True},
        qkv_bias=True,
        slides=from_layer,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        "qwen2_moe",
        _QWEN
        | _QWEN_LAYERS
        | _QWEN_MOE
        | {
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        slides=below_layer_alternating,
        experts=_QWEN_EXPERTS,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "qwen3",
        _QWEN | _QWEN_LAYERS | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
        nullable=_KV_HEADS,
        computes={"use_qk_norm": True},
        qk_norm=True,
        slides=from_layer,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "qwen3_moe",
        _QWEN
        | _QWEN_MOE
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
        experts=_QWEN_EXPERTS,
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
        experts=_DEEPSEEK_EXPERTS,
        routing=_DEEPSEEK_ROUTING,
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK_V3,
        name="deepseek_v2",
        model_type="deepseek_v2",
        defaults={
            **{key: _DEEPSEEK_V3.defaults[key] for key in (*COMMON, *_LATENT_SIZES)},
            "num_key_value_heads": None,
            "attention_bias": False,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
        },
        computes={"scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        experts=replace(_DEEPSEEK_EXPERTS, bias=""),
        routing=Routing(),
        rotates_neighbours=True,
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        name="glm4_moe_lite",
        model_type="glm4_moe_lite",
        defaults={
            **{key: value for key, value in _DEEPSEEK_V3.defaults.items() if key != "first_k_dense_replace"},
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": None,
        },
        nullable=frozenset({"q_lora_rank"}),
        computes={**_DEEPSEEK_V3.computes, "first_k_dense_replace": 1},
    ),
    "Mistral4ForCausalLM": replace(
        _DEEPSEEK_V3,
        name="mistral4",
        model_type="mistral4",
        defaults={
            **{key: value for key, value in _DEEPSEEK_V3.defaults.items() if key != "num_nextn_predict_layers"},
            "num_key_value_heads": 32,
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        computes={},
        default_rope={
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        scales_queries=True,
        rotated_share=1.0,
        experts=replace(_DEEPSEEK_EXPERTS, bias=""),
        routing=Routing(eps=1e-20),
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        "qwen3_next",
        COMMON
        | _DELTA
        | _QWEN_MOE
        | {
            "num_key_value_heads": 2,
            "head_dim": 256,
            "attention_bias": False,
            "layer_types": None,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        qk_norm=True,
        norm_offset=1.0,
        rotated_share=0.25,
        recurrent="grouped_delta",
        gated_attention=True,
        experts=replace(_QWEN_EXPERTS, are_parameters=True),
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
    "Lfm2ForCausalLM": Family(
        "lfm2",
        "lfm2",
        _LFM2,
        qk_norm=True,
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        head_norms=("q_layernorm", "k_layernorm"),
        final_norm="embedding_norm",
        rope_theta=1_000_000.0,
        recurrent="short_convolution",
        paths={
            "o_proj": "self_attn.out_proj",
            "gate_proj": "feed_forward.w1",
            "up_proj": "feed_forward.w3",
            "down_proj": "feed_forward.w2",
        },
    ),
    "GemmaForCausalLM": Family(
        "gemma",
        "gemma",
        COMMON
        | {
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "attention_bias": False,
        },
        computes={"hidden_activation": "gelu_pytorch_tanh"},
        activations={"gelu": "gelu_pytorch_tanh"},  # as released files name it
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        "gemma2",
        _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        norm_offset=1.0,
        mlp_norm="pre_feedforward_layernorm",
        post_norms=_POST_NORMS,
        scaled_embedding=True,
        slides=every_other,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        "gemma3_text",
        _GEMMA | {"final_logit_softcapping": None, "sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0},
        qk_norm=True,
        norm_offset=1.0,
        mlp_norm="pre_feedforward_layernorm",
        post_norms=_POST_NORMS,
        scaled_embedding=True,
        slides=five_of_six,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        linear_is_in_context=True,
    ),
    "Gemma4ForCausalLM": Family(
        "gemma4",
        "gemma4_text",
        {key: value for key, value in _GEMMA.items() if key != "query_pre_attn_scalar"}
        | {
            "sliding_window": 512,
            "final_logit_softcapping": None,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
            "per_layer_config": None,
            "global_head_dim": None,
            "num_global_key_value_heads": None,
        },
        computes={"use_bidirectional_attention": "vision"},  # of pictures' tokens
        qk_norm=True,
        wide_norms=True,
        mlp_norm="pre_feedforward_layernorm",
        post_norms=_POST_NORMS,
        scaled_embedding=True,
        slides=five_of_six_always,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        rope_kinds=(*SCALINGS, PROPORTIONAL),
        rotated_share=1.0,
        default_rope={
            "full_attention": {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        reads_wrapped=True,
        sizes_differ=True,
        last_is_full=True,
        has_value_norm=True,
        attention_scale=1.0,
        has_layer_scalars=True,
        experts=ExpertNames(
            *("", "gate_proj", "up_proj", "down_proj"),
            router="router.proj",
            shared_gate="",
            are_parameters=True,
            factors="router.per_expert_scale",
        ),
        experts_beside=True,
        always_normalized=True,
    ),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE,
        name="cohere2",
        model_type="cohere2",
        defaults={**_COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        computes={"position_embedding_type": "rope_gptj"},  # as released files name it
        slides=three_of_four,
        only_windows_rotate=True,
        rope_theta=10_000.0,
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        "exaone4",
        COMMON
        | {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
        },
        qk_norm=True,
        attention_norm=None,
        mlp_norm=None,
        post_norms=_POST_NORMS,
        slides=three_of_four,
        only_windows_rotate=True,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        "olmoe",
        COMMON | _OLMO_MOE | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
        qk_norm=True,
        qk_norm_spans_heads=True,
        experts=_QWEN_EXPERTS,
    ),
    "FlexOlmoForCausalLM": replace(
        _OLMO2,
        name="flex_olmo",
        model_type="flex_olmo",
        defaults=COMMON | _OLMO_MOE | {"num_experts": 7, "num_experts_per_tok": 5},
        rope_theta=500_000.0,
        experts=_QWEN_EXPERTS,
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        name="olmo3",
        model_type="olmo3",
        defaults={**_OLMO2.defaults, "sliding_window": 4096, "layer_types": None},
        slides=three_of_four,
        rope_theta=500_000.0,
        local_rope_theta=500_000.0,  # a `rope_theta` or scaling beside no `rope_parameters` is of full attention alone
        linear_is_in_context=True,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": replace(
        _QWEN3_5,
        name="qwen3_5_moe",
        model_type="qwen3_5_moe_text",
        defaults={
            **_QWEN3_5.defaults,
            "num_key_value_heads": 2,
            "intermediate_size": 1,  # no layer has a dense MLP
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        computes={"norm_topk_prob": True, "mlp_only_layers": []},
        experts=replace(_QWEN_EXPERTS, are_parameters=True),
        always_normalized=True,
    ),
}
