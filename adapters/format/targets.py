"""Which modules of a base a LoRA config targets, by PEFT's own rules.

The rules are those of PEFT's `check_target_module_exists`, `get_pattern_key` and `all-linear`: a list matches names and
dotted suffixes, a string is a regular expression for the whole name, and the first pattern that matches decides a
module's rank.
"""

from __future__ import annotations

import json
import math
import re
import resource
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..adapter import EMBEDDING, END_MODULES, HEAD, OUTER, OUTER_MODULES, BaseShape
from ..errors import AdapterInvalid, listed, quote
from .peft import MODULE_PATHS, TEXT_PREFIX, LoraConfig

# Names that match a module's name, or its last dotted parts, found without looking at each of them.

_PLAIN: Final = re.compile(r"(?:[A-Za-z0-9_.-]|\\\.)+")
_TOKEN: Final = re.compile(r"\\\.|.")
_ANY: Final = "."  # matches any character, as in a regular expression; names mean dots by it


def suffixes(key: str) -> Iterator[str]:
    """The key, and its last dotted parts."""
    yield key
    at = key.find(".")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find(".", at + 1)


def named_in(keys: Collection[str], names: frozenset[str]) -> list[str]:
    """The keys that have one of the names, or end with it after a dot."""
    ends = frozenset(map(_end, names))  # few keys have one of these
    return [key for key in keys if _end(key) in ends and any(name in names for name in suffixes(key))]


def names_found(keys: Collection[str], names: frozenset[str]) -> frozenset[str]:
    """The names that a key has, or ends with after a dot."""
    return frozenset(name for key in named_in(keys, names) for name in suffixes(key) if name in names)


def _end(key: str) -> str:
    return key[key.rfind(".") + 1 :]


class PlainNames:
    r"""Finds the first of some names that matches a key as the regular expression `(.*\.)?(name)$` does.

    Names of one length with their dots at the same places differ only in text, so that a dictionary has them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Each is plain."""
        # By length, then by the places where any character matches: indices by text.
        self._forms: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        for index, name in enumerate(names):
            tokens = _TOKEN.findall(name)
            places = tuple(place for place, token in enumerate(tokens) if token == _ANY)
            text = "".join(token[-1] for token in tokens)
            self._forms.setdefault(len(text), {}).setdefault(places, {}).setdefault(text, index)

    @staticmethod
    def is_plain(name: str) -> bool:
        """Whether dots are all that it has of a regular expression."""
        return _PLAIN.fullmatch(name) is not None

    def first(self, key: str) -> int | None:
        """The index of the first name that matches; None: no name does. `key` has no line breaks."""
        return min(self._matches(key), default=None)

    def _matches(self, key: str) -> Iterator[int]:
        for part in suffixes(key):
            for places, indices in self._forms.get(len(part), {}).items():
                text = part
                for place in places:
                    if text[place] != _ANY:
                        text = f"{text[:place]}{_ANY}{text[place + 1 :]}"
                if text in indices:
                    yield indices[text]


# Matches regular expressions from uploads, and limits the cost of hostile ones.
#
# A PEFT config may hold any regular expression, and Python's `re` can take years for a short one while it holds the
# interpreter's lock. Plain names are matched in this process, all else in a child with limited memory and time. All
# expressions of one upload share that time.

MAX_PATTERNS = 2048
MAX_PATTERN_CHARS = 4096
CPU_S = 1.0  # of children, for all expressions of an upload
TIMEOUT_S = 20.0  # wall time of one child
_AS_NAMES = (r"(.*\.)?(", r")$")  # what PEFT puts around each name of a rank or alpha pattern
# Names, dots, escaped dots and anchors: patterns of these cannot backtrack.
_PLAIN_EXPRESSION = re.compile(r"(?:[A-Za-z0-9_.^$-]|\\\.)*")
_CHILD = """
import json, re, sys
templates, patterns, keys, full, cpu_s = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
except (ImportError, ValueError, OSError):
    pass  # not every system has these limits; the parent's timeout holds everywhere
found, error = [], None
try:
    compiled = []
    for pattern in patterns:
        compiled.append(re.compile(templates[0] + pattern + templates[1]))
    for key in keys:
        tests = (i for i, p in enumerate(compiled) if (p.fullmatch(key) if full else p.match(key)))
        found.append(next(tests, None))
except (re.error, OverflowError, RecursionError) as problem:
    error = [pattern, str(problem)]
json.dump([found, error], sys.stdout)
"""


@dataclass
class PatternTime:
    """Seconds of CPU that the expressions of one upload may still use."""

    left_s: float = CPU_S


def first_matches(
    patterns: Sequence[str],
    keys: Sequence[str],
    field: str,
    time: PatternTime,
    template: tuple[str, str] = ("", ""),
    full: bool = False,
) -> list[int | None]:
    """For each key the index of the first pattern that matches it; None: no pattern does.

    Patterns match as with `re.match` or, if `full`, `re.fullmatch`. `template`: text before and after each pattern.
    Raises AdapterInvalid, which names `field`, for a pattern that is not a regular expression or takes too long.
    """
    _check_size(patterns, field)
    if not all(_PLAIN_EXPRESSION.fullmatch(pattern) for pattern in patterns):
        return _match_in_child(patterns, keys, field, time, template, full)
    compiled = [re.compile(template[0] + pattern + template[1]) for pattern in patterns]
    return [
        next((i for i, p in enumerate(compiled) if (p.fullmatch(key) if full else p.match(key))), None) for key in keys
    ]


def first_names(names: Sequence[str], keys: Sequence[str], field: str, time: PatternTime) -> list[int | None]:
    """As `first_matches`, where each pattern matches a key, or its last parts, as PEFT's rank patterns do."""
    _check_size(names, field)
    if all(map(PlainNames.is_plain, names)):
        plain = PlainNames(names)
        return [plain.first(key) for key in keys]
    return first_matches(names, keys, field, time, _AS_NAMES)


def _check_size(patterns: Sequence[str], field: str) -> None:
    if len(patterns) > MAX_PATTERNS or any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns):
        raise AdapterInvalid(
            f"{field} is too large: at most {MAX_PATTERNS} patterns of {MAX_PATTERN_CHARS} characters are accepted"
        )


def _match_in_child(
    patterns: Sequence[str],
    keys: Sequence[str],
    field: str,
    time: PatternTime,
    template: tuple[str, str],
    full: bool,
) -> list[int | None]:
    request = json.dumps([template, list(patterns), list(keys), full, max(1, math.ceil(time.left_s))])
    child = None
    if time.left_s > 0:
        before_s = _children_s()
        try:
            child = subprocess.run(  # -I -S: Python imports nothing from this environment
                [sys.executable, "-I", "-S", "-c", _CHILD],
                input=request,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            pass
        time.left_s -= _children_s() - before_s
    if child is None or child.returncode != 0:
        raise AdapterInvalid(
            f"{field} ({listed(list(patterns))}) takes too long to match: use plain names or a simpler expression"
        )
    reply, error = json.loads(child.stdout)
    if error is not None:
        raise AdapterInvalid(f"{field} holds {quote(error[0])}, which is not a regular expression: {error[1]}")
    matches: list[int | None] = reply
    return matches


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_ALL_LINEAR = "all-linear"
# The head's name by what stands before "layers." in names of modules, where there is a head.
HEAD_NAMES: Final = {
    TEXT_PREFIX: HEAD,
    "model.language_model.": HEAD,
    "language_model.model.": f"language_model.{HEAD}",
}
# Modules of one base or another. Lists for all of them name some in vain, of which nothing is said.
_OF_SOME_BASE = frozenset(path.rpartition(".")[2] for path in MODULE_PATHS.values())


@dataclass(frozen=True)
class Target:
    """What a config says of one module of one layer."""

    rank: int
    scaling: float


def module_keys(shape: BaseShape, prefix: str) -> dict[str, tuple[int, str]]:
    """(layer, module) of all that adapters of the base may have, by the name that a pattern of PEFT's matches."""
    keys = {
        f"{prefix}layers.{layer}.{shape.path(module)}": (layer, module)
        for layer in range(shape.num_layers)
        for entry in shape.names
        for module in shape.members(entry)
        if entry not in OUTER_MODULES and shape.sides(layer, module) is not None
    }
    return keys | {f"{prefix}{module}": (OUTER, module) for module in shape.names if module in OUTER_MODULES}


def resolve_targets(
    config: LoraConfig, shape: BaseShape, time: PatternTime | None = None, prefix: str = TEXT_PREFIX
) -> dict[tuple[int, str], Target]:
    """Rank and scaling of each (layer, module) that the config targets. Raises AdapterInvalid for a wrong config.

    There are none where `target_modules` is empty, which a config with `target_parameters` may have. `time`: for its
    regular expressions. `prefix`: what stands before "layers." in the names that they match.
    """
    time = time or PatternTime()
    if config.target_parameters and not config.target_modules:
        return {}
    keys = module_keys(shape, prefix)
    ends = {key: (OUTER, end) for end, key in end_names(config, shape, prefix).items() if not is_saved(config, key)}
    _check_against_base(config, shape)
    is_all = isinstance(config.target_modules, str) and config.target_modules.lower() == _ALL_LINEAR
    targeted = _targeted(config, [*keys] if is_all else [*keys, *ends], time)
    if shape.ends is None and (refused := [end for key, (_, end) in ends.items() if key in targeted]):
        raise AdapterInvalid(
            f"target_modules includes {refused[0]}: LoRA of embeddings and of the output layer is not supported for "
            f"this base, {', '.join(shape.target_names)} are"
        )
    keys |= ends
    is_tied = ties_lora(config, shape, prefix, time)
    if is_tied:
        targeted = [*dict.fromkeys((*targeted, *ends))]
    layers = unmatched_layers(config, shape)
    if layers and not targeted and not config.target_parameters:
        raise AdapterInvalid(
            f"layers_to_transform names layers {listed([*map(str, layers)])}: the base has layers 0 to "
            f"{shape.num_layers - 1}"
        )
    if not targeted and not config.target_parameters:
        names = config.target_modules
        raise AdapterInvalid(
            f"target_modules = {quote(names) if isinstance(names, str) else listed([*names])} matches no module of the "
            f"base: {', '.join(shape.target_names)}{_list_that_was_meant(names)}"
        )
    ranks = by_pattern(config.rank_pattern, targeted, "rank_pattern", time)
    alphas = by_pattern(config.alpha_pattern, targeted, "alpha_pattern", time)
    targets = {}
    for key in targeted:
        rank = config.r if (pattern_rank := ranks.get(key)) is None else int(pattern_rank)
        targets[keys[key]] = Target(rank, config.scaling(rank, alphas.get(key, config.lora_alpha)))
    if is_tied:  # the head has the embedding's matrices, scaled by its own rank and alpha
        targets[OUTER, HEAD] = replace(targets[OUTER, HEAD], rank=targets[OUTER, EMBEDDING].rank)
    return targets


def ties_lora(config: LoraConfig, shape: BaseShape, prefix: str, time: PatternTime) -> bool:
    """Whether embedding and head have one LoRA, as with PEFT's `ensure_weight_tying`.

    Raises AdapterInvalid where PEFT fails, because the embedding is excluded.
    """
    names = end_names(config, shape, prefix)
    if not (config.ties_ends and are_tied(config, shape, prefix)):
        return False
    if any(name.rpartition(".")[2] in END_MODULES for name in config.modules_to_save):
        return False
    if isinstance(config.target_modules, str):
        if first_matches([config.target_modules], END_MODULES, "target_modules", time, full=True) == [None, None]:
            return False
    elif not any(name.rpartition(".")[2] in END_MODULES for name in config.target_modules):
        return False
    embedding = names[EMBEDDING]
    if not _targeted(replace(config, target_modules=(embedding,)), [embedding], time):
        raise AdapterInvalid(
            f"exclude_modules names {EMBEDDING}, of which ensure_weight_tying makes the LoRA of the head: PEFT cannot "
            "load this. Set one of them"
        )
    return True


def end_names(config: LoraConfig, shape: BaseShape, prefix: str) -> dict[str, str]:
    """The names of EMBEDDING and HEAD that patterns match, by these. `prefix`: as for `resolve_targets`.

    A classifier has another head, and a base that was loaded without its head none.
    """
    names = {EMBEDDING: f"{prefix}{shape.path(EMBEDDING)}"}
    return names | ({} if config.is_classifier or prefix not in HEAD_NAMES else {HEAD: HEAD_NAMES[prefix]})


def are_tied(config: LoraConfig, shape: BaseShape, prefix: str) -> bool:
    """Whether embedding and head are one weight in the model that was trained."""
    return shape.ends is not None and shape.ends.is_tied and HEAD in end_names(config, shape, prefix)


def is_saved(config: LoraConfig, key: str) -> bool:
    """Whether the config has the module of this name in `modules_to_save`: then LoRA does not target it."""
    return any(name in config.modules_to_save for name in suffixes(key))


def unmatched(config: LoraConfig, shape: BaseShape, prefix: str) -> list[str]:
    """The names in a list of `target_modules` of which the base has no module. As in PEFT nothing is trained there."""
    if isinstance(config.target_modules, str):
        return []
    names = frozenset(config.target_modules)
    keys = [*module_keys(shape, prefix), *end_names(config, shape, prefix).values()]
    return sorted(names - _OF_SOME_BASE - names_found(keys, names))


def unmatched_layers(config: LoraConfig, shape: BaseShape) -> list[int]:
    """Those in `layers_to_transform` that the base does not have. As in PEFT nothing is trained there."""
    return [layer for layer in dict.fromkeys(config.layers_to_transform) if not 0 <= layer < shape.num_layers]


def _list_that_was_meant(names: str | Sequence[str]) -> str:
    if not isinstance(names, str) or "," not in names:
        return ""
    meant = json.dumps([name.strip() for name in names.split(",") if name.strip()])
    return f". A string is one regular expression: if a list was meant, write {meant}"


def _check_against_base(config: LoraConfig, shape: BaseShape) -> None:
    if not config.target_modules:
        raise AdapterInvalid(f"target_modules is missing: name some of {', '.join(shape.target_names)}")
    if isinstance(config.target_modules, str) and config.layers_to_transform:
        raise AdapterInvalid("layers_to_transform needs target_modules to be a list, as in PEFT")


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
            return [*keys]
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


def by_pattern(pattern: Mapping[str, float], keys: Sequence[str], field: str, time: PatternTime) -> dict[str, float]:
    """The number of the first name in `pattern` that matches, for each key that one matches; `field`: its name."""
    names = list(pattern)
    hits = first_names(names, keys, field, time)
    return {key: pattern[names[hit]] for key, hit in zip(keys, hits, strict=True) if hit is not None}
