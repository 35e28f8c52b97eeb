"""The model families that motet's decoder computes, by the architecture named in config.json."""

from __future__ import annotations

from dataclasses import dataclass

from .sliding import (
    Slides,
    below_layer_alternating,
    every_other,
    five_of_six,
    from_layer,
    if_enabled,
    never,
    throughout,
)


@dataclass(frozen=True)
class ExpertNames:
    """The names of a family for the tensors of its experts, within a layer."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """The facts of a family that config.json does not state, and the family's defaults for keys that are absent."""

    name: str
    qkv_bias: bool = False  # q, k and v have a bias even without `attention_bias`
    qk_norm: bool = False  # RMS norm over each head of q and k before the rotary embedding
    norm_offset: float = 0.0  # added to the stored weights of all norms
    post_norms: bool = False  # the outputs of attention and MLP are normed before they are added to the residual
    scaled_embedding: bool = False  # the embedding is multiplied by the square root of the hidden size
    tied_embedding: bool = False  # default
    query_scalar: bool = False  # `query_pre_attn_scalar` scales attention in place of the head size
    attention_softcap: bool = False  # scores are capped by `attn_logit_softcapping`
    activation_key: str = "hidden_act"
    activation: str = "silu"  # default
    slides: Slides = never  # which layers see only a window of the newest tokens
    window: int | None = 4096  # default, of the layers that slide
    rope_theta: float = 10_000.0  # default
    local_rope_theta: float | None = None  # default for the own rotary embedding of layers that slide; None: no own one
    experts: ExpertNames | None = None  # None: the family has no experts
    shared_expert: bool = False  # there is one more expert, which computes every row
    always_normalized: bool = False  # the chosen experts' weights add up to one, whatever `norm_topk_prob` says


_QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")

FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", slides=throughout),
    "MixtralForCausalLM": Family(
        "mixtral",
        slides=throughout,
        window=None,
        rope_theta=1_000_000.0,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        always_normalized=True,
    ),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, slides=from_layer),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", qkv_bias=True, slides=below_layer_alternating, experts=_QWEN_EXPERTS, shared_expert=True
    ),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, slides=from_layer),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, slides=if_enabled, experts=_QWEN_EXPERTS),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        tied_embedding=True,
        query_scalar=True,
        attention_softcap=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        slides=every_other,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        tied_embedding=True,
        query_scalar=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        slides=five_of_six,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
    ),
}

# As AutoModel saves a model, without its head. A Gemma3Model sees images.
_WITHOUT_HEAD = {
    name.replace("ForCausalLM", "TextModel" if name.startswith("Gemma3") else "Model"): family
    for name, family in FAMILIES.items()
}


def family_of(architecture: str) -> Family:
    """The family of an architecture. Raises ValueError for one that motet does not compute."""
    family = FAMILIES.get(architecture) or _WITHOUT_HEAD.get(architecture)
    if family is None:
        raise ValueError(f"architecture {architecture!r} is not supported: {', '.join(FAMILIES)} are accepted")
    return family
