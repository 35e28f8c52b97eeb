"""Which modules of a base a LoRA config targets, by PEFT's own rules.

The rules are those of PEFT's `check_target_module_exists`, `get_pattern_key` and `all-linear`: a list matches names and
dotted suffixes, a string is a regular expression for the whole name, and the first pattern that matches decides a
module's rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..adapter import BaseShape
from ..errors import AdapterInvalid, shown
from .patterns import PatternTime, first_matches, first_names
from .peft import LoraConfig
from .plain_names import named_in, names_found

_ALL_LINEAR = "all-linear"
_OTHER_MODULES = ("model.embed_tokens", "lm_head")  # PEFT could target them; motet cannot


@dataclass(frozen=True)
class Target:
    """What a config says of one module of one layer."""

    rank: int
    scaling: float


def resolve_targets(
    config: LoraConfig, shape: BaseShape, time: PatternTime | None = None
) -> dict[tuple[int, str], Target]:
    """Rank and scaling of each (layer, module) that the config targets. Raises AdapterInvalid for a wrong config.

    There are none where `target_modules` is empty, which a config with `target_parameters` may have. `time`: for its
    regular expressions.
    """
    time = time or PatternTime()
    if config.target_parameters and not config.target_modules:
        return {}
    keys = {
        f"model.layers.{layer}.{shape.path(module)}": (layer, module)
        for layer in range(shape.num_layers)
        for entry in shape.modules
        for module in shape.members(entry)
        if shape.has(layer, module)
    }
    _check_against_base(config, shape, keys)
    targeted = _targeted(config, [*keys, *_OTHER_MODULES], time)
    for other in _OTHER_MODULES:
        if other in targeted:
            raise AdapterInvalid(
                f"target_modules includes {other.removeprefix('model.')}: LoRA of embeddings and of the output layer "
                f"is not supported, {', '.join(shape.modules)} are"
            )
    if not targeted and not config.target_parameters:
        raise AdapterInvalid(f"target_modules = {shown(config.target_modules)} matches no module of the base")
    ranks = by_pattern(config.rank_pattern, targeted, "rank_pattern", time)
    alphas = by_pattern(config.alpha_pattern, targeted, "alpha_pattern", time)
    found = {}
    for key in targeted:
        rank = config.r if (own := ranks.get(key)) is None else int(own)
        found[keys[key]] = Target(rank, config.scaling(rank, alphas.get(key, config.lora_alpha)))
    return found


def _check_against_base(config: LoraConfig, shape: BaseShape, keys: Mapping[str, tuple[int, str]]) -> None:
    if not config.target_modules:
        raise AdapterInvalid(f"target_modules is missing: name some of {', '.join(shape.modules)}")
    for layer in config.layers_to_transform:
        if not 0 <= layer < shape.num_layers:
            raise AdapterInvalid(
                f"layers_to_transform names layer {layer}: the base has layers 0 to {shape.num_layers - 1}"
            )
    if isinstance(config.target_modules, str):
        if config.layers_to_transform:
            raise AdapterInvalid("layers_to_transform needs target_modules to be a list, as in PEFT")
        return
    known = names_found([*keys, *_OTHER_MODULES], frozenset(config.target_modules))
    for target in config.target_modules:
        if target not in known:
            raise AdapterInvalid(
                f"target_modules names {shown(target)}, which adapters of this base cannot have: "
                f"{', '.join(shape.modules)} are accepted"
            )


def _targeted(config: LoraConfig, keys: Sequence[str], time: PatternTime) -> list[str]:
    """The keys that the config targets, in order."""
    targets, excluded = config.target_modules, config.exclude_modules
    if isinstance(excluded, str):
        hits = first_matches([excluded], keys, "exclude_modules", time, full=True) if excluded else [None] * len(keys)
        keys = [key for key, hit in zip(keys, hits, strict=True) if hit is None]
    elif excluded_keys := frozenset(named_in(keys, frozenset(excluded))):
        keys = [key for key in keys if key not in excluded_keys]
    if isinstance(targets, str):
        if targets.lower() == _ALL_LINEAR:
            return [key for key in keys if key not in _OTHER_MODULES]
        hits = first_matches([targets], keys, "target_modules", time, full=True)
        return [key for key, hit in zip(keys, hits, strict=True) if hit is not None]
    names = frozenset(targets)
    named = named_in(keys, names)
    if not config.layers_to_transform:
        return named
    in_layers = _in_layers(config, named, time)
    # a whole name includes its layer, so layers_to_transform is not checked
    return [key for key in named if key in names or key in in_layers]


def _in_layers(config: LoraConfig, keys: Sequence[str], time: PatternTime) -> set[str]:
    layers = frozenset(config.layers_to_transform)
    in_layers = [key for key in keys if _layer(key) in layers]
    if not config.layers_pattern:
        return set(in_layers)
    template = (r"(?:^|.*?\.)", r"\.[0-9]+\.")
    hits = first_matches(config.layers_pattern, in_layers, "layers_pattern", time, template)
    return {key for key, hit in zip(in_layers, hits, strict=True) if hit is not None}


def _layer(key: str) -> int | None:
    return next((int(part) for part in key.split(".") if part.isdecimal()), None)


def by_pattern(pattern: Mapping[str, float], keys: Sequence[str], what: str, time: PatternTime) -> dict[str, float]:
    """The number of the first name in `pattern` that matches, for each key that one matches; `what`: its field."""
    names = list(pattern)
    hits = first_names(names, keys, what, time)
    return {key: pattern[names[hit]] for key, hit in zip(keys, hits, strict=True) if hit is not None}
