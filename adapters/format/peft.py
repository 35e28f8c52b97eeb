"""Reads PEFT's adapter_config.json and knows PEFT's tensor names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..adapter import EMBEDDING, EXPERT_MODULES, HEAD, MAX_RANK, OUTER, OUTER_MODULES, PATHS
from ..errors import AdapterInvalid, quote
from .strict_json import parse_object

# Every field of PEFT's LoraConfig and of the configs of KINDS, as computed, harmless, or refused.
#
# `tests/adapters/test_peft_fields.py` compares this with the installed PEFT, so that fields of a newer one are
# reviewed before adapters that set them are accepted.

# peft.py reads these, and they decide what is computed.
COMPUTED = frozenset(
    {
        "alora_invocation_tokens",
        "bias",
        "lora_bias",
        "use_dora",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "target_parameters",
        "use_bdlora",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
    }
)
# Fields that change nothing that is computed, and why.
HARMLESS: Mapping[str, str] = {
    "auto_mapping": "which Python class the base had",
    "base_model_name_or_path": "where the base was: names.py compares it; shapes decide what fits",
    "corda_config": "read where init_lora_weights is corda, which is refused; a converted adapter keeps it",
    "eva_config": "how A was drawn before training; ranks that it chose are in rank_pattern",
    "inference_mode": "whether training is to continue",
    "loftq_config": "read where init_lora_weights is loftq, which is refused",
    "lora_dropout": "zero outside of training",
    "lora_ga_config": "read where init_lora_weights is lora_ga, which is refused; a converted adapter keeps it",
    "megatron_core": "read where megatron_config is set, which is refused",
    "peft_version": "which PEFT wrote the file",
    "qalora_group_size": "read where use_qalora is set, which is refused",
    "revision": "which revision of the base it was",
    "runtime_config": "where PEFT computes",
    "task_type": "which head the base had: score_head.py compares it with modules_to_save",
    "velora_config": "how gradients were kept in training; the forward pass reads none of its tensors",
}
PLAIN_INITIALISATIONS = ("true", "false", "gaussian", "orthogonal", "eva", "mica")  # those that do not change the base
_CONVERT = (
    "the adapter belongs to a base whose weights this initialisation has changed. Save it as plain LoRA: "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...), with the adapter as it was before training"
)
_CHANGING_INITIALISATIONS: Mapping[str, str] = {  # by prefix of the name: what to do instead
    "pissa": _CONVERT,
    "olora": _CONVERT,
    "corda": _CONVERT,
    "lora_ga": _CONVERT,
    "loftq": "the adapter belongs to a quantized base: train it on the base that is served here",
}
_ONLY_PLAIN = "only plain LoRA is computed: train without it"


@dataclass(frozen=True)
class Refused:
    """A field that would change what is computed. `unset`: values with which PEFT computes plain LoRA."""

    feature: str
    remedy: str = _ONLY_PLAIN
    unset: tuple[Any, ...] = (None, False)


# Where PEFT tests for truth. For other fields an empty object means the feature with its defaults.
_EMPTY_IS_UNSET: tuple[Any, ...] = (None, False, [], {})
REFUSED: Mapping[str, Refused] = {
    "arrow_config": Refused("Arrow routing"),
    "fan_in_fan_out": Refused("transposed weights", "set it to false for bases of linear layers"),
    "kasa_config": Refused("KaSA, which changes the base's weights"),
    "layer_replication": Refused("layer replication", unset=_EMPTY_IS_UNSET),
    "megatron_config": Refused("Megatron layers", unset=_EMPTY_IS_UNSET),
    "monteclora_config": Refused("Monte Carlo LoRA"),
    "use_qalora": Refused("QA-LoRA"),
}
# Fields that are computed beside LoRA alone.
OF_LORA_ALONE: Mapping[str, Refused] = {
    "modules_to_save": Refused("fully trained modules", "train them beside LoRA", _EMPTY_IS_UNSET),
    "trainable_token_indices": Refused("trained rows of tokens", "train them beside LoRA", _EMPTY_IS_UNSET),
}


LORA, IA3, VERA, LOHA, LOKR = "LORA", "IA3", "VERA", "LOHA", "LOKR"
_LAYERS = frozenset({"target_modules", "layers_to_transform", "layers_pattern"})
_LYCORIS = _LAYERS | {"exclude_modules", "r", "alpha", "rank_pattern", "alpha_pattern", "init_weights"}
_LYCORIS |= {"rank_dropout", "module_dropout", "use_effective_conv2d"}  # of training, and of what is no linear
# The kinds of adapters that are computed: which fields a kind has beside those of HARMLESS and of REFUSED.
KINDS: Mapping[str, frozenset[str]] = {
    LORA: COMPUTED | {"init_lora_weights"},
    # Which modules are feedforward ones is in the shapes of their vectors.
    IA3: frozenset({"target_modules", "exclude_modules", "feedforward_modules", "init_ia3_weights", "fan_in_fan_out"}),
    # Where the shared matrices are not in the file they would be drawn again, by torch's random numbers.
    VERA: _LAYERS
    | {"r", "bias", "projection_prng_key", "save_projection", "vera_dropout", "d_initial", "init_weights"},
    LOHA: _LYCORIS,
    LOKR: _LYCORIS | {"decompose_both", "decompose_factor", "rank_dropout_scale"},  # the shapes say what these are
}


@dataclass(frozen=True)
class UnknownFields:
    """What a config says in fields that are in none of the tables above."""

    problem: str = ""  # why the adapter may compute otherwise, with the field; empty: none says anything
    warnings: tuple[str, ...] = ()  # of fields that hold a text, such as a note of its trainer


def refuse_fields(config: Mapping[str, Any]) -> UnknownFields:
    """Raises AdapterInvalid, which names the field, for one that would change what is computed in an unknown way."""
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise AdapterInvalid(
            f"peft_type is {quote(kind)}: {', '.join(KINDS)} are accepted. Train one of these, or where PEFT can "
            "convert this kind to LoRA (peft.convert_to_lora), upload the result"
        )
    for key, value in config.items():
        refused = None if key in KINDS[kind] else REFUSED.get(key) or OF_LORA_ALONE.get(key)
        if refused is not None and not _is_one_of(value, refused.unset):
            raise AdapterInvalid(f"{key} = {quote(value)} is not supported ({refused.feature}): {refused.remedy}")
    if kind == LORA:
        _refuse_initialisation(config.get("init_lora_weights", True))
    fields_of_peft = {*REFUSED, *OF_LORA_ALONE, *KINDS[kind], *HARMLESS, "peft_type"}
    # What is empty, or zero, turns nothing on.
    unknown = {key: value for key, value in config.items() if key not in fields_of_peft and value}
    texts = [key for key, value in unknown.items() if isinstance(value, str)]
    settings = [f"{quote(key)} = {quote(value)}" for key, value in unknown.items() if key not in texts]
    warnings = [f"{quote(key)} = {quote(unknown[key])} is no field of PEFT: it is taken for a note" for key in texts]
    problem = ""
    if settings:
        problem = (
            f"{CONFIG_FILE} has {settings[0]}, which is no field of PEFT for {kind}: remove it if it changes nothing"
        )
    return UnknownFields(problem, tuple(warnings))


def _refuse_initialisation(value: Any) -> None:
    # PEFT initialises again when it loads an adapter, and changes the base's weights then, as in training. A
    # conversion to plain LoRA sets the field to true.
    name = str(value).lower()
    if value is None or name in PLAIN_INITIALISATIONS:
        return
    remedy = next((text for prefix, text in _CHANGING_INITIALISATIONS.items() if name.startswith(prefix)), None)
    if remedy is None:
        remedy = f"{', '.join(PLAIN_INITIALISATIONS)} are accepted, since they do not change the base"
    raise AdapterInvalid(f"init_lora_weights = {quote(value)} is not supported: {remedy}")


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    return any(type(value) is type(candidate) and value == candidate for candidate in accepted)


MAX_INVOCATION = 64  # tokens of an activated LoRA's invocation: they are kept in records, and looked for in prompts
MAX_PARAMETERS = 2048  # names in target_parameters: more than any base has
MAX_BASE_CHARS = 512  # of the base's name, which is stored in records
CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
# Of each module, and of those that are one in some bases, within a layer.
MODULE_PATHS = {**PATHS, "qkv_proj": "self_attn.qkv_proj", "gate_up_proj": "mlp.gate_up_proj"}
_MODULES_BY_PATH = {path: module for module, path in MODULE_PATHS.items() if module not in EXPERT_MODULES}

# What stands before "layers." in names of modules: as transformers names those of a base that takes pictures too, now
# and before version 4.52, and those of text alone; nothing where a base was loaded without its head.
TEXT_PREFIX = "model."
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", TEXT_PREFIX, "")
BEGINNING = rf"base_model\.model\.(?P<prefix>{'|'.join(map(re.escape, PREFIXES))})"
ENDING = r"\.lora_(?P<letter>[AB])(?:\.[^.]+)?\.weight"  # an adapter's name may stand before .weight
LAYER = r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\."
_VISION_NAME = re.compile(
    r"base_model\.model\.(?:model\.)?"
    r"(?:vision_tower|vision_model|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio)\."
)
_TENSOR_NAME = re.compile(BEGINNING + LAYER + r"(?P<path>[a-z0-9_]+(?:\.[a-z0-9_]+)*)" + ENDING)
_EMBEDDING = r"embed(?:_tokens|dings)"  # Nemotron-H has the latter
_END_TENSOR_NAME = re.compile(
    rf"{BEGINNING}{_EMBEDDING}\.lora_embedding_(?P<letter>[AB])(?:\.[^.]+)?"
    rf"|base_model\.model\.(?:language_model\.)?lm_head\.lora_(?P<head_letter>[AB])(?:\.[^.]+)?\.weight"
)
# What a file has of the embedding and the head beside LoRA, by the groups of the name: the weight or the bias that PEFT
# finds there, the adapter's own copy of the weight, the base's within what wraps it, and rows of trained tokens.
_END_NAME = re.compile(
    rf"(?:{BEGINNING}(?P<embedding>{_EMBEDDING})|base_model\.model\.(?:language_model\.)?lm_head)\.(?:"
    r"(?P<weight>weight)|(?P<copy>modules_to_save\.(?:[^.]+\.)?weight)|"
    r"(?P<base>(?:(?:base_layer|token_adapter|original_module)\.)+weight)|"
    r"(?P<bias>(?:base_layer\.|original_module\.|modules_to_save\.(?:[^.]+\.)?)?bias)|"
    r"(?P<tokens>(?:base_layer\.)?token_adapter\.trainable_tokens_delta(?:\.[^.]+)?))"
)
_OUTER_TENSOR_NAME = re.compile(rf"{BEGINNING}(?P<module>{'|'.join(OUTER_MODULES)}){ENDING}")
_EXPERT_TENSOR_NAME = re.compile(
    rf"{BEGINNING}{LAYER}(?:mlp|block_sparse_moe|mixer)\.experts\.(?P<expert>0|[1-9][0-9]{{0,5}})"
    rf"\.(?P<name>gate_proj|up_proj|down_proj|w1|w2|w3){ENDING}"
)
# Parts of a module's name that torch leaves where it wraps a module (compiled, in several processes, sharded,
# recomputed).
_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_MODULE = re.compile(rf"{BEGINNING}(?:layers|{'|'.join((*OUTER_MODULES, _EMBEDDING))})\.")
_OF_TRAINING = re.compile(r"\.lora_velora_embed(?:\.[^.]+)?$")  # tensors that the forward pass does not read
_EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names -> those of EXPERT_MODULES
# Vectors of a linear's outputs, by the groups of the name.
_VECTOR_NAME = re.compile(
    rf"{BEGINNING}{LAYER}(?P<path>[a-z0-9_]+(?:\.[a-z0-9_]+)*?)\.(?:"
    r"(?P<magnitude>lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?)|(?P<lora_bias>lora_B(?:\.[^.]+)?\.bias)|"
    r"(?P<bias>(?:base_layer\.)?bias)|(?P<ia3>ia3_l(?:\.[^.]+)?))"
)
# Of the kinds whose update of a weight is a product of them, see `products.py`.
_FACTOR_NAME = re.compile(
    rf"{BEGINNING}{LAYER}(?P<path>[a-z0-9_]+(?:\.[a-z0-9_]+)*?)\."
    r"(?P<factor>vera_lambda_[bd]|hada_w[12]_[ab]|lokr_w[12](?:_[ab])?)(?:\.[^.]+)?"
)
_FOREIGN_TENSORS = (  # part of a tensor's name, and the feature that writes such tensors
    ("lora_magnitude_vector", "DoRA of a module that is none of them (use_dora)"),
    ("lora_embedding_", "LoRA of an embedding that is not that of the tokens"),
    ("modules_to_save", "modules_to_save of what is neither embed_tokens nor lm_head"),
    ("trainable_tokens", "trainable_token_indices of what is neither embed_tokens nor lm_head"),
    ("token_adapter", "trainable_token_indices of what is neither embed_tokens nor lm_head"),
    ("lora_A.bias", "lora_bias"),
    ("lora_B.bias", "lora_bias"),
    ("embed_tokens", "training of embed_tokens in this way"),
    ("lm_head", "training of lm_head in this way"),
    ("model.score.", "a head other than that of a sequence classifier (task_type SEQ_CLS)"),
    (".bias", "a trained bias of what is no linear (bias)"),
)


@dataclass(frozen=True)
class LoraConfig:
    """The content of an adapter_config.json. Patterns keep the file's order: the first match counts."""

    kind: str  # of KINDS
    r: int  # 0: the kind has none
    lora_alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    target_parameters: tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]  # empty: all
    layers_pattern: tuple[str, ...]  # empty: any
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_dora: bool = False
    lora_bias: bool = False
    has_biases: bool = False  # the file has trained biases of the base
    is_classifier: bool = False  # its task_type is SEQ_CLS
    names_head: bool = False  # its modules_to_save do
    num_blocks: int = 1  # of matrices that are block-diagonal (BD-LoRA)
    invocation_token_ids: tuple[int, ...] = ()  # of an activated LoRA; empty: it is a plain one
    modules_to_save: tuple[str, ...] = ()
    trained_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by the name of a module
    ties_ends: bool = False  # what is trained of a tied embedding is trained of the head
    unknown: UnknownFields = field(default_factory=UnknownFields)

    def scaling(self, rank: int, alpha: float) -> float:
        if self.kind in (IA3, VERA):
            return 1.0
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


# Of sequence classifiers (`score_head.py`). PEFT names both, and saves the one that the model has: no decoder of
# transformers calls it `classifier`.
SEQ_CLS = "SEQ_CLS"
MODULES_TO_SAVE = "modules_to_save"
_HEADS = ("score", "classifier")


def without_head(config: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The config without a head in its `modules_to_save`, and whether it names one. Raises AdapterInvalid.

    >>> without_head({"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]})
    ({'task_type': 'SEQ_CLS', 'modules_to_save': None}, True)
    """
    names, task = config.get(MODULES_TO_SAVE), config.get("task_type")
    if not isinstance(names, list) or not any(name in _HEADS for name in names):
        return config, False
    if task != SEQ_CLS:
        raise AdapterInvalid(
            f"{MODULES_TO_SAVE} = {quote(names)} with task_type {quote(task)} is not supported: a score head is served "
            f"of task_type {SEQ_CLS}, as PEFT trains it on a …ForSequenceClassification; if this one was, set it so"
        )
    return {**config, MODULES_TO_SAVE: [name for name in names if name not in _HEADS] or None}, True


def parse_config(data: bytes) -> LoraConfig:
    """The config in `data`. Raises AdapterInvalid, which names the key, for everything that is not computed."""
    config, names_head = without_head(parse_object(data, CONFIG_FILE))
    unknown = refuse_fields(config)
    kind, is_classifier = config["peft_type"], config.get("task_type") == SEQ_CLS
    config = {key: value for key, value in config.items() if key in KINDS[kind]}
    alpha_key = "alpha" if kind in (LOHA, LOKR) else "lora_alpha"
    _refuse_together(config)
    layers = config.get("layers_to_transform")
    return LoraConfig(
        kind=kind,
        r=0 if kind == IA3 else _rank(config.get("r"), "r"),
        lora_alpha=_alpha(config.get(alpha_key, 8), alpha_key),
        use_rslora=_flag(config, "use_rslora"),
        target_modules=_names(config, "target_modules"),
        target_parameters=_parameters(config),
        exclude_modules=_names(config, "exclude_modules"),
        layers_to_transform=_layers([layers] if type(layers) is int else layers or []),
        layers_pattern=_as_tuple(_names(config, "layers_pattern")),
        rank_pattern={
            key: _rank(rank, f"rank_pattern[{quote(key)}]") for key, rank in _pattern(config, "rank_pattern")
        },
        alpha_pattern={
            key: _alpha(alpha, f"alpha_pattern[{quote(key)}]") for key, alpha in _pattern(config, "alpha_pattern")
        },
        use_dora=_flag(config, "use_dora"),
        lora_bias=_flag(config, "lora_bias"),
        has_biases=_has_biases(config),
        is_classifier=is_classifier,
        names_head=names_head,
        num_blocks=_num_blocks(config.get("use_bdlora")),
        invocation_token_ids=_invocation(config.get("alora_invocation_tokens")),
        modules_to_save=_modules_to_save(config),
        trained_tokens=_trained_tokens(config.get("trainable_token_indices")),
        ties_ends=_flag(config, "ensure_weight_tying"),
        unknown=unknown,
    )


def _refuse_together(config: Mapping[str, Any]) -> None:
    """Raises AdapterInvalid for what PEFT computes alone, or not at all, and what would be computed otherwise here."""
    if _flag(config, "use_dora"):
        for key in ("lora_bias", "use_bdlora", "alora_invocation_tokens"):
            if config.get(key):
                raise AdapterInvalid(f"use_dora and {key} are both set, which PEFT does not compute: set one of them")
    if _has_biases(config) and config.get("alora_invocation_tokens"):
        raise AdapterInvalid("bias and alora_invocation_tokens are both set: the base computes without trained biases")


def _has_biases(config: Mapping[str, Any]) -> bool:
    return config.get("bias") not in (None, "none")


def named_base(data: bytes) -> str:
    """The base that the config in `data` names, a name on a hub or a path; empty: none. Raises AdapterInvalid."""
    name = parse_object(data, CONFIG_FILE).get("base_model_name_or_path") or ""
    if not isinstance(name, str):
        raise AdapterInvalid(f"base_model_name_or_path = {quote(name)}: a name or a path is needed")
    if len(name) > MAX_BASE_CHARS:
        raise AdapterInvalid(
            f"base_model_name_or_path has {len(name)} characters: at most {MAX_BASE_CHARS} are accepted"
        )
    return name


def tensor_name(layer: int, module: str, letter: str) -> str:
    """PEFT's name of a matrix; `letter` is A or B. For a matrix of an expert, the name that most families use."""
    if module == EMBEDDING:
        return f"base_model.model.model.{module}.lora_embedding_{letter}"
    if module == HEAD:
        return f"base_model.model.{module}.lora_{letter}.weight"
    path = MODULE_PATHS.get(module, f"mlp.{module}")
    if layer == OUTER:
        return f"base_model.model.model.{path}.lora_{letter}.weight"
    return f"base_model.model.model.layers.{layer}.{path}.lora_{letter}.weight"


def parse_tensor_name(name: str, modules: Mapping[str, str] = _MODULES_BY_PATH) -> tuple[int, str, str] | None:
    """(layer, module, letter), or None for a name that is not of a LoRA matrix.

    `modules`: of decoder layers, by their path, and OUTER_MODULES; END_MODULES are always known.
    """
    match = _EXPERT_TENSOR_NAME.fullmatch(name)
    if match is not None:
        projection = _EXPERT_NAMES.get(match["name"], match["name"])
        return int(match["layer"]), f"experts.{int(match['expert'])}.{projection}", match["letter"]
    match = _END_TENSOR_NAME.fullmatch(name)
    if match is not None:
        return OUTER, HEAD if match["letter"] is None else EMBEDDING, match["letter"] or match["head_letter"]
    match = _OUTER_TENSOR_NAME.fullmatch(name)
    if match is not None and match["module"] in modules:
        return OUTER, match["module"], match["letter"]
    match = _TENSOR_NAME.fullmatch(name)
    if match is None or match["path"] not in modules:
        return None
    return int(match["layer"]), modules[match["path"]], match["letter"]


def parse_end_name(name: str) -> tuple[str, str] | None:
    """(EMBEDDING or HEAD, kind) of a tensor of these beside LoRA; None: the name is of none.

    Kinds are `weight`, `copy`, `base`, `bias` and `tokens`: see `_END_NAME`.
    """
    match = _END_NAME.fullmatch(name)
    if match is None:
        return None
    assert match.lastgroup is not None, "one of the kinds is there"
    return EMBEDDING if match["embedding"] else HEAD, match.lastgroup


def parse_vector_name(name: str, modules: Mapping[str, str]) -> tuple[int, str, str] | None:
    """(layer, module, kind) of a vector of a linear's outputs; None: the name is of none. `modules`: by their path.

    Kinds are the `magnitude` of DoRA, `lora_bias`, a trained `bias` of the base, and `ia3`.
    """
    match = _VECTOR_NAME.fullmatch(name)
    if match is None or match["path"] not in modules:
        return None
    assert match.lastgroup is not None, "one of the kinds is there"
    return int(match["layer"]), modules[match["path"]], match.lastgroup


def parse_factor_name(name: str, modules: Mapping[str, str]) -> tuple[int, str, str] | None:
    """(layer, module, PEFT's name) of a vector of VeRA or a factor of LoHa or LoKr; None: the name is of none."""
    match = _FACTOR_NAME.fullmatch(name)
    if match is None or match["path"] not in modules:
        return None
    return int(match["layer"]), modules[match["path"]], match["factor"]


def unwrapped(name: str) -> str:
    """The tensor's name without what torch's wrappers leave in it.

    >>> unwrapped("base_model.model._orig_mod.model.layers.0.self_attn.q_proj.lora_A.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_of_training(name: str) -> bool:
    """No forward pass reads the tensor."""
    return _OF_TRAINING.search(name) is not None


def module_prefix(names: Iterable[str]) -> str:
    """What stands before "layers." or a module of OUTER_MODULES in the names of an adapter's tensors.

    That is how its patterns name modules, too. Raises AdapterInvalid if there are two of them.
    """
    examples: dict[str, str] = {}
    for name in names:
        match = _MODULE.match(name)
        if match is not None:
            examples.setdefault(match["prefix"], name)
    if len(examples) > 1:
        first, second, *_ = examples.values()
        raise AdapterInvalid(
            f"{TENSORS_FILE} names modules in two ways, {quote(first, 160)} and {quote(second, 160)}: one file has "
            "one, as PEFT saves it"
        )
    return next(iter(examples), TEXT_PREFIX)


def is_of_vision(name: str) -> bool:
    """The tensor belongs to what reads the pictures, not to the text model."""
    return _VISION_NAME.match(name) is not None


def foreign_feature(name: str) -> str | None:
    """The unsupported feature that a tensor of this name belongs to; None: no known feature."""
    return next((feature for part, feature in _FOREIGN_TENSORS if part in name), None)


def _rank(value: Any, key: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise AdapterInvalid(f"{key} = {quote(value)}: an integer from 1 to {MAX_RANK} is needed")
    return value


def _alpha(value: Any, key: str) -> float:
    # The bound keeps scaling and products finite; adapters in use are far below it.
    if type(value) not in (int, float) or not abs(value) <= 1e6:
        raise AdapterInvalid(f"{key} = {quote(value)}: a number up to 1e6 is needed")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise AdapterInvalid(f"{key} = {quote(value)}: true or false is needed")
    return bool(value)


def _names(config: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    value = config.get(key)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise AdapterInvalid(f"{key} = {quote(value)}: a list of names or one regular expression is needed")
    return tuple(value)


def _parameters(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = _names(config, "target_parameters")
    if isinstance(names, str):
        raise AdapterInvalid(f"target_parameters = {quote(names)}: a list of names is needed, as in PEFT")
    if len(names) > MAX_PARAMETERS:
        raise AdapterInvalid(f"target_parameters has {len(names)} names: at most {MAX_PARAMETERS} are accepted")
    return names


def _modules_to_save(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = _names(config, "modules_to_save") if config.get("modules_to_save") else ()
    if isinstance(names, str):
        raise AdapterInvalid(f"modules_to_save = {quote(names)}: a list of names is needed, as in PEFT")
    return names


def _trained_tokens(value: Any) -> dict[str, tuple[int, ...]]:
    if _is_one_of(value, _EMPTY_IS_UNSET):
        return {}
    by_name = value if isinstance(value, dict) else {EMBEDDING: value}
    if not all(isinstance(ids, list) and ids and all(type(each) is int for each in ids) for ids in by_name.values()):
        raise AdapterInvalid(
            f"trainable_token_indices = {quote(value)}: a list of token ids is needed, or an object from names of "
            "modules to such lists"
        )
    return {name: tuple(ids) for name, ids in by_name.items()}


def _invocation(value: Any) -> tuple[int, ...]:
    if value is None or value is False or value == [] or value == {}:
        return ()
    are_ids = isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 31 for each in value)
    if not are_ids or len(value) > MAX_INVOCATION:
        raise AdapterInvalid(
            f"alora_invocation_tokens = {quote(value)}: a list of at most {MAX_INVOCATION} token ids is needed"
        )
    return tuple(value)


def _num_blocks(value: Any) -> int:
    if value is None or value is False:
        return 1
    count = value.get("nblocks", 1) if isinstance(value, dict) else None
    if type(count) is not int or not 1 <= count <= MAX_RANK:
        raise AdapterInvalid(f"use_bdlora = {quote(value)}: an object with nblocks from 1 to {MAX_RANK} is needed")
    return count


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return ((names,) if names else ()) if isinstance(names, str) else names


def _layers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise AdapterInvalid(f"layers_to_transform = {quote(value)}: a layer or a list of layers is needed")
    return tuple(value)


def _pattern(config: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterInvalid(f"{key} = {quote(value)}: an object from module names to numbers is needed")
    return list(value.items())
