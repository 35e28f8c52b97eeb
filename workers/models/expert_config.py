"""The facts of a base's experts, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .families import Family


@dataclass(frozen=True)
class ExpertConfig:
    """Sizes are of the whole model, before any sharding."""

    num_experts: int
    top_k: int  # experts that compute a row
    intermediate_size: int  # of one expert
    normalized: bool  # the chosen experts' weights add up to one
    shared_intermediate_size: int | None  # of the expert that computes every row; None: there is none
    layers: tuple[bool, ...]  # True: experts, False: a dense MLP

    @staticmethod
    def from_model_config(raw: Mapping[str, Any], family: Family) -> ExpertConfig | None:
        """The experts of a config.json; None: no layer has experts. Raises ValueError for contradicting numbers."""
        if family.experts is None:
            return None
        num_experts = int(_first(raw, "num_experts", "num_local_experts"))
        top_k, step = int(raw["num_experts_per_tok"]), int(raw.get("decoder_sparse_step") or 1)
        dense = {int(layer) for layer in raw.get("mlp_only_layers") or ()}
        layers = tuple(
            num_experts > 0 and layer not in dense and (layer + 1) % step == 0
            for layer in range(int(raw["num_hidden_layers"]))
        )
        if not any(layers):
            return None
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"num_experts_per_tok = {top_k}: 1 to {num_experts}, the number of experts, is accepted")
        return ExpertConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=int(_first(raw, "moe_intermediate_size", "intermediate_size")),
            normalized=family.always_normalized or bool(raw.get("norm_topk_prob", False)),
            shared_intermediate_size=int(raw["shared_expert_intermediate_size"]) if family.shared_expert else None,
            layers=layers,
        )


def _first(raw: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of `keys` that is there; they are names of the same fact in different versions."""
    found = next((key for key in keys if raw.get(key) is not None), keys[0])
    return raw[found]
