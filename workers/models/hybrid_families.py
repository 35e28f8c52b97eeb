"""Families of bases with layers that have a recurrent state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...adapters.adapter import EMBEDDING, MODULES
from .dense_families import BIASES, COMMON, KV_HEADS, MULTIPLIERS
from .family import Family
from .mixture_families import DEEPSEEK_EXPERTS, DEEPSEEK_ROUTING, GRANITE_EXPERTS, QWEN_EXPERTS, QWEN_MOE

_DELTA: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

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

_NEMOTRON_H: dict[str, Any] = {
    "layer_types": None,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "residual_in_fp32": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    # What trained models do not compute with.
    "expand": 2,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "time_step_limit": [0.0, math.inf],
    "chunk_size": 128,
    "mamba_ssm_cache_dtype": "float32",
    "rescale_prenorm_residual": True,
    "n_shared_experts": 1,
    "moe_shared_expert_overlap": True,
    "num_nextn_predict_layers": 0,
    # Of layers with experts:
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


HYBRID_FAMILIES = {
    "GraniteMoeHybridForCausalLM": Family(
        "granite_hybrid",
        "granitemoehybrid",
        COMMON
        | MULTIPLIERS
        | _MAMBA
        | {
            "attention_bias": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "layer_types": None,
        },
        experts=replace(GRANITE_EXPERTS, beside_dense=True),
        always_normalized=True,
        recurrent="mamba",
        fused={"shared_mlp.input_linear": ("gate_proj", "up_proj")},
        paths={
            "gate_proj": "shared_mlp.gate_proj",
            "up_proj": "shared_mlp.up_proj",
            "down_proj": "shared_mlp.output_linear",
        },
    ),
    "FalconH1ForCausalLM": Family(
        "falcon_h1",
        "falcon_h1",
        COMMON
        | BIASES
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
        nullable=KV_HEADS | {"mamba_d_ssm"},
        mlp_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
        recurrent="parallel_mamba",
        paths={module: f"feed_forward.{module}" for module in ("gate_proj", "up_proj", "down_proj")},
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        "qwen3_next",
        COMMON
        | _DELTA
        | QWEN_MOE
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
        experts=replace(QWEN_EXPERTS, are_parameters=True),
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
        experts=replace(QWEN_EXPERTS, are_parameters=True),
        always_normalized=True,
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h",
        "nemotron_h",
        _NEMOTRON_H,
        nullable=KV_HEADS,
        computes={
            "attention_bias": False,
            "mamba_proj_bias": False,
            "residual_in_fp32": False,
            "mamba_hidden_act": "silu",
        },
        wide_norms=True,
        attention_norm="norm",
        mlp_norm=None,
        final_norm="norm_f",
        recurrent="mamba",
        has_halves=True,
        has_gates=False,
        experts=replace(
            DEEPSEEK_EXPERTS,
            block="mixer",
            gate="",
            mlp="mixer",
            stacked=("experts.up_proj", "experts.down_proj"),
        ),
        routing=DEEPSEEK_ROUTING,
        rotates=False,
        mixer_block="mixer",
        paths={EMBEDDING: "embeddings", **{module: f"mixer.{module}" for module in MODULES if module != "gate_proj"}},
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
}
