"""Every field of PEFT's LoraConfig, as computed, harmless, or refused.

`tests/adapters/test_peft_fields.py` compares this with the installed PEFT, so that fields of a newer one are reviewed
before adapters that set them are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AdapterInvalid, shown

# peft.py reads these, and they decide what is computed.
COMPUTED = frozenset(
    {
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    }
)
# Fields that change nothing that is computed, and why.
HARMLESS: Mapping[str, str] = {
    "auto_mapping": "which Python class the base had",
    "base_model_name_or_path": "where the base was: base_names.py compares it; shapes decide what fits",
    "corda_config": "read where init_lora_weights is corda, which is refused; a converted adapter keeps it",
    "ensure_weight_tying": "for embeddings and the output layer, which are refused as targets",
    "eva_config": "how A was drawn before training; ranks that it chose are in rank_pattern",
    "inference_mode": "whether training is to continue",
    "loftq_config": "read where init_lora_weights is loftq, which is refused",
    "lora_dropout": "zero outside of training",
    "lora_ga_config": "read where init_lora_weights is lora_ga, which is refused; a converted adapter keeps it",
    "megatron_core": "read where megatron_config is set, which is refused",
    "peft_version": "which PEFT wrote the file",
    "qalora_group_size": "read where use_qalora is set, which is refused",
    "revision": "which revision of the base it was",
    "runtime_config": "where PEFT computes",
    "task_type": "which head the base had; heads that were trained are in modules_to_save, which is refused",
    "velora_config": "how gradients were kept in training; the forward pass is plain LoRA's",
}
PLAIN_INITIALISATIONS = ("true", "false", "gaussian", "orthogonal", "eva", "mica")  # those that do not change the base
_CONVERT = (
    "the adapter belongs to a base whose weights this initialisation has changed. Save it as plain LoRA: "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...), with the adapter as it was before training"
)
_CHANGING_INITIALISATIONS: Mapping[str, str] = {  # by prefix of the name: what to do instead
    "pissa": _CONVERT,
    "olora": _CONVERT,
    "corda": _CONVERT,
    "lora_ga": _CONVERT,
    "loftq": "the adapter belongs to a quantized base: train it on the base that is served here",
}
_ONLY_PLAIN = "only plain LoRA is computed: train without it"
_MERGE = "only plain LoRA is computed: merge this into a plain LoRA, or train without it"


@dataclass(frozen=True)
class Refused:
    """A field that would change what is computed. `unset`: values with which PEFT computes plain LoRA."""

    feature: str
    remedy: str = _ONLY_PLAIN
    unset: tuple[Any, ...] = (None, False)


# Where PEFT tests for truth. For other fields an empty object means the feature with its defaults.
_EMPTY_IS_UNSET: tuple[Any, ...] = (None, False, [], {})
REFUSED: Mapping[str, Refused] = {
    "alora_invocation_tokens": Refused("activated LoRA (aLoRA)", unset=_EMPTY_IS_UNSET),
    "arrow_config": Refused("Arrow routing"),
    "bias": Refused("trained biases", "train with bias='none'", unset=("none", None)),
    "fan_in_fan_out": Refused("transposed weights", "set it to false for bases of linear layers"),
    "kasa_config": Refused("KaSA, which changes the base's weights"),
    "layer_replication": Refused("layer replication", unset=_EMPTY_IS_UNSET),
    "lora_bias": Refused("LoRA with a bias"),
    "megatron_config": Refused("Megatron layers", unset=_EMPTY_IS_UNSET),
    "modules_to_save": Refused("fully trained modules beside LoRA", unset=_EMPTY_IS_UNSET),
    "monteclora_config": Refused("Monte Carlo LoRA"),
    "trainable_token_indices": Refused("trained token embeddings", unset=_EMPTY_IS_UNSET),
    "use_bdlora": Refused("block-diagonal LoRA", _MERGE),
    "use_dora": Refused("DoRA"),
    "use_qalora": Refused("QA-LoRA"),
}


def refuse_fields(config: Mapping[str, Any]) -> None:
    """Raises AdapterInvalid, which names the field, unless the config is one of plain LoRA.

    A field that is in none of the tables above is accepted if it is null or false.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterInvalid(f"peft_type is {shown(kind)}: only LORA is accepted")
    for key, value in config.items():
        refused = REFUSED.get(key)
        if refused is not None and not _is_one_of(value, refused.unset):
            raise AdapterInvalid(f"{key} = {shown(value)} is not supported ({refused.feature}): {refused.remedy}")
        known = refused is not None or key in COMPUTED or key in HARMLESS or key in ("peft_type", "init_lora_weights")
        if not known and value is not None and value is not False:
            raise AdapterInvalid(f"{shown(key)} = {shown(value)} is an unknown field: remove it if it changes nothing")
    _refuse_initialisation(config.get("init_lora_weights", True))


def _refuse_initialisation(value: Any) -> None:
    # PEFT initialises again when it loads an adapter, and changes the base's weights then, as in training. A
    # conversion to plain LoRA sets the field to true.
    name = str(value).lower()
    if value is None or name in PLAIN_INITIALISATIONS:
        return
    remedy = next((text for prefix, text in _CHANGING_INITIALISATIONS.items() if name.startswith(prefix)), None)
    if remedy is None:
        remedy = f"{', '.join(PLAIN_INITIALISATIONS)} are accepted, since they do not change the base"
    raise AdapterInvalid(f"init_lora_weights = {shown(value)} is not supported: {remedy}")


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in accepted)
