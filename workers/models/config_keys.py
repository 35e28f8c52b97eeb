"""The keys of config.json that a family reads: their types, and what they mean where they are absent.

Every other key that some decoder of transformers computes with is refused unless its value changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from .decoder_keys import DECODER_KEYS
from .families import ROPE_KEYS, Family

_MAX_SIZE: Final = 1 << 31
_MAX_LAYERS: Final = 10_000

# Null means something of its own: no window, no cap, and lists that follow from other keys. Elsewhere null is accepted
# where it is the family's default.
_NULLABLE: Final = frozenset(
    {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "layer_types", "mlp_only_layers"}
)
_WINDOW_KEYS: Final = frozenset({"sliding_window", "max_window_layers"})  # with `use_sliding_window` alone
_FACTORS: Final = re.compile(r"(multiplier|scale|scaling|factor)$")  # 1 changes nothing


def read_keys(raw: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The values of all keys that the family reads, defaults filled in; those of the rotary embedding as they stand.

    Raises ValueError for a value of another type, KeyError for a key that is needed and absent.
    """
    raw = _renamed(raw, family)
    _refuse_unread(raw, family)
    values: dict[str, Any] = {key: _checked(key, raw[key]) for key in _NEEDED}
    for key, default in family.defaults.items():
        value = raw.get(key, default)
        is_null = value is None and (default is None or key in _NULLABLE or key in family.nullable)
        values[key] = None if is_null else _checked(key, value, default)
    return values | {key: raw[key] for key in ROPE_KEYS if key in raw}


def _renamed(raw: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """transformers 5 writes the number of experts by another name than it had before, and reads both."""
    old, new = "num_experts", "num_local_experts"
    if old not in raw or new not in family.defaults:
        return raw
    if new in raw and raw[old] != raw[new]:
        raise ValueError(f"{old} = {raw[old]!r} contradicts {new} = {raw[new]!r}: keep one")
    return {key: value for key, value in raw.items() if key != old} | {new: raw[old]}


def _refuse_unread(raw: Mapping[str, Any], family: Family) -> None:
    """A key that this family does not read would change the answers of another, so somebody expects it to."""
    read = _NEEDED.keys() | family.defaults.keys() | ROPE_KEYS
    for key in sorted((raw.keys() & DECODER_KEYS) - read):
        value, accepted = raw[key], "leave it out or set it to null"
        if not value or (value == 1 and (value is not True) and _FACTORS.search(key)):
            continue
        if key in family.computes:
            if value == family.computes[key] and isinstance(value, bool) == isinstance(family.computes[key], bool):
                continue
            accepted = f"leave it out or set it to {family.computes[key]!r}"
        if key in _WINDOW_KEYS and not raw.get("use_sliding_window", family.defaults.get("use_sliding_window", True)):
            continue
        if key in ("hidden_act", "hidden_activation") and value == raw.get(family.activation_key, value):
            continue  # old files say it by both names
        if key == "layer_types" and {*value} == {"full_attention"} and raw.get("sliding_window") is None:
            continue
        raise ValueError(
            f"{key} = {value!r} is not supported for {family.name}: other decoders compute with it and this family "
            f"does not, so {accepted}"
        )


def _checked(key: str, value: Any, default: Any = None) -> Any:
    needed, is_fine = _TYPES[key]
    if not is_fine(value):
        otherwise = "" if default is None else f", or no such key, which means {default!r}"
        raise ValueError(f"{key} = {value!r}: {needed} is needed{otherwise}")
    return value


def is_whole(value: Any, least: int = 1, most: int = _MAX_SIZE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_positive(value: Any) -> bool:
    """A finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_Type = tuple[str, Callable[[Any], bool]]
_SIZE: Final[_Type] = (f"a whole number from 1 to {_MAX_SIZE}", is_whole)
_COUNT: Final[_Type] = (f"a whole number from 0 to {_MAX_SIZE}", lambda value: is_whole(value, 0))
_FLAG: Final[_Type] = ("true or false", lambda value: isinstance(value, bool))
_NUMBER: Final[_Type] = ("a number above 0", is_positive)
_TEXT: Final[_Type] = ("a text", lambda value: isinstance(value, str))
_TEXTS: Final[_Type] = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
)
_LAYERS: Final[_Type] = (
    "a list of layers' numbers",
    lambda value: isinstance(value, list) and all(is_whole(one, 0) for one in value),
)

_NEEDED: Final[Mapping[str, _Type]] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": (
        f"a whole number from 1 to {_MAX_LAYERS}",
        lambda value: is_whole(value, most=_MAX_LAYERS),
    ),
    "num_attention_heads": _SIZE,
    "max_position_embeddings": _SIZE,
}
_TYPES: Final[Mapping[str, _Type]] = {
    **_NEEDED,
    "num_key_value_heads": _SIZE,
    "head_dim": _SIZE,
    "sliding_window": ("a whole number from 1 or null", is_whole),
    "rms_norm_eps": _NUMBER,
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "qkv_bias": _FLAG,
    "query_pre_attn_scalar": _SIZE,
    "attn_logit_softcapping": _NUMBER,
    "final_logit_softcapping": _NUMBER,
    "layer_types": _TEXTS,
    "sliding_window_pattern": _SIZE,
    "use_sliding_window": _FLAG,
    "max_window_layers": _COUNT,
    "num_experts": _COUNT,
    "num_local_experts": _COUNT,
    "num_experts_per_tok": _SIZE,
    "moe_intermediate_size": _SIZE,
    "shared_expert_intermediate_size": _SIZE,
    "norm_topk_prob": _FLAG,
    "decoder_sparse_step": _SIZE,
    "rope_local_base_freq": _NUMBER,
    "mlp_only_layers": _LAYERS,
}
