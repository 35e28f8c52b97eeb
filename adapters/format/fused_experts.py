"""LoRA of a layer's experts as PEFT saves it with transformers 5, where all experts of a layer are one parameter.

`target_parameters` names `mlp.experts.gate_up_proj` `[num_experts, 2 * width, hidden]` or `mlp.experts.down_proj`
`[num_experts, hidden, width]`. PEFT keeps one pair of matrices for such a parameter (its `ParamWrapper`): A
`[num_experts * rank, in]`, expert after expert, and B `[out, rank * num_experts]`, rank after rank. So expert e has
rows `e * rank` and so on of A, and every `num_experts`-th column of B from the e-th on. The outputs of gate_up_proj
are those of the gate, then those of the up projection, which share A.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..adapter import BaseShape
from ..errors import AdapterInvalid, listed, shown
from .content import LoraMatrices
from .patterns import PatternTime
from .peft import TENSORS_FILE, LoraConfig
from .plain_names import named_in, names_found
from .targets import Target, by_pattern
from .tensor_file import Tensor

# The parameters of a layer's experts in the order in which PEFT wraps them, and the projections that each one holds.
FUSED_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
_PATH = "mlp.experts"  # of every family, Mixtral's included
_TENSOR_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.mlp\.experts(?P<inner>\.base_layer)?"
    r"\.lora_(?P<letter>[AB])(?:\.[^.]+)?\.weight"
)


@dataclass(frozen=True)
class FusedName:
    """What a tensor's name says. Where both parameters of a layer have LoRA, the first one's is the inner one."""

    layer: int
    is_inner: bool
    letter: str


def parse_fused_name(name: str) -> FusedName | None:
    """None: the name is not of a matrix of fused experts."""
    match = _TENSOR_NAME.fullmatch(name)
    return match and FusedName(int(match["layer"]), match["inner"] is not None, match["letter"])


def fused_tensor_name(layer: int, parameter: str, letter: str, targets: Mapping[tuple[int, str], Target]) -> str:
    """PEFT's name of a matrix. `targets`: all that the adapter has, by layer and parameter."""
    *_, outermost = (name for name in FUSED_PARAMETERS if (layer, name) in targets)
    inner = "" if parameter == outermost else ".base_layer"
    return f"base_model.model.model.layers.{layer}.{_PATH}{inner}.lora_{letter}.weight"


def resolve_parameters(
    config: LoraConfig, shape: BaseShape, time: PatternTime | None = None
) -> dict[tuple[int, str], Target]:
    """Rank and scaling of each (layer, parameter) that `target_parameters` names, by PEFT's own rules.

    These are: a whole name or a dotted suffix matches, and neither layers nor exclusions are checked. Raises
    AdapterInvalid for a name of anything else than fused experts of this base.
    """
    time = time or PatternTime()
    if not config.target_parameters:
        return {}
    layers = () if shape.experts is None else shape.experts.layers
    keys = {f"model.layers.{layer}.{_PATH}.{name}": (layer, name) for layer in layers for name in FUSED_PARAMETERS}
    known = names_found(keys, frozenset(config.target_parameters))
    for target in config.target_parameters:
        if target not in known:
            raise AdapterInvalid(f"target_parameters names {shown(target)}: {_accepted(shape)}")
    targeted = named_in(keys, frozenset(config.target_parameters))
    ranks = by_pattern(config.rank_pattern, targeted, "rank_pattern", time)
    alphas = by_pattern(config.alpha_pattern, targeted, "alpha_pattern", time)
    found = {}
    for key in targeted:
        rank = int(ranks.get(key, config.r))
        found[keys[key]] = Target(rank, config.scaling(rank, alphas.get(key, config.lora_alpha)))
    return found


def match_fused_names(
    names: Iterable[str], targets: Mapping[tuple[int, str], Target]
) -> dict[tuple[int, str, str], str]:
    """The file's name for each (layer, parameter, letter).

    Raises AdapterInvalid for missing, extra and doubled ones.
    """
    expected = {
        fused_name: (layer, parameter, letter)
        for layer, parameter in targets
        for letter in ("A", "B")
        if (fused_name := parse_fused_name(fused_tensor_name(layer, parameter, letter, targets))) is not None
    }
    found: dict[tuple[int, str, str], str] = {}
    for name in names:
        key = None if (fused_name := parse_fused_name(name)) is None else expected.get(fused_name)
        if key is None:
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds {shown(name, 160)}, and target_parameters in adapter_config.json names no such "
                "parameter of experts"
            )
        if key in found:
            raise AdapterInvalid(f"{TENSORS_FILE} holds a matrix twice: as {found[key]} and as {shown(name, 160)}")
        found[key] = name
    missing = [fused_tensor_name(*key, targets) for key in expected.values() if key not in found]
    if missing:
        raise AdapterInvalid(f"{TENSORS_FILE} lacks tensors that adapter_config.json targets: {listed(missing)}")
    return found


def check_fused_shape(
    name: str, key: tuple[int, str, str], got: tuple[int, ...], target: Target, shape: BaseShape
) -> None:
    """Raises AdapterInvalid unless `got` is the shape of this matrix of (layer, parameter, letter)."""
    _, parameter, letter = key
    assert shape.experts is not None
    num_experts = shape.experts.num_experts
    num_in, num_out = _sides(parameter, shape)
    expected = (num_experts * target.rank, num_in) if letter == "A" else (num_out, target.rank * num_experts)
    if got != expected:
        raise AdapterInvalid(
            f"{name} has shape {list(got)}, expected {list(expected)}: adapter_config.json gives rank {target.rank} "
            f"for each of {num_experts} experts, and the base's {parameter} has {num_in} inputs and {num_out} outputs"
        )


def split_experts(
    layer: int, parameter: str, a: Tensor, b: Tensor, target: Target, shape: BaseShape
) -> dict[tuple[int, str], LoraMatrices]:
    """The matrices of each expert's projections, as views of `a` and `b`, by (layer, module)."""
    assert shape.experts is not None
    num_experts = shape.experts.num_experts
    by_expert = b.reshape(len(b), target.rank, num_experts)
    found = {}
    for expert in range(num_experts):
        own_a = a[expert * target.rank : (expert + 1) * target.rank]
        start = 0
        for name in FUSED_PARAMETERS[parameter]:
            stop = start + shape.modules[f"experts.{name}"][1]
            matrices = LoraMatrices(own_a, by_expert[start:stop, :, expert], target.scaling)
            found[layer, f"experts.{expert}.{name}"] = matrices
            start = stop
    return found


def _sides(parameter: str, shape: BaseShape) -> tuple[int, int]:
    """Inputs and outputs of one expert's part of a parameter."""
    projections = [shape.modules[f"experts.{name}"] for name in FUSED_PARAMETERS[parameter]]
    return projections[0][0], sum(num_out for _, num_out in projections)


def _accepted(shape: BaseShape) -> str:
    if shape.experts is None:
        return "this base has no experts; name modules in target_modules"
    accepted = " and ".join(f"{_PATH}.{name}" for name in FUSED_PARAMETERS)
    return f"{accepted} are accepted; name other modules in target_modules, LoRA of a router is not supported"
