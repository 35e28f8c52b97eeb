"""The model families that motet's decoder computes, by the architecture named in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .rotary_config import LONGROPE, SCALINGS
from .sliding import (
    Slides,
    below_layer_alternating,
    every_other,
    five_of_six,
    from_layer,
    if_enabled,
    never,
    throughout,
    without_rotary,
)


@dataclass(frozen=True)
class ExpertNames:
    """The names of a family for the tensors of its experts, within a layer.

    `are_fused`: all experts of a layer are two tensors, `gate_up_proj` `[num_experts, hidden, 2 * width]`, whose
    columns are gate, up, gate, up and so on, and `down_proj` `[num_experts, width, hidden]`, each with a bias, and so
    has the router.
    """

    block: str
    gate: str
    up: str
    down: str
    router: str = "gate"
    are_fused: bool = False
    are_parameters: bool = False  # as in transformers, where PEFT finds no modules of theirs; fused ones are


# Read by `rotary_config.py`. With `original_max_position_embeddings` transformers overrides that of the scaling.
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}) | {
    "original_max_position_embeddings"
}


@dataclass(frozen=True)
class Family:
    """The facts of a family that config.json does not state, and which of its keys the family reads.

    `defaults`: the keys, beside those that every family needs and those of the rotary embedding, with their values
    where they are absent, as in transformers' config class. `nullable`: of these, keys that may be null although null
    is not their default. `computes`: keys that the family does not read, with the only value that is true of it.
    """

    name: str
    model_type: str  # in config.json
    defaults: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()
    computes: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False  # q, k and v have a bias even without `attention_bias`
    qk_norm: bool = False  # RMS norm over each head of q and k before the rotary embedding
    norm_offset: float = 0.0  # added to the stored weights of all norms
    wide_norms: bool = False  # norms are multiplied by their weights in float32
    has_sinks: bool = False  # `self_attn.sinks`, a score of each head that has no value
    mlp_norm: str = "post_attention_layernorm"  # name of the norm before the MLP
    post_norms: tuple[str, str] | None = None  # of the outputs of attention and MLP before they are added; None: none
    output_has_bias: bool = True  # `attention_bias` is of o_proj too
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # linears of a layer that are one in the file
    scaled_embedding: bool = False  # the embedding is multiplied by the square root of the hidden size
    slides: Slides = never  # which layers see only a window of the newest tokens
    rope_theta: float = 10_000.0  # default
    local_rope_theta: float | None = None  # default for the own rotary embedding of layers that slide; None: no own one
    rope_kinds: tuple[str, ...] = SCALINGS
    default_rope: Mapping[str, Any] | None = None  # `rope_parameters` where config.json has none; None: plain ones
    scales_queries: bool = False  # by their position, after their rotation
    rotated_share: float | None = None  # default of `partial_rotary_factor`; None: heads are rotated whole
    rotates_neighbours: bool = False  # pairs (0, 1), (2, 3) …, not (0, half), (1, half + 1) …
    linear_is_in_context: bool = False  # max_position_embeddings is the context after linear scaling, not before it
    experts: ExpertNames | None = None  # None: the family has no experts
    activations: Mapping[str, str] = field(default_factory=dict)  # what is computed where config.json names another
    recurrent: bool = False  # layers may have a recurrent state (Gated DeltaNet) in place of attention
    gated_attention: bool = False  # q_proj gives each head's q and then a gate of attention's output
    reads_wrapped: bool = False  # it is also read from the files, and has the adapters, of one that takes pictures too
    always_normalized: bool = False  # the chosen experts' weights add up to one, whatever `norm_topk_prob` says

    @property
    def activation_key(self) -> str:
        return "hidden_activation" if "hidden_activation" in self.defaults else "hidden_act"


_QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")

_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # the hidden size divided by the heads
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN: dict[str, Any] = _COMMON | {"use_sliding_window": False, "sliding_window": 4096}
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
_GEMMA_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_KV_HEADS = frozenset({"num_key_value_heads"})
_QKV: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj")}
_GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("gate_proj", "up_proj")}

_BIASES: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}

_QWEN3_5 = Family(
    "qwen3_5",
    "qwen3_5_text",
    _COMMON
    | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "layer_types": None,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    qk_norm=True,
    norm_offset=1.0,
    rotated_share=0.25,
    recurrent=True,
    gated_attention=True,
    reads_wrapped=True,
)

FAMILIES = {
    "LlamaForCausalLM": Family("llama", "llama", _COMMON | _BIASES),
    "MistralForCausalLM": Family(
        "mistral", "mistral", _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096}, slides=throughout
    ),
    "MinistralForCausalLM": Family(
        "ministral",
        "ministral",
        _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
        nullable=_KV_HEADS,
        slides=throughout,
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        "ministral3",
        _COMMON | {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None},
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
        _COMMON
        | _BIASES
        | {
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "smollm3",
        _COMMON
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
        _COMMON
        | _BIASES
        | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False},
        nullable=_KV_HEADS | {"head_dim"},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "phi3",
        _COMMON | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
        slides=throughout,
        rope_kinds=("default", LONGROPE),
        fused=_QKV | _GATE_UP,
        rotated_share=1.0,
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        "glm4",
        _COMMON | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
        post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        output_has_bias=False,
        fused=_GATE_UP,
        rotated_share=0.5,
        rotates_neighbours=True,
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        "ernie4_5",
        _COMMON
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
    "MixtralForCausalLM": Family(
        "mixtral",
        "mixtral",
        _COMMON
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
    "GptOssForCausalLM": Family(
        "gpt_oss",
        "gpt_oss",
        _COMMON
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
        experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", router="router", are_fused=True),
        always_normalized=True,
    ),
    "GemmaForCausalLM": Family(
        "gemma",
        "gemma",
        _COMMON
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
        post_norms=_GEMMA_POST_NORMS,
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
        post_norms=_GEMMA_POST_NORMS,
        scaled_embedding=True,
        slides=five_of_six,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
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


@dataclass(frozen=True)
class Wrapper:
    """A model that takes pictures too, of which motet computes the text model: the facts of its config.json.

    Text alone has the same position on all axes of a rotary embedding of several (`mrope`), which is then plain.
    """

    model_type: str
    text: Family  # what `text_config` describes
    other_texts: tuple[Family, ...] = ()  # likewise, where its `model_type` says so
    ties_by_default: bool = False  # `tie_word_embeddings` counts beside `text_config`, not in it
    may_be_flat: bool = False  # older files have the text model's keys beside `vision_config`
    has_axes: bool = False  # its rotary embedding has to name `mrope_section`

    @property
    def texts(self) -> tuple[Family, ...]:
        return (self.text, *self.other_texts)


_QWEN_VL: dict[str, Any] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80}
_QWEN2, _QWEN3, _GEMMA3 = (FAMILIES[f"{name}ForCausalLM"] for name in ("Qwen2", "Qwen3", "Gemma3"))
_QWEN2_VL = replace(_QWEN2, defaults={**_QWEN2.defaults, **_QWEN_VL}, rope_theta=1_000_000.0)

WRAPPERS = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "gemma3",
        replace(  # files name only what differs from these; the cap of logits would not be applied
            _GEMMA3,
            defaults={key: value for key, value in _GEMMA3.defaults.items() if key != "final_logit_softcapping"}
            | {"vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072},
        ),
        ties_by_default=True,
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3",
        FAMILIES["MistralForCausalLM"],
        (FAMILIES["Ministral3ForCausalLM"],),
        ties_by_default=True,
    ),
    "Qwen2VLForConditionalGeneration": Wrapper(
        "qwen2_vl", replace(_QWEN2_VL, model_type="qwen2_vl_text"), may_be_flat=True, has_axes=True
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        "qwen2_5_vl", replace(_QWEN2_VL, model_type="qwen2_5_vl_text"), may_be_flat=True, has_axes=True
    ),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5", FAMILIES["Qwen3_5ForCausalLM"]),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("qwen3_5_moe", FAMILIES["Qwen3_5MoeForCausalLM"]),
    "Qwen3VLForConditionalGeneration": Wrapper(
        "qwen3_vl",
        replace(
            _QWEN3,
            model_type="qwen3_vl_text",
            defaults=_COMMON | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
            rope_theta=500_000.0,
            slides=never,
        ),
    ),
}
# The tensors, by the beginnings of their names, and their adapters' that belong to no text model.
VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "visual.")

# As AutoModel saves a model, without its head. A Gemma3Model sees images.
_WITHOUT_HEAD = {
    name.replace("ForCausalLM", "TextModel" if name.startswith("Gemma3") else "Model"): family
    for name, family in FAMILIES.items()
}


def family_of(architecture: str) -> Family:
    """The family of an architecture. Raises ValueError for one that motet does not compute."""
    family = FAMILIES.get(architecture) or _WITHOUT_HEAD.get(architecture)
    if family is None:
        accepted = ", ".join((*FAMILIES, *WRAPPERS))
        raise ValueError(f"architecture {architecture!r} is not supported: {accepted} are accepted")
    return family
