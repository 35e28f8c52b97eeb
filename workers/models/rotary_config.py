"""What config.json says of a base's rotary position embedding. Needs no torch: routers and launchers read it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RotaryConfig:
    theta: float
    kind: str  # one of SCALINGS
    options: Mapping[str, float]  # the scaling's own numbers, by their names in config.json

    @staticmethod
    def from_model_config(raw: Mapping[str, Any], default_theta: float = 10000.0) -> RotaryConfig:
        """Reads `rope_parameters` (new) or `rope_theta` with `rope_scaling` (old) of a config.json."""
        parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        kind = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
        theta = float(parameters.pop("rope_theta", None) or raw.get("rope_theta") or default_theta)
        if kind not in SCALINGS:
            raise ValueError(f"rope_type {kind!r} is not supported: {', '.join(SCALINGS)} are accepted")
        if float(raw.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError("partial_rotary_factor other than 1 is not supported")
        if kind in ("llama3", "yarn"):
            parameters.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
        options = {key: float(value) for key, value in parameters.items() if isinstance(value, int | float)}
        return RotaryConfig(theta, kind, options)


def layer_rotaries(
    raw: Mapping[str, Any], slides: Sequence[bool], theta: float, local_theta: float | None
) -> tuple[RotaryConfig, ...]:
    """The embedding of each layer. With a `local_theta`, its default, layers that slide have their own (Gemma 3)."""
    if local_theta is None:
        return (RotaryConfig.from_model_config(raw, theta),) * len(slides)
    kinds = raw.get("rope_parameters") or {}
    wide = RotaryConfig.from_model_config({**raw, "rope_parameters": kinds.get("full_attention")}, theta)
    local = RotaryConfig.from_model_config(
        {
            "rope_parameters": kinds.get("sliding_attention"),
            "rope_theta": raw.get("rope_local_base_freq"),
            "max_position_embeddings": raw["max_position_embeddings"],
        },
        local_theta,
    )
    return tuple(local if slide else wide for slide in slides)
