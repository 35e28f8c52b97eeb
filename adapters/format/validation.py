"""Checks that an upload is an adapter that fits the base. Only JSON and safetensors are read, never pickle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..adapter import (
    EMBEDDING,
    END_MODULES,
    EXPERT_MODULES,
    HEAD,
    MODULES,
    OUTER,
    OUTER_MODULES,
    ROUTER,
    SHARED_MODULES,
    BaseShape,
    family_of_module,
)
from ..errors import AdapterInvalid, listed, quote
from .base_weights import BaseWeights
from .content import AdapterContent, LoraMatrices, ranks_over_layers
from .ends import changed_rows, gathered, match_end_tensors, vocabulary_problem
from .output_vectors import check_vectors, outputs_of, scaled_modules, source_digest
from .peft import (
    BEGINNING,
    ENDING,
    IA3,
    LAYER,
    LOHA,
    LOKR,
    LORA,
    TENSORS_FILE,
    TEXT_PREFIX,
    VERA,
    LoraConfig,
    foreign_feature,
    is_of_training,
    is_of_vision,
    module_prefix,
    parse_config,
    parse_end_name,
    parse_factor_name,
    parse_tensor_name,
    parse_vector_name,
    unwrapped,
)
from .products import SHARED, ProductMatrices, check_product, expected_tensors
from .score_head import check_head, head_names, read_head
from .targets import (
    HEAD_NAMES,
    PatternTime,
    Target,
    by_pattern,
    end_names,
    is_saved,
    module_keys,
    named_in,
    names_found,
    resolve_targets,
    ties_lora,
    unmatched,
    unmatched_layers,
)
from .tensor_file import MAX_HEADER_BYTES, Tensor, TensorFile

# LoRA of a layer's experts as PEFT saves it with transformers 5, where all experts of a layer are one parameter.
#
# `target_parameters` names `mlp.experts.gate_up_proj` `[num_experts, 2 * width, hidden]` or `mlp.experts.down_proj`
# `[num_experts, hidden, width]`. PEFT keeps one pair of matrices for such a parameter (its `ParamWrapper`): A
# `[num_experts * rank, in]`, expert after expert, and B `[out, rank * num_experts]`, rank after rank. So expert e has
# rows `e * rank` and so on of A, and every `num_experts`-th column of B from the e-th on. The outputs of gate_up_proj
# are those of the gate, then those of the up projection, which share A; in gpt-oss both take turns, and parameters are
# transposed, `[num_experts, in, out]`, which A and B are not.

_ROUTER_OF_PEFT = "gate.weight"  # that it writes for "all-linear", also where the router has another name (Hunyuan)
_TENSOR_NAME = re.compile(
    rf"{BEGINNING}{LAYER}(?:(?:mlp|feed_forward|block_sparse_moe|mixer)\.)?experts(?P<inner>\.base_layer)?{ENDING}"
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


def fused_tensor_name(
    layer: int, parameter: str, letter: str, targets: Mapping[tuple[int, str], Target], shape: BaseShape, prefix: str
) -> str:
    """PEFT's name of a matrix. `targets`: all that the adapter has, by layer and parameter."""
    assert shape.experts is not None
    *_, outermost = (name for name in shape.experts.fused if (layer, name) in targets)
    inner = "" if parameter == outermost else ".base_layer"
    return f"base_model.model.{prefix}layers.{layer}.{shape.experts.parameters}{inner}.lora_{letter}.weight"


def resolve_parameters(
    config: LoraConfig, shape: BaseShape, time: PatternTime | None = None, prefix: str = TEXT_PREFIX
) -> dict[tuple[int, str], Target]:
    """Rank and scaling of each (layer, parameter) that `target_parameters` names, by PEFT's own rules.

    The weight of a linear, such as that of a router, is the module's name, whose matrices are as those of LoRA on it.

    The rules are: a whole name or a dotted suffix matches, and neither layers nor exclusions are checked. Raises
    AdapterInvalid if no name matches anything. `prefix`: as for `resolve_targets`.
    """
    time = time or PatternTime()
    if not config.target_parameters:
        return {}
    keys = _parameter_keys(config, shape, prefix)
    targeted = named_in(keys, frozenset(config.target_parameters))
    if not targeted and not config.target_modules:
        raise AdapterInvalid(
            f"target_parameters = {listed([*config.target_parameters])} matches nothing: {_accepted(shape)}"
        )
    for end, name in end_names(config, shape, prefix).items():
        if f"{name}.weight" in targeted and (end == EMBEDDING or is_saved(config, name)):
            raise AdapterInvalid(
                f"target_parameters names {end}.weight"
                + (", and modules_to_save too" if is_saved(config, name) else "")
                + f": name {end} in target_modules"
            )
    ranks = by_pattern(config.rank_pattern, targeted, "rank_pattern", time)
    alphas = by_pattern(config.alpha_pattern, targeted, "alpha_pattern", time)
    targets = {}
    for key in targeted:
        rank = int(ranks.get(key, config.r))
        targets[keys[key]] = Target(rank, config.scaling(rank, alphas.get(key, config.lora_alpha)))
    return targets


def _parameter_keys(config: LoraConfig, shape: BaseShape, prefix: str) -> dict[str, tuple[int, str]]:
    """(layer, parameter) of all that `target_parameters` may name, by the name that it matches."""
    keys = {f"{key}.weight": module for key, module in module_keys(shape, prefix).items()}
    if shape.ends is not None:
        keys |= {f"{key}.weight": (OUTER, end) for end, key in end_names(config, shape, prefix).items()}
    if shape.experts is not None:
        keys |= {
            f"{prefix}layers.{layer}.{shape.experts.parameters}.{name}": (layer, name)
            for layer in shape.experts.layers
            for name in shape.experts.fused
        }
    return keys


def _unmatched(config: LoraConfig, shape: BaseShape, prefix: str) -> tuple[str, ...]:
    """Says which names in the config's lists are of nothing that the base has: nothing is trained there, as in PEFT."""
    names = frozenset(config.target_parameters) - {_ROUTER_OF_PEFT}
    parameters = sorted(names - names_found(_parameter_keys(config, shape, prefix), names))
    by_field = {
        "target_modules": unmatched(config, shape, prefix),
        "target_parameters": parameters,
        "layers_to_transform": [f"layer {layer}" for layer in unmatched_layers(config, shape)],
    }
    return tuple(
        f"{field} names {listed(names)}, which this base does not have: nothing is trained there"
        for field, names in by_field.items()
        if names
    )


def match_fused_names(
    names: Iterable[str], targets: Mapping[tuple[int, str], Target], shape: BaseShape, prefix: str = TEXT_PREFIX
) -> dict[tuple[int, str, str], str]:
    """The file's name for each (layer, parameter, letter).

    Raises AdapterInvalid for missing, extra and doubled ones.
    """
    expected = {
        fused_name: (layer, parameter, letter)
        for layer, parameter in targets
        for letter in ("A", "B")
        if (fused_name := parse_fused_name(fused_tensor_name(layer, parameter, letter, targets, shape, prefix)))
        is not None
    }
    names_by_key: dict[tuple[int, str, str], str] = {}
    for name in names:
        key = None if (fused_name := parse_fused_name(name)) is None else expected.get(fused_name)
        if key is None:
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds {quote(name, 160)}, and target_parameters in adapter_config.json names no such "
                "parameter of experts"
            )
        if key in names_by_key:
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds a matrix twice: as {names_by_key[key]} and as {quote(name, 160)}"
            )
        names_by_key[key] = name
    missing = [fused_tensor_name(*key, targets, shape, prefix) for key in expected.values() if key not in names_by_key]
    if missing:
        raise AdapterInvalid(f"{TENSORS_FILE} lacks tensors that adapter_config.json targets: {listed(missing)}")
    return names_by_key


def check_fused_shape(
    name: str, key: tuple[int, str, str], got: tuple[int, ...], target: Target, shape: BaseShape
) -> None:
    """Raises AdapterInvalid unless `got` is the shape of this matrix of (layer, parameter, letter)."""
    _, parameter, letter = key
    assert shape.experts is not None
    num_experts = shape.experts.num_experts
    num_in, num_out = _sides(parameter, shape)
    if shape.experts.swaps_sides:
        num_in, num_out = num_out, num_in
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
    names = shape.experts.fused[parameter]
    takes_turns = shape.experts.takes_turns and len(names) > 1
    matrices_by_module = {}
    for expert in range(num_experts):
        own_a, own_b = a[expert * target.rank : (expert + 1) * target.rank], by_expert[:, :, expert]
        if shape.experts.swaps_sides:
            own_a, own_b = own_b.T, own_a.T
        start = 0
        for place, name in enumerate(names):
            stop = start + shape.modules[f"experts.{name}"][1]
            rows = slice(place, None, len(names)) if takes_turns else slice(start, stop)
            matrices = LoraMatrices(own_a, own_b[rows], target.scaling)
            matrices_by_module[layer, f"experts.{expert}.{name}"] = matrices
            start = stop
    return matrices_by_module


def _sides(parameter: str, shape: BaseShape) -> tuple[int, int]:
    """Inputs and outputs of one expert's part of a parameter."""
    assert shape.experts is not None
    projections = [shape.modules[f"experts.{name}"] for name in shape.experts.fused[parameter]]
    return projections[0][0], sum(num_out for _, num_out in projections)


def _accepted(shape: BaseShape) -> str:
    linears = f"weights of linears such as {shape.path(shape.names[0])}.weight"
    if shape.experts is None:
        return f"{linears} are accepted"
    of_experts = ", ".join(f"{shape.experts.parameters}.{name}" for name in shape.experts.fused)
    return f"{of_experts}, {shape.path(ROUTER)}.weight and {linears} are accepted"


_HEADER_BYTES_PER_TENSOR = 512  # PEFT's take about 200, with the longest names
_FIXED_HEADER_BYTES = 64 << 10  # of metadata
_Key = tuple[int, str, str]  # layer, module, letter


def validate(
    config: bytes,
    tensors: Path,
    shape: BaseShape,
    check_ranks: Callable[[Mapping[str, int]], None] = lambda module_ranks: None,
    base: BaseWeights | None = None,
    scratch: Path | None = None,
) -> AdapterContent:
    """Checks and returns the adapter in the two files. Its tensors stay memory-mapped from the file `tensors`.

    `check_ranks` gets its `module_ranks` before a tensor is read, and may raise; those of rows of tokens it gets in a
    second call, once it is known which are not the base's. Raises AdapterInvalid, which says what is wrong and what is
    accepted, unless the file has exactly the tensors that the config targets, and these fit the base and are finite. Of
    a base that takes pictures too, LoRA of what reads them is left out: after training on text alone its B is 0; where
    it is not, the content's `left_out` says so. `base`: whose weights decide what DoRA and trained biases compute, and
    which rows of an embedding are the adapter's own; without it the former are refused, and all rows are. `scratch`: a
    folder for files without a name, that of `tensors` by default.
    """
    parsed = parse_config(config)
    time = PatternTime()
    file = TensorFile(tensors, TENSORS_FILE, max_header_bytes=max_header_bytes(shape), name_of=unwrapped)
    prefix = module_prefix(file.entries)
    trained = _as_trained(shape, file.entries)
    targets = resolve_targets(parsed, trained, time, prefix)
    parameters = resolve_parameters(parsed, shape, time, prefix)
    _check_disjoint(targets, parameters, shape)
    fused = {} if shape.experts is None else shape.experts.fused
    targets |= {key: parameters.pop(key) for key in [*parameters] if key[1] not in fused}
    of_vision = {name for name in file.entries if shape.is_wrapped and is_of_vision(name)}
    of_head = head_names(file.entries) if parsed.is_classifier else []
    check_head(of_head, file.entries, shape, is_named=parsed.names_head)
    elsewhere = of_vision.union(of_head)
    of_text = [name for name in file.entries if name not in elsewhere and not is_of_training(name)]
    end_tensors = match_end_tensors(filter(parse_end_name, of_text), parsed, targets, file, shape, prefix)
    of_text = [name for name in of_text if parse_end_name(name) is None]
    _check_end_targets(parsed, targets)
    fused_names = match_fused_names(
        [name for name in of_text if parse_fused_name(name) is not None], parameters, shape, prefix
    )
    vectors = _match_vectors(of_text, shape)
    vector_shapes = {key: file.entries[name].shape for key, name in vectors.items()}
    if parameters and (parsed.use_dora or parsed.lora_bias):
        raise AdapterInvalid("target_parameters have no DoRA and no lora_bias in PEFT: name linears in target_modules")
    check_vectors(vectors, vector_shapes, parsed, targets, shape)
    factors: dict[tuple[int, str], dict[str, str]] = {}  # names in the file by PEFT's, where LoRA is a product
    if parsed.kind in (VERA, LOHA, LOKR):
        factors = _match_factors(of_text, targets, parsed.kind, shape)
        ranks = _product_ranks(factors, targets, parsed.kind, file, shape)
        targets = {key: replace(target, rank=ranks[key]) for key, target in targets.items()}
    plain = targets if parsed.kind == LORA else {}
    matched = {*vectors.values(), *(name for each in factors.values() for name in each.values())}
    matched.update(filter(parse_fused_name, of_text))
    matrix_names = [name for name in of_text if name not in matched]
    names = _match_names(matrix_names, plain, shape, prefix)
    for key, name in names.items():
        _check_shape(name, key, file.entries[name].shape, targets, shape, parsed.num_blocks)
    for key, name in fused_names.items():
        check_fused_shape(name, key, file.entries[name].shape, parameters[key[:2]], shape)
    num_experts = 0 if shape.experts is None else shape.experts.num_experts
    scaled = {module for _, module in scaled_modules(vector_shapes, shape)}
    ranks_of_parts = _ranks({} if parsed.kind == IA3 else targets, parameters, shape)
    check_ranks(ranks_over_layers(ranks_of_parts, num_experts, scaled))
    rows = changed_rows(end_tensors, file, shape, base)
    if rows:
        _check_plain(parsed, END_MODULES)
        num_rows = {end: len(each.token_ids) for end, each in rows.items()}
        check_ranks(ranks_over_layers(ranks_of_parts, num_experts, scaled, num_rows))
    left_out = _vision_problem(file, of_vision)
    arrays = {key: _whole(file.finite(name), _expected(key, targets, shape)) for key, name in names.items()}
    found_fused = {key: file.finite(name) for key, name in fused_names.items()}
    vector_arrays = {key: file.finite(name) for key, name in vectors.items()}
    loras = {key: LoraMatrices(arrays[*key, "A"], arrays[*key, "B"], each.scaling) for key, each in plain.items()}
    tie_warnings: tuple[str, ...] = ()
    if ties_lora(parsed, shape, prefix, time):
        loras[OUTER, EMBEDDING], tie_warnings = _tied(loras[OUTER, EMBEDDING], loras[OUTER, HEAD])
    outputs = outputs_of(vector_arrays, loras, shape, base)
    wholes: dict[tuple[int, str], LoraMatrices | ProductMatrices] = {**loras}
    wholes |= _products(factors, targets, parsed.kind, file, shape)
    matrices: dict[tuple[int, str], LoraMatrices | ProductMatrices] = {}
    for (layer, module), whole in wholes.items():
        if module in END_MODULES:
            matrices[layer, module] = whole
            continue
        if layer == OUTER:
            matrices |= _by_layer(module, whole, shape)
            continue
        start = 0
        for part in shape.fused.get(module, (module,)):  # modules that are one share A, and each has its rows of B
            stop = start + _sides_of(shape, layer, part)[1]
            matrices[layer, part] = whole.outputs(start, stop)
            start = stop
    for (layer, name), target in parameters.items():
        matrices |= split_experts(
            layer, name, found_fused[layer, name, "A"], found_fused[layer, name, "B"], target, shape
        )
    # Of a base that takes pictures too they may be of vision.
    warnings = () if shape.is_wrapped else _unmatched(parsed, trained, prefix)
    warnings += (*parsed.unknown.warnings, *tie_warnings)
    return AdapterContent(
        matrices,
        num_experts,
        left_out,
        parsed.unknown.problem,
        warnings,
        parsed.invocation_token_ids,
        outputs,
        source_digest(vector_arrays),
        gathered(rows, scratch or tensors.parent),
        head=read_head(file, of_head),
    )


def _tied(embedding: LoraMatrices, head: LoraMatrices) -> tuple[LoraMatrices, tuple[str, ...]]:
    """The embedding's LoRA where `ensure_weight_tying` is set: PEFT loads the head's in its place. And warnings.

    PEFT ties them once, and they come apart in training where the model is moved to a device or cast afterwards.
    """
    tied = LoraMatrices(head.b.T, head.a.T, embedding.scaling)
    pairs = (*zip(embedding.a, tied.a, strict=True), *zip(embedding.b.T, tied.b.T, strict=True))
    if all(np.array_equal(row, tied_row) for row, tied_row in pairs):
        return tied, ()
    return tied, (
        "ensure_weight_tying is set, and the LoRA of embed_tokens is not that of lm_head, as it was in training: PEFT "
        "loads that of lm_head for both, and so does motet",
    )


def _check_end_targets(config: LoraConfig, targets: Iterable[tuple[int, str]]) -> None:
    ends = [module for _, module in targets if module in END_MODULES]
    if ends:
        _check_plain(config, ends)
    if ends and config.kind != LORA:
        raise AdapterInvalid(f"peft_type {config.kind} of {ends[0]} is not supported: LORA is")


def _check_plain(config: LoraConfig, ends: Sequence[str]) -> None:
    if config.invocation_token_ids:
        raise AdapterInvalid(
            f"alora_invocation_tokens is set, and {' or '.join(ends)} is trained, too, which is not supported: an "
            "activated LoRA leaves what stands before its invocation to the base"
        )


def _by_layer(
    module: str, whole: LoraMatrices | ProductMatrices, shape: BaseShape
) -> dict[tuple[int, str], LoraMatrices | ProductMatrices]:
    """Each layer's part of a module outside of the layers: they share A, and each has its rows of B."""
    num_out = shape.modules[module][1]
    return {(layer, module): whole.outputs(layer * num_out, (layer + 1) * num_out) for layer in range(shape.num_layers)}


def _match_factors(
    tensor_names: Iterable[str], targets: Mapping[tuple[int, str], Target], kind: str, shape: BaseShape
) -> dict[tuple[int, str], dict[str, str]]:
    """The file's name for each tensor of each target, by PEFT's name, those that all share included.

    Raises AdapterInvalid for missing, extra and doubled ones.
    """
    factors: dict[tuple[int, str], dict[str, str]] = {key: {} for key in targets}
    shared: dict[str, str] = {}
    for name in tensor_names:
        for of_all, shared_name in SHARED.items() if kind == VERA else ():
            if name == shared_name or name.startswith(f"{shared_name}."):
                shared[of_all] = name
        key = parse_factor_name(name, shape.modules_by_path)
        if key is None:
            continue
        layer, module, factor = key
        names = factors.get((layer, module), {})
        if (layer, module) not in targets or factor not in expected_tensors(kind, {factor, *names}):
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds {quote(name, 160)}, which adapter_config.json (peft_type {kind}) does not target"
            )
        if names.setdefault(factor, name) != name:
            raise AdapterInvalid(f"{TENSORS_FILE} holds a tensor twice: as {names[factor]} and as {quote(name, 160)}")
    if kind == VERA and len(shared) < len(SHARED):
        raise AdapterInvalid(
            f"{TENSORS_FILE} lacks {' or '.join(SHARED.values())}, which all modules share: train and save it with "
            "save_projection=True"
        )
    missing = list[str]()
    for (layer, module), names in factors.items():
        path = shape.path(module)
        if family_of_module(module) in EXPERT_MODULES:
            raise AdapterInvalid(f"peft_type {kind} of {path} is not supported: of experts LORA is")
        lacking = [factor for factor in expected_tensors(kind, names) if factor not in names]
        missing += [f"layers.{layer}.{path}.{factor}" for factor in lacking]
        names |= shared
    if missing:
        raise AdapterInvalid(f"{TENSORS_FILE} lacks tensors that adapter_config.json targets: {listed(missing)}")
    return factors


def _product_ranks(
    factors: Mapping[tuple[int, str], Mapping[str, str]],
    targets: Mapping[tuple[int, str], Target],
    kind: str,
    file: TensorFile,
    shape: BaseShape,
) -> dict[tuple[int, str], int]:
    """The rank of each target as LoRA. Raises AdapterInvalid for tensors that do not fit."""
    ranks = {}
    for (layer, module), names in factors.items():
        shapes = {key: file.entries[name].shape for key, name in names.items()}
        where = f"layers.{layer}.{shape.path(module)}"
        sides = _sides_of(shape, layer, module)
        ranks[layer, module] = check_product(kind, shapes, where, targets[layer, module].rank, *sides)
    return ranks


def _products(
    factors: Mapping[tuple[int, str], Mapping[str, str]],
    targets: Mapping[tuple[int, str], Target],
    kind: str,
    file: TensorFile,
    shape: BaseShape,
) -> dict[tuple[int, str], ProductMatrices]:
    arrays = {name: file.finite(name) for name in {name for names in factors.values() for name in names.values()}}
    return {
        key: ProductMatrices(
            kind,
            {factor: arrays[name] for factor, name in names.items()},
            *_sides_of(shape, *key),
            targets[key].scaling,
        )
        for key, names in factors.items()
    }


def _as_trained(shape: BaseShape, tensor_names: Iterable[str]) -> BaseShape:
    """The shape without modules of experts, where a file has tensors of the layers' other MLPs alone.

    With transformers 5 experts are parameters, and names such as "gate_proj" in `target_modules` are not theirs.
    """
    if shape.experts is None or shape.experts.are_parameters:
        return shape
    parsers = (parse_tensor_name, parse_vector_name, parse_factor_name)
    keys = (parse(name, shape.modules_by_path) for name in tensor_names for parse in parsers)
    modules = {family_of_module(key[1]) for key in keys if key is not None}
    if not modules.isdisjoint(EXPERT_MODULES) or modules.isdisjoint((*MODULES[4:], *SHARED_MODULES)):
        return shape
    return replace(shape, experts=replace(shape.experts, are_parameters=True))


def max_header_bytes(shape: BaseShape) -> int:
    """The longest header that is accepted, from the number of tensors that an adapter of this base can have."""
    num_matrices = shape.num_matrices * (2 if shape.is_wrapped else 1)  # those of vision are fewer than of text
    return min(_FIXED_HEADER_BYTES + num_matrices * _HEADER_BYTES_PER_TENSOR, MAX_HEADER_BYTES)


def _ranks(
    targets: Mapping[tuple[int, str], Target], parameters: Mapping[tuple[int, str], Target], shape: BaseShape
) -> dict[tuple[int, str], int]:
    """Ranks by (layer, module); each part of what is fused has its own entry."""
    num_experts = 0 if shape.experts is None else shape.experts.num_experts
    ranks = {
        (layer, part): target.rank
        for (layer, module), target in targets.items()
        for part in shape.fused.get(module, (module,))
    }
    fused = {} if shape.experts is None else shape.experts.fused
    for (layer, parameter), target in parameters.items():
        for name in fused[parameter]:
            ranks |= {(layer, f"experts.{expert}.{name}"): target.rank for expert in range(num_experts)}
    return ranks


def _check_disjoint(
    targets: Mapping[tuple[int, str], Target], parameters: Mapping[tuple[int, str], Target], shape: BaseShape
) -> None:
    by_parameter = {} if shape.experts is None else shape.experts.fused
    fused = {
        (layer, f"experts.{projection}"): name
        for layer, name in parameters
        for projection in by_parameter.get(name, ())
    }
    if doubled := sorted(targets.keys() & parameters.keys()):
        layer, module = doubled[0]
        raise AdapterInvalid(
            f"target_modules and target_parameters both name {shape.path(module)} of layer {layer}: name it in one "
            "of the two, as PEFT does"
        )
    for layer, module in targets:
        if (layer, family_of_module(module)) in fused:
            raise AdapterInvalid(
                f"target_modules and target_parameters both name the experts of layer {layer} ({module} and "
                f"{fused[layer, family_of_module(module)]}): name them in one of the two, as PEFT does"
            )


def _vision_problem(file: TensorFile, names: Iterable[str]) -> str:
    """Which tensor changes how pictures are read; empty: all are LoRA whose B is 0, and change nothing."""
    for name in sorted(names):
        if ".lora_A." not in name and (".lora_B." not in name or file.tensor(name).any()):
            return (
                f"{TENSORS_FILE} holds {quote(name, 160)}, which changes how the base reads pictures, and only its "
                "text model is served: train with target_modules that match modules of language_model alone"
            )
    return ""


def _match_names(
    tensor_names: Iterable[str], targets: Mapping[tuple[int, str], Target], shape: BaseShape, prefix: str
) -> dict[_Key, str]:
    """The file's name for each matrix. Raises AdapterInvalid for missing, extra and duplicate ones."""
    names: dict[_Key, str] = {}
    modules = {*shape.names, *(END_MODULES if shape.ends is not None else ())}
    for name in tensor_names:
        key = parse_tensor_name(name, shape.modules_by_path)
        entry = "" if key is None else family_of_module(key[1])
        is_of_base = key is not None and entry in modules and _begins(name, shape, prefix)
        if key is None or not is_of_base or (entry in EXPERT_MODULES and f".{shape.path(key[1])}." not in name):
            _refuse_tensor(name, shape, prefix)
        elif key in names:
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds a matrix twice: as {quote(names[key], 160)} and as {quote(name, 160)}"
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
        _name_in(shape, prefix, layer, module, letter)
        for layer, module in targets
        for letter in ("A", "B")
        if (layer, module, letter) not in names
    ]
    if missing:
        raise AdapterInvalid(f"{TENSORS_FILE} lacks tensors that adapter_config.json targets: {listed(missing)}")
    return names


def _match_vectors(tensor_names: Iterable[str], shape: BaseShape) -> dict[_Key, str]:
    """The file's name for each vector of outputs. Raises AdapterInvalid for a vector that is there twice."""
    names: dict[_Key, str] = {}
    for name in tensor_names:
        key = parse_vector_name(name, shape.modules_by_path)
        if key is not None and names.setdefault(key, name) != name:
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds a vector twice: as {quote(names[key], 160)} and as {quote(name, 160)}"
            )
    return names


def _begins(name: str, shape: BaseShape, prefix: str) -> bool:
    """The tensor's module begins with `prefix`, or without any, as where a base was loaded without its head."""
    parts = ("layers.", *(f"{module}." for module in (*OUTER_MODULES, shape.path(EMBEDDING))))
    begins = [f"base_model.model.{before}{part}" for before in (prefix, "") for part in parts]
    return name.startswith((*begins, f"base_model.model.{HEAD_NAMES.get(prefix, HEAD)}."))


def _name_in(shape: BaseShape, prefix: str, layer: int, module: str, letter: str) -> str:
    """PEFT's name of a matrix, for messages."""
    if module in END_MODULES:
        if module == HEAD:
            return f"base_model.model.{HEAD_NAMES[prefix]}.lora_{letter}.weight"
        return f"base_model.model.{prefix}{shape.path(module)}.lora_embedding_{letter}"
    place = "" if layer == OUTER else f"layers.{layer}."
    return f"base_model.model.{prefix}{place}{shape.path(module)}.lora_{letter}.weight"


def _refuse_tensor(name: str, shape: BaseShape, prefix: str) -> None:
    feature = foreign_feature(name)
    if feature is not None:
        raise AdapterInvalid(
            f"{TENSORS_FILE} holds {quote(name, 160)}: {feature} is not supported, "
            f"only LoRA of {', '.join(shape.target_names)} is"
        )
    raise AdapterInvalid(
        f"{TENSORS_FILE} holds {quote(name, 160)}, which is not a LoRA matrix of this base: names like "
        f"{_name_in(shape, prefix, 0, shape.names[0], 'A')} of {', '.join(shape.target_names)} are accepted"
    )


def _expected(key: _Key, targets: Mapping[tuple[int, str], Target], shape: BaseShape) -> tuple[int, int]:
    """The shape of a matrix."""
    layer, module, letter = key
    num_in, num_out = _sides_of(shape, layer, module)
    rank = targets[layer, module].rank
    return (rank, num_in) if letter == "A" else (num_out, rank)


def _whole(tensor: Tensor, expected: tuple[int, ...]) -> Tensor:
    """The matrix of which a block-diagonal one has the blocks, one below the other; any other one as it is."""
    if tensor.shape == expected:
        return tensor
    whole, num_blocks = np.zeros(expected, tensor.dtype), expected[1] // tensor.shape[1]
    height, width = tensor.shape[0] // num_blocks, tensor.shape[1]
    for block in range(num_blocks):
        rows = slice(block * height, (block + 1) * height)
        whole[rows, block * width : (block + 1) * width] = tensor[rows]
    return whole


def _check_shape(
    name: str,
    key: _Key,
    got: tuple[int, ...],
    targets: Mapping[tuple[int, str], Target],
    shape: BaseShape,
    num_blocks: int,
) -> None:
    """`num_blocks`: of a matrix that is block-diagonal, of which only the blocks are stored."""
    layer, module, letter = key
    rank, expected = targets[layer, module].rank, _expected(key, targets, shape)
    num_in, num_out = _sides_of(shape, layer, module)
    are_blocks = got == (expected[0], expected[1] // num_blocks) and not any(side % num_blocks for side in expected)
    if got != expected and not are_blocks:
        problem = ""
        if shape.ends is not None and len(got) == 2 and (module, letter) in ((EMBEDDING, "A"), (HEAD, "B")):
            problem = vocabulary_problem(got[module == EMBEDDING], shape.ends)
        raise AdapterInvalid(
            f"{name} has shape {list(got)}, expected {list(expected)}: adapter_config.json gives rank {rank}, and the "
            f"base's {module} has {num_in} inputs and {num_out} outputs{problem}"
        )


def _sides_of(shape: BaseShape, layer: int, module: str) -> tuple[int, int]:
    sides = shape.sides(layer, module)
    assert sides is not None, "only targets of this base"
    return sides
