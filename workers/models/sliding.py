"""Which layers of a base slide, that is, see only a window of the newest tokens: one rule for each family.

A rule takes the values of the keys that the family reads. `layer_types`, where it is given, comes before the rule,
which is for older files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

Slides = Callable[[Mapping[str, Any], int], bool]  # values, layer

_KINDS = {"sliding_attention": True, "full_attention": False}
RECURRENT_KINDS = ("linear_attention", "conv", "mamba")
_CHUNKED = {"chunked_attention": True, "full_attention": False}


def recurrent_layers(values: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer of a base that has such ones whether it has a recurrent state in place of attention."""
    kinds, layers = values["layer_types"], range(values["num_hidden_layers"])
    if kinds:
        return tuple(kind in RECURRENT_KINDS for kind in kinds)
    if "full_attn_idxs" in values:
        attend = values["full_attn_idxs"]
        return tuple(attend is not None and layer not in attend for layer in layers)
    if "full_attention_interval" not in values:
        return (True,) * len(layers)
    return tuple((layer + 1) % int(values["full_attention_interval"]) != 0 for layer in layers)


def mlp_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the layers that are an MLP and nothing else."""
    return tuple(layer for layer, kind in enumerate(values["layer_types"]) if kind == "mlp")


def sliding_layers(
    values: Mapping[str, Any], slides: Slides, *, extra_kinds: Collection[str] = (), last_is_full: bool = False
) -> tuple[bool, ...]:
    """For each layer whether it slides. Raises ValueError for `layer_types` that do not fit the layers.

    `extra_kinds`: those that the base may have beside these, and that do not slide. `last_is_full`: the last one sees
    all tokens, whatever config.json says.
    """
    num_layers, kinds = values["num_hidden_layers"], values.get("layer_types")
    if not kinds:
        kind = "chunked_attention" if "attention_chunk_size" in values else "sliding_attention"
        kinds = [kind if slides(values, layer) else "full_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries: num_hidden_layers = {num_layers} needs as many")
    accepted = {**_KINDS, **dict.fromkeys(extra_kinds, False)}
    if "attention_chunk_size" in values:
        accepted = _CHUNKED
    for kind in kinds:
        if kind not in accepted:
            raise ValueError(f"layer_types has {kind!r}: {', '.join(accepted)} are accepted")
    layers = tuple(accepted[kind] for kind in kinds)
    if last_is_full:
        layers = (*layers[:-1], False)
    if any(layers) and not values.get("use_sliding_window", True):
        raise ValueError("layer_types has 'sliding_attention', and use_sliding_window = false: true is needed")
    if any(layers) and values.get("attention_chunk_size", 0) is None:
        raise ValueError("attention_chunk_size = null, and layers see chunks: a whole number from 1 is needed")
    if any(layers) and values.get("sliding_window", values.get("attention_chunk_size")) is None:
        raise ValueError("sliding_window = null, and layers of this base slide: a whole number from 1 is needed")
    return layers


def never(values: Mapping[str, Any], layer: int) -> bool:
    return False


def throughout(values: Mapping[str, Any], layer: int) -> bool:
    return values["sliding_window"] is not None


def if_enabled(values: Mapping[str, Any], layer: int) -> bool:
    """Qwen3-MoE: all layers or none."""
    return bool(values["use_sliding_window"]) and throughout(values, layer)


def from_layer(values: Mapping[str, Any], layer: int) -> bool:
    """Qwen2, Qwen3: all layers but the first `max_window_layers`."""
    return if_enabled(values, layer) and layer >= int(values["max_window_layers"])


def has_rotary(values: Mapping[str, Any], layer: int) -> bool:
    """SmolLM3: all layers but every fourth, or as config.json says, rotate queries and keys."""
    layers = values.get("no_rope_layers")  # 1: it does, whatever the name says
    return bool(layers[layer] if layers else (layer + 1) % int(values["no_rope_layer_interval"]))


def if_rotated(values: Mapping[str, Any], layer: int) -> bool:
    """Llama 4: the layers that rotate see chunks."""
    return values["attention_chunk_size"] is not None and has_rotary(values, layer)


def without_rotary(values: Mapping[str, Any], layer: int) -> bool:
    """SmolLM3: the layers that do not rotate, if windows are enabled."""
    return if_enabled(values, layer) and not has_rotary(values, layer)


def below_layer_alternating(values: Mapping[str, Any], layer: int) -> bool:
    """Qwen2-MoE: every other layer of the first `max_window_layers`."""
    return bool(values["use_sliding_window"]) and layer < int(values["max_window_layers"]) and layer % 2 == 0


def every_other(values: Mapping[str, Any], layer: int) -> bool:
    """Gemma 2: the first, the third and so on."""
    return layer % 2 == 0


def three_of_four(values: Mapping[str, Any], layer: int) -> bool:
    """OLMo 3: all layers but every fourth, or every `sliding_window_pattern`-th if the family has that (EXAONE 4)."""
    return (layer + 1) % int(values.get("sliding_window_pattern", 4)) != 0


def five_of_six(values: Mapping[str, Any], layer: int) -> bool:
    """Gemma 3: all layers but every sixth, or every `sliding_window_pattern`-th if config.json has that."""
    return (layer + 1) % int(values["sliding_window_pattern"]) != 0


def five_of_six_always(values: Mapping[str, Any], layer: int) -> bool:
    """Gemma 4: all layers but every sixth."""
    return (layer + 1) % 6 != 0
