"""The base models that motet takes, by the architecture that their config.json names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .dense_families import COMMON, DENSE_FAMILIES
from .family import Family, Wrapper
from .hybrid_families import HYBRID_FAMILIES
from .latent_families import LATENT_FAMILIES
from .mixture_families import MIXTURE_FAMILIES
from .sliding import never

FAMILIES = {**DENSE_FAMILIES, **MIXTURE_FAMILIES, **LATENT_FAMILIES, **HYBRID_FAMILIES}

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
    "Gemma4ForConditionalGeneration": Wrapper("gemma4", FAMILIES["Gemma4ForCausalLM"], ties_by_default=True),
    "Llama4ForConditionalGeneration": Wrapper("llama4", FAMILIES["Llama4ForCausalLM"]),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3",
        FAMILIES["MistralForCausalLM"],
        (FAMILIES["Ministral3ForCausalLM"], FAMILIES["Mistral4ForCausalLM"]),
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
            defaults=COMMON | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
            rope_theta=500_000.0,
            slides=never,
        ),
    ),
}
# The tensors, by the beginnings of their names, and their adapters' that belong to no text model.
VISION_PREFIXES = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "visual.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
)

# As AutoModel saves a model, without its head. A Gemma3Model, for example, sees images: its text is a Gemma3TextModel.
_WRAPPERS_WITHOUT_HEAD = {name.replace("ForConditionalGeneration", "Model"): each for name, each in WRAPPERS.items()}
_WITHOUT_HEAD = {
    headless if headless not in _WRAPPERS_WITHOUT_HEAD else headless.replace("Model", "TextModel"): family
    for headless, family in ((name.replace("ForCausalLM", "Model"), family) for name, family in FAMILIES.items())
}


def wrapper_of(architecture: str) -> Wrapper | None:
    """None: the architecture is of a model of text alone, or unknown."""
    return WRAPPERS.get(architecture) or _WRAPPERS_WITHOUT_HEAD.get(architecture)


def family_of(architecture: str) -> Family:
    """The family of an architecture. Raises ValueError for one that motet does not compute."""
    family = FAMILIES.get(architecture) or _WITHOUT_HEAD.get(architecture)
    if family is None:
        accepted = ", ".join((*FAMILIES, *WRAPPERS))
        raise ValueError(f"architecture {architecture!r} is not supported: {accepted} are accepted")
    return family
