"""Which layers of a base slide, that is, see only a window of the newest tokens: one rule for each family.

A rule reads config.json. If that has `layer_types`, families that know this key use it; the rest of their rule is for
older files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Slides = Callable[[Mapping[str, Any], int], bool]  # config.json, layer


def never(raw: Mapping[str, Any], layer: int) -> bool:
    return False


def throughout(raw: Mapping[str, Any], layer: int) -> bool:
    return True


def if_enabled(raw: Mapping[str, Any], layer: int) -> bool:
    """Qwen3-MoE: all layers or none."""
    return bool(raw.get("use_sliding_window", False))


def from_layer(raw: Mapping[str, Any], layer: int) -> bool:
    """Qwen2, Qwen3: all layers but the first `max_window_layers`."""
    return if_enabled(raw, layer) and _listed(raw, layer, layer >= int(raw.get("max_window_layers", 28)))


def below_layer_alternating(raw: Mapping[str, Any], layer: int) -> bool:
    """Qwen2-MoE: every other layer of the first `max_window_layers`."""
    below = layer < int(raw.get("max_window_layers", 28))
    return if_enabled(raw, layer) and _listed(raw, layer, below and layer % 2 == 0)


def every_other(raw: Mapping[str, Any], layer: int) -> bool:
    """Gemma 2: the first, the third and so on."""
    return _listed(raw, layer, layer % 2 == 0)


def five_of_six(raw: Mapping[str, Any], layer: int) -> bool:
    """Gemma 3: all layers but every sixth, or every `sliding_window_pattern`-th if config.json has that."""
    return _listed(raw, layer, (layer + 1) % int(raw.get("sliding_window_pattern") or 6) != 0)


def _listed(raw: Mapping[str, Any], layer: int, otherwise: bool) -> bool:
    kinds = raw.get("layer_types")
    return kinds[layer] == "sliding_attention" if kinds else otherwise
