"""The facts of a base's experts, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...adapters.adapter import EXPERT_MODULES, LATENT_EXPERT_MODULES, NARROW_MODULES, SHARED_MODULES, ExpertShape
from ...kernels.experts import Routing
from .family import ExpertNames, Family

_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
_STEP_KEYS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_DENSE_KEYS = ("first_k_dense_replace", "moe_layer_start_index")  # the first layers without experts
_SAME_SIZE_KEYS = ("intermediate_size_mlp", "moe_topk")  # of families whose shared expert is as wide as each other one
_SHARED_KEYS = ("n_shared_experts", "moe_num_shared_experts")


@dataclass(frozen=True)
class ExpertConfig:
    """Sizes are of the whole model, before any sharding."""

    num_experts: int
    routing: Routing
    intermediate_size: int  # of one expert
    shared_intermediate_size: int | None  # of the expert that computes every row; None: there is none
    shared_is_gated: bool  # its output is weighted by a gate of its own
    layers: tuple[bool, ...]  # True: experts, False: a dense MLP
    is_beside: bool = False  # layers with experts have a dense MLP too
    has_gates: bool = True  # an expert, and the one that computes every row, have a gate
    latent_size: int | None = None  # features that experts read and give, between two linears; None: hidden ones

    def has_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP."""
        return self.is_beside or not self.layers[layer]

    @property
    def top_k(self) -> int:
        """Experts that compute a row."""
        return self.routing.top_k

    def routed_modules(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of EXPERT_MODULES, and of the linears before and behind the experts."""
        width, num_in, latent = self.intermediate_size, self.num_in(hidden), dict[str, tuple[int, int]]()
        gate, up, down = EXPERT_MODULES
        if self.latent_size is not None:
            latent = dict(zip(LATENT_EXPERT_MODULES, ((hidden, num_in), (num_in, hidden)), strict=True))
        gates = {gate: (num_in, width)} if self.has_gates else {}
        return gates | {up: (num_in, width), down: (width, num_in)} | latent

    def num_in(self, hidden: int) -> int:
        """Features that an expert reads."""
        return self.latent_size or hidden

    def shape(self, names: ExpertNames) -> ExpertShape:
        """What adapters of the experts must fit."""
        layers = tuple(layer for layer, has_experts in enumerate(self.layers) if has_experts)
        called = dict(zip(EXPERT_MODULES[-len(names.ups) - 1 :], (*names.ups, names.down), strict=True))
        return ExpertShape(
            self.num_experts,
            layers,
            names.block,
            called,
            are_parameters=names.are_fused or names.are_parameters,
            takes_turns=names.take_turns,
            parameters=f"{names.mlp}.experts" if names.block else "experts",
            swaps_sides=names.swaps_sides,
        )

    def shared_modules(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linears of the expert that computes every row, and of its gate."""
        width = self.shared_intermediate_size or 0
        sides = dict(zip(SHARED_MODULES, ((hidden, width), (hidden, width), (width, hidden)), strict=True))
        if not self.has_gates:
            del sides[SHARED_MODULES[0]]
        return sides | ({NARROW_MODULES[0]: (hidden, 1)} if self.shared_is_gated else {})

    @staticmethod
    def from_values(values: Mapping[str, Any], family: Family) -> ExpertConfig | None:
        """The experts of a base whose family reads these keys; None: no layer has experts.

        Raises ValueError for contradicting numbers.
        """
        if family.experts is None:
            return None
        if not values.get("enable_moe_block", True):
            return None
        for key in (*_COUNT_KEYS, *_TOP_KEYS, "moe_intermediate_size"):
            if key in values and values[key] is None:
                raise KeyError(key)
        if family.has_halves:
            return _of_kinds(values, family, family.experts)
        num_experts, step = _first(values, _COUNT_KEYS), _first(values, _STEP_KEYS, 1)
        num_layers = int(values["num_hidden_layers"])
        dense = {int(layer) for layer in values.get("mlp_only_layers") or ()}
        dense |= {*range(_first(values, _DENSE_KEYS, 0))}
        if (last := int(values.get("moe_layer_end_index", -1))) != -1:
            dense |= {*range(last + 1, num_layers)}
        if "mlp_layer_types" in values:
            dense |= _dense_layers(values["mlp_layer_types"], num_layers)
        if (sparse := values.get("moe_layers")) is not None:
            dense, step = {*range(num_layers)}.difference(sparse), 1
        layers = tuple(
            num_experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)
        )
        if not any(layers):
            return None
        width = int(values.get("moe_intermediate_size", values["intermediate_size"]))
        return ExpertConfig(
            num_experts=num_experts,
            routing=_routing(values, family, num_experts),
            intermediate_size=width,
            shared_intermediate_size=_shared_size(values, width),
            shared_is_gated=bool(family.experts.shared_gate),
            layers=layers,
            is_beside=family.experts_beside or family.experts.beside_dense,
        )


def _of_kinds(values: Mapping[str, Any], family: Family, names: ExpertNames) -> ExpertConfig | None:
    """Of layers that have experts and nothing else, by their kinds (Nemotron-H)."""
    layers = tuple(kind == "moe" for kind in values["layer_types"])
    if not any(layers):
        return None
    num_experts = _first(values, _COUNT_KEYS)
    return ExpertConfig(
        num_experts=num_experts,
        routing=_routing(values, family, num_experts),
        intermediate_size=values["moe_intermediate_size"],
        shared_intermediate_size=values["moe_shared_expert_intermediate_size"],
        shared_is_gated=False,
        layers=layers,
        has_gates=bool(names.gate),
        latent_size=values["moe_latent_size"],
    )


def _routing(values: Mapping[str, Any], family: Family, num_experts: int) -> Routing:
    """Raises ValueError for numbers that do not fit the experts."""
    top_k = _first(values, _TOP_KEYS)
    if not 1 <= top_k <= num_experts:
        key = next(key for key in _TOP_KEYS if key in values)
        raise ValueError(f"{key} = {top_k}: 1 to {num_experts}, the number of experts, is accepted")
    routing = replace(
        family.routing,
        top_k=top_k,
        is_normalized=family.always_normalized or bool(values.get("norm_topk_prob", False)),
        scale=float(values.get("routed_scaling_factor", 1.0)),
    )
    routing = _with_groups(routing, values)
    _check_groups(routing, num_experts)
    return routing


def _first(values: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    """The number that a family has by one of these names."""
    number = next((values[key] for key in keys if key in values), default)
    assert number is not None, keys
    return int(number)


def _shared_size(values: Mapping[str, Any], width: int) -> int | None:
    if any(key in values for key in _SHARED_KEYS):
        return width * _first(values, _SHARED_KEYS) or None
    is_as_wide = any(key in values for key in _SAME_SIZE_KEYS)
    size = width if is_as_wide else values.get("shared_expert_intermediate_size")
    return None if size is None else int(size)


def _dense_layers(kinds: Sequence[str] | None, num_layers: int) -> set[int]:
    """Those that `mlp_layer_types` names so; of null, the first one. Raises ValueError for other kinds."""
    kinds = kinds or ["dense", *["sparse"] * (num_layers - 1)]
    if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types = {kinds}: 'dense' or 'sparse' for each of {num_layers} layers is needed")
    return {layer for layer, kind in enumerate(kinds) if kind == "dense"}


def _with_groups(routing: Routing, values: Mapping[str, Any]) -> Routing:
    """DeepSeek V2 says by `topk_method` whether there are any groups; others have no such choice."""
    method = values.get("topk_method")
    if method == "greedy":
        return routing
    if method not in (None, "group_limited_greedy"):
        raise ValueError(f"topk_method = {method!r} is not supported: 'greedy' and 'group_limited_greedy' are accepted")
    num_groups, top_groups = values.get("n_group", 1), values.get("topk_group", 1)
    for key, number in (("n_group", num_groups), ("topk_group", top_groups)):
        if number is None:
            raise KeyError(key)
    best = routing.group_best if method is None else 1
    return replace(routing, num_groups=num_groups, top_groups=top_groups, group_best=best)


def _check_groups(routing: Routing, num_experts: int) -> None:
    """Raises ValueError for groups of which a row cannot choose its experts."""
    num_groups, top_groups = routing.num_groups, routing.top_groups
    if num_groups == 1 and top_groups == 1:
        return
    size = num_experts // num_groups
    if num_experts % num_groups or size < routing.group_best:
        each = "two experts" if routing.group_best == 2 else "an expert"
        raise ValueError(
            f"n_group = {num_groups}: a divisor of {num_experts}, the number of experts, with {each} in each "
            "group at least, is needed"
        )
    if not top_groups <= num_groups or top_groups * size < routing.top_k:
        raise ValueError(
            f"topk_group = {top_groups}: up to n_group = {num_groups}, and groups that have num_experts_per_tok = "
            f"{routing.top_k} experts at least, are needed"
        )
