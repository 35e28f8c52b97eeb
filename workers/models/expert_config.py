"""The facts of a base's experts, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .family import Family


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
    def from_values(values: Mapping[str, Any], family: Family) -> ExpertConfig | None:
        """The experts of a base whose family reads these keys; None: no layer has experts.

        Raises ValueError for contradicting numbers.
        """
        if family.experts is None:
            return None
        num_experts = int(values["num_experts"] if "num_experts" in values else values["num_local_experts"])
        top_k, step = int(values["num_experts_per_tok"]), int(values.get("decoder_sparse_step", 1))
        dense = {int(layer) for layer in values.get("mlp_only_layers") or ()}
        layers = tuple(
            num_experts > 0 and layer not in dense and (layer + 1) % step == 0
            for layer in range(int(values["num_hidden_layers"]))
        )
        if not any(layers):
            return None
        if top_k > num_experts:
            raise ValueError(f"num_experts_per_tok = {top_k}: 1 to {num_experts}, the number of experts, is accepted")
        return ExpertConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=int(values.get("moe_intermediate_size", values["intermediate_size"])),
            normalized=family.always_normalized or bool(values["norm_topk_prob"]),
            shared_intermediate_size=values.get("shared_expert_intermediate_size"),
            layers=layers,
        )
