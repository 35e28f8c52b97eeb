"""Checks that an upload is a plain LoRA that fits the base. Only JSON and safetensors are read, never pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ..adapter import BaseShape, family_of_module
from ..errors import AdapterInvalid, listed, shown
from .content import AdapterContent, LoraMatrices, ranks_over_layers
from .fused_experts import (
    FUSED_PARAMETERS,
    check_fused_shape,
    match_fused_names,
    parse_fused_name,
    resolve_parameters,
    split_experts,
)
from .patterns import PatternTime
from .peft import TENSORS_FILE, foreign_feature, parse_config, parse_tensor_name, tensor_name
from .targets import Target, resolve_targets
from .tensor_file import MAX_HEADER_BYTES, Tensor, TensorFile, is_finite

_HEADER_BYTES_PER_TENSOR = 512  # PEFT's take about 200, with the longest names
_FIXED_HEADER_BYTES = 64 << 10  # of metadata
_Key = tuple[int, str, str]  # layer, module, letter


def validate(
    config: bytes,
    tensors: Path,
    shape: BaseShape,
    check_ranks: Callable[[Mapping[str, int]], None] = lambda module_ranks: None,
) -> AdapterContent:
    """Checks and returns the adapter in the two files. Its tensors stay memory-mapped from the file `tensors`.

    `check_ranks` gets its `module_ranks` before a tensor is read, and may raise. Raises AdapterInvalid, which says what
    is wrong and what is accepted, unless the file has exactly the tensors that the config targets, and these fit the
    base and are finite.
    """
    parsed = parse_config(config)
    time = PatternTime()
    targets, parameters = resolve_targets(parsed, shape, time), resolve_parameters(parsed, shape, time)
    _check_disjoint(targets, parameters)
    file = TensorFile(tensors, TENSORS_FILE, max_header_bytes=max_header_bytes(shape))
    fused_names = match_fused_names([name for name in file.entries if parse_fused_name(name) is not None], parameters)
    names = _match_names([name for name in file.entries if parse_fused_name(name) is None], targets, shape)
    for key, name in names.items():
        _check_shape(name, key, file.entries[name].shape, targets, shape)
    for key, name in fused_names.items():
        check_fused_shape(name, key, file.entries[name].shape, parameters[key[:2]], shape)
    num_experts = 0 if shape.experts is None else shape.experts.num_experts
    check_ranks(ranks_over_layers(_ranks(targets, parameters, num_experts), num_experts))
    found = {key: _finite(file, name) for key, name in names.items()}
    found_fused = {key: _finite(file, name) for key, name in fused_names.items()}
    matrices = {
        (layer, module): LoraMatrices(found[layer, module, "A"], found[layer, module, "B"], target.scaling)
        for (layer, module), target in targets.items()
    }
    for (layer, name), target in parameters.items():
        matrices |= split_experts(
            layer, name, found_fused[layer, name, "A"], found_fused[layer, name, "B"], target, shape
        )
    return AdapterContent(matrices, num_experts)


def max_header_bytes(shape: BaseShape) -> int:
    """The longest header that is accepted, from the number of tensors that an adapter of this base can have."""
    return min(_FIXED_HEADER_BYTES + shape.num_matrices * _HEADER_BYTES_PER_TENSOR, MAX_HEADER_BYTES)


def _ranks(
    targets: Mapping[tuple[int, str], Target], parameters: Mapping[tuple[int, str], Target], num_experts: int
) -> dict[tuple[int, str], int]:
    """Ranks by (layer, module); each fused expert has its own entry."""
    ranks = {key: target.rank for key, target in targets.items()}
    for (layer, parameter), target in parameters.items():
        for name in FUSED_PARAMETERS[parameter]:
            ranks |= {(layer, f"experts.{expert}.{name}"): target.rank for expert in range(num_experts)}
    return ranks


def _check_disjoint(targets: Mapping[tuple[int, str], Target], parameters: Mapping[tuple[int, str], Target]) -> None:
    fused = {(layer, f"experts.{own}"): name for layer, name in parameters for own in FUSED_PARAMETERS[name]}
    for layer, module in targets:
        if (layer, family_of_module(module)) in fused:
            raise AdapterInvalid(
                f"target_modules and target_parameters both name the experts of layer {layer} ({module} and "
                f"{fused[layer, family_of_module(module)]}): name them in one of the two, as PEFT does"
            )


def _match_names(found: Iterable[str], targets: Mapping[tuple[int, str], Target], shape: BaseShape) -> dict[_Key, str]:
    """The file's name for each matrix. Raises AdapterInvalid for missing, extra and duplicate ones."""
    names: dict[_Key, str] = {}
    for name in found:
        key = parse_tensor_name(name)
        if key is None or family_of_module(key[1]) not in shape.modules or f".{shape.path(key[1])}." not in name:
            _refuse_tensor(name, shape)
        elif key in names:
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds a matrix twice: as {shown(names[key], 160)} and as {shown(name, 160)}"
            )
        else:
            names[key] = name
    beyond = [name for key, name in names.items() if key[0] >= shape.num_layers]
    if beyond:
        raise AdapterInvalid(
            f"{TENSORS_FILE} holds tensors of layers that the base does not have, its {shape.num_layers} layers "
            f"are 0 to {shape.num_layers - 1}: {listed(beyond)}"
        )
    extra = [name for key, name in names.items() if key[:2] not in targets]
    if extra:
        raise AdapterInvalid(f"{TENSORS_FILE} holds tensors that adapter_config.json does not target: {listed(extra)}")
    missing = [
        tensor_name(layer, module, letter)
        for layer, module in targets
        for letter in ("A", "B")
        if (layer, module, letter) not in names
    ]
    if missing:
        raise AdapterInvalid(f"{TENSORS_FILE} lacks tensors that adapter_config.json targets: {listed(missing)}")
    return names


def _refuse_tensor(name: str, shape: BaseShape) -> None:
    feature = foreign_feature(name)
    if feature is not None:
        raise AdapterInvalid(
            f"{TENSORS_FILE} holds {shown(name, 160)}: {feature} is not supported, "
            f"only plain LoRA of {', '.join(shape.modules)} is"
        )
    raise AdapterInvalid(
        f"{TENSORS_FILE} holds {shown(name, 160)}, which is not a LoRA matrix of this base: names like "
        f"{tensor_name(0, 'q_proj', 'A')} of {', '.join(shape.modules)} are accepted"
    )


def _check_shape(
    name: str, key: _Key, got: tuple[int, ...], targets: Mapping[tuple[int, str], Target], shape: BaseShape
) -> None:
    layer, module, letter = key
    rank = targets[layer, module].rank
    num_in, num_out = shape.modules[family_of_module(module)]
    expected = (rank, num_in) if letter == "A" else (num_out, rank)
    if got != expected:
        raise AdapterInvalid(
            f"{name} has shape {list(got)}, expected {list(expected)}: adapter_config.json gives rank {rank}, and the "
            f"base's {module} has {num_in} inputs and {num_out} outputs"
        )


def _finite(file: TensorFile, name: str) -> Tensor:
    tensor = file.tensor(name)
    if not is_finite(tensor):
        raise AdapterInvalid(f"{name} holds NaN or infinity: only finite numbers are accepted")
    return tensor
