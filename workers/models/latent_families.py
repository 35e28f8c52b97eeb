"""Families of bases with latent attention."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.experts import Routing
from .dense_families import COMMON, KV_HEADS
from .family import Family
from .mixture_families import DEEPSEEK_EXPERTS, DEEPSEEK_ROUTING

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
    nullable=KV_HEADS | {"q_lora_rank"},
    computes={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},  # as released files name them
    experts=DEEPSEEK_EXPERTS,
    routing=DEEPSEEK_ROUTING,
    is_latent=True,
)


LATENT_FAMILIES = {
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
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
        },
        computes={"scoring_func": "softmax"},
        experts=replace(DEEPSEEK_EXPERTS, bias=""),
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
        experts=replace(DEEPSEEK_EXPERTS, bias=""),
        routing=Routing(eps=1e-20),
    ),
}
