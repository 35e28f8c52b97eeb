"""The model families that motet's decoder computes, by the architecture named in config.json."""

from __future__ import annotations

from dataclasses import dataclass

from .sliding import (
    Slides,
    below_layer_alternating,
    every_other,
    five_of_six,
    from_layer,
    if_asked,
    never,
    throughout,
)


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the tensors of its experts, within a layer."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """What a family's checkpoints have that config.json does not say."""

    name: str
    qkv_bias: bool = False  # there even without `attention_bias`
    qk_norm: bool = False  # RMS norm over each head of q and k before the rotary embedding
    norm_offset: float = 0.0  # is added to the stored weights of all norms
    post_norms: bool = False  # the outputs of attention and MLP are normed too, before they join the residual
    scaled_embedding: bool = False  # by the root of the hidden size
    tied_embedding: bool = False  # where config.json does not say
    query_scalar: bool = False  # `query_pre_attn_scalar` scales attention in place of the head size
    attention_softcap: bool = False  # `attn_logit_softcapping` counts
    activation_key: str = "hidden_act"
    activation: str = "silu"  # where config.json does not say
    slides: Slides = never
    window: int | None = 4096  # of the layers that slide, where config.json does not say
    rope_theta: float = 10_000.0  # where config.json does not say
    local_rope_theta: float | None = (
        None  # layers that slide have a rotary embedding of their own, by default with this
    )
    experts: ExpertNames | None = None
    shared_expert: bool = False  # one more expert that computes every row
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
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, slides=if_asked, experts=_QWEN_EXPERTS),
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


def family_of(architecture: str) -> Family:
    """The family of an architecture. Raises ValueError for one that motet does not compute."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ValueError(f"architecture {architecture!r} is not supported: {', '.join(FAMILIES)} are accepted")
    return family
