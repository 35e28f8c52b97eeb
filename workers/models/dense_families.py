"""Families of bases whose layers all have a dense MLP, or may have experts beside it (Gemma 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .family import ExpertNames, Family
from .rotary_config import LONGROPE, PROPORTIONAL, SCALINGS
from .sliding import every_other, five_of_six, five_of_six_always, from_layer, three_of_four, throughout, without_rotary

COMMON: dict[str, Any] = {
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # the hidden size divided by the heads
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

KV_HEADS = frozenset({"num_key_value_heads"})
BIASES: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}

_QKV: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj")}
_GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("gate_proj", "up_proj")}
QWEN: dict[str, Any] = COMMON | {"use_sliding_window": False, "sliding_window": 4096}
QWEN_LAYERS: dict[str, Any] = {"max_window_layers": 28, "layer_types": None}
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
_COHERE = Family(
    "cohere",
    "cohere",
    {key: value for key, value in COMMON.items() if key != "rms_norm_eps"}
    | {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": False, "logit_scale": 0.0625}
    | {"use_qk_norm": False},
    qk_norm_is_centred=True,
    centred_norms=True,
    wide_norms=True,
    mlp_norm=None,
    is_parallel=True,
    rope_theta=500_000.0,
    rotates_neighbours=True,
)

OLMO2 = Family(
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


DENSE_FAMILIES = {
    "LlamaForCausalLM": Family("llama", "llama", COMMON | BIASES),
    "InternLM3ForCausalLM": Family(
        "internlm3",
        "internlm3",
        COMMON | BIASES | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "head_dim": 128},
        nullable=KV_HEADS | {"head_dim"},
        old_names={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "MistralForCausalLM": Family(
        "mistral", "mistral", COMMON | {"num_key_value_heads": 8, "sliding_window": 4096}, slides=throughout
    ),
    "MinistralForCausalLM": Family(
        "ministral",
        "ministral",
        COMMON | {"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
        nullable=KV_HEADS,
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
        COMMON | BIASES | MULTIPLIERS,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "smollm3",
        COMMON
        | BIASES
        | {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        nullable=KV_HEADS,
        slides=without_rotary,
        rope_theta=2_000_000.0,
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        "seed_oss",
        COMMON
        | BIASES
        | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False},
        nullable=KV_HEADS | {"head_dim"},
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
        nullable=KV_HEADS | {"head_dim"},
        rope_theta=500_000.0,
        rotates_neighbours=True,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        "qwen2",
        QWEN | QWEN_LAYERS | {"num_key_value_heads": 32},
        nullable=KV_HEADS,
        computes={"qkv_bias": True},
        qkv_bias=True,
        slides=from_layer,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "qwen3",
        QWEN | QWEN_LAYERS | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
        nullable=KV_HEADS,
        computes={"use_qk_norm": True},
        qk_norm=True,
        slides=from_layer,
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
        defaults={key: value for key, value in _COHERE.defaults.items() if key != "use_qk_norm"}
        | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        computes={"position_embedding_type": "rope_gptj"},  # as released files name it
        slides=three_of_four,
        only_windows_rotate=True,
        rope_theta=10_000.0,
    ),
    "ApertusForCausalLM": Family(
        "apertus",
        "apertus",
        COMMON | {"rms_norm_eps": 1e-5, "hidden_act": "xielu", "attention_bias": False},
        qk_norm=True,
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        has_gates=False,
        rope_theta=12_000_000.0,
        default_rope={
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        "hunyuan_v1_dense",
        COMMON | {"rms_norm_eps": 1e-5, "attention_bias": False},
        computes={"use_qk_norm": True},  # as released files name it
        qk_norm=True,
        qk_norm_is_last=True,
        head_norms=("query_layernorm", "key_layernorm"),
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        "starcoder2",
        {key: value for key, value in COMMON.items() if key != "rms_norm_eps"}
        | {
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "use_bias": True,
            "sliding_window": None,
        },
        centred_norms=True,
        norms_have_bias=True,
        wide_norms=True,
        has_gates=False,
        slides=throughout,
        paths={"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
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
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": replace(
        OLMO2,
        name="olmo3",
        model_type="olmo3",
        defaults={**OLMO2.defaults, "sliding_window": 4096, "layer_types": None},
        slides=three_of_four,
        rope_theta=500_000.0,
        local_rope_theta=500_000.0,  # a `rope_theta` or scaling beside no `rope_parameters` is of full attention alone
        linear_is_in_context=True,
    ),
}
