"""What config.json says of a base's rotary position embedding. Needs no torch: routers and launchers read it too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# `dynamic` changes nothing within max_position_embeddings, which is the longest context of a base.
SCALINGS = ("default", "linear", "llama3", "yarn", "dynamic")
LONGROPE, PROPORTIONAL = "longrope", "proportional"  # of families that say so
NO_ROTARY = "none"  # of layers that do not rotate: all angles are 0
_ORIGINAL = "original_max_position_embeddings"
# The numbers of each scaling, those first that it needs. `truncate` is a flag.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    LONGROPE: (_ORIGINAL,),
    PROPORTIONAL: (),
}
_FACTORS = ("short_factor", "long_factor")  # lists of `longrope`, which divide the frequencies
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    LONGROPE: ("factor", "attention_factor"),
    PROPORTIONAL: ("factor",),
}
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
_TYPE_KEYS = ("rope_type", "type")
_AXES_KEYS = ("mrope_section", "mrope_interleaved")
_NOTES = frozenset({"finetuned", "max_position_embeddings"})  # of published files; nothing computes with them
CHUNK_SCALING = ("attn_scale", "floor_scale")  # likewise, of layers without a rotary embedding (Llama 4)
NORM_AMPLITUDE = "norm_amplitude"  # of q and k where a norm behind the embedding gets them
QUERY_SCALING = "llama_4_scaling_beta"  # of families whose queries are scaled by their position


@dataclass(frozen=True)
class RotaryConfig:
    theta: float
    kind: str  # one of SCALINGS, or NO_ROTARY
    options: Mapping[str, float]  # the scaling's own numbers, by their names in config.json
    share: float = 1.0  # of a head's dimensions that are rotated
    factors: tuple[tuple[float, ...], ...] = ()  # `longrope`: those of short contexts, and of long ones

    @staticmethod
    def from_model_config(
        raw: Mapping[str, Any],
        default_theta: float = 10000.0,
        default_share: float | None = None,
        scalings: tuple[str, ...] = SCALINGS,
        scales_queries: bool = False,
    ) -> RotaryConfig:
        """Reads `rope_parameters` (new) or `rope_theta` with `rope_scaling` (old) of a config.json.

        `default_share`: None: `partial_rotary_factor` is not read. `scales_queries`: the numbers that `query_scales`
        needs are read too. Raises ValueError for what this decoder or transformers does not compute.
        """
        parameters = _parameters(raw)
        types = [parameters.pop(key, None) for key in _TYPE_KEYS]
        kind = str(types[0] or types[1] or "default")
        if kind not in scalings:
            raise ValueError(f"rope_type {kind!r} is not supported: {', '.join(scalings)} are accepted")
        theta = parameters.pop("rope_theta", raw.get("rope_theta", default_theta))
        if not _is_positive(theta):
            raise ValueError(f"rope_theta = {theta!r}: a number above 0 is needed, or no such key")
        if kind == "yarn" and theta == 1:
            raise ValueError(f"rope_theta = {theta!r}: with rope_type 'yarn' a number other than 1 is needed")
        share = parameters.pop("partial_rotary_factor", raw.get("partial_rotary_factor", default_share))
        if share not in (None, 1) and default_share is None:
            raise ValueError("partial_rotary_factor other than 1 is not supported")
        if share is not None and not (_is_positive(share) and share <= 1):
            raise ValueError(f"partial_rotary_factor = {share!r}: a number above 0 and up to 1 is needed")
        _set_original_length(kind, parameters, raw)
        factors = tuple(_factors(key, parameters.pop(key, None)) for key in _FACTORS) if kind == LONGROPE else ()
        share = 1.0 if share is None else float(share)
        needed = (*_NEEDED[kind], *((QUERY_SCALING, _ORIGINAL) if scales_queries else ()))
        return RotaryConfig(float(theta), kind, _options(kind, parameters, needed), share, factors)

    def num_dimensions(self, head_dim: int) -> int:
        """Dimensions of a head that its share is, from which frequencies follow."""
        return head_dim if self.kind == PROPORTIONAL else int(head_dim * self.share)

    def num_rotated(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated, the first ones. Raises ValueError if there are none, or no pairs.

        They come in pairs: of an odd share, as in transformers, one more is rotated. With `proportional` all are: those
        of the share, and the others by angles of 0.
        """
        number = self.num_dimensions(head_dim)
        if head_dim % 2:  # those that are not rotated have places in pairs, too
            raise ValueError(f"heads of {head_dim} dimensions are not supported: an even number is needed")
        if number == 0 or (number % 2 and self.kind == "yarn"):
            raise ValueError(
                f"partial_rotary_factor = {self.share:g} rotates {number} of a head's {head_dim} dimensions: at least "
                "1 is needed, and an even number if rope_type is 'yarn'"
            )
        return number + number % 2

    @property
    def longest(self) -> float | None:
        """Tokens up to which the base was stretched; None: config.json does not say it of this scaling."""
        if self.kind == "yarn":
            return self.options["factor"] * self.options[_ORIGINAL]
        return None


def _parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{key} = {value!r}: an object is needed, or null")
    if old and new:
        raise ValueError(
            "rope_scaling stands beside rope_parameters: keep one, since transformers takes rope_scaling and drops the "
            "rope_theta of rope_parameters"
        )
    return dict(new or old or {})


def _set_original_length(kind: str, parameters: dict[str, Any], raw: Mapping[str, Any]) -> None:
    """Where the scaling needs it and does not say it, it is the model's."""
    key = _ORIGINAL
    if key in _NEEDED[kind]:
        length = parameters.setdefault(key, raw[key if kind == LONGROPE else "max_position_embeddings"])
        if raw.get(key, length) != length:
            raise ValueError(f"{key} = {raw[key]!r} contradicts {length!r} of the rotary embedding: keep one")


def _options(kind: str, parameters: Mapping[str, Any], needed: Sequence[str]) -> dict[str, float]:
    options = {}
    for key, value in parameters.items():
        if key == "truncate" and kind == "yarn":
            if not isinstance(value, bool):
                raise ValueError(f"{key} = {value!r} of a rotary embedding: true or false is needed")
            options[key] = float(value)
        elif key in needed or (key in _OPTIONAL.get(kind, ()) and value is not None):
            if not _is_positive(value):
                raise ValueError(f"{key} = {value!r} of a rotary embedding: a number above 0 is needed")
            options[key] = float(value)
        elif value and key not in _NOTES and key not in _OPTIONAL.get(kind, ()):
            accepted = ", ".join(("rope_theta", *needed, *_OPTIONAL.get(kind, ())))
            raise ValueError(
                f"{key} = {value!r} is not supported for a rotary embedding of type {kind!r}: {accepted} are accepted"
            )
    for key in needed:
        if key not in options:
            raise KeyError(key)
    if kind == "llama3" and options["high_freq_factor"] <= options["low_freq_factor"]:
        raise ValueError(
            f"high_freq_factor = {options['high_freq_factor']:g}: more than low_freq_factor, "
            f"{options['low_freq_factor']:g}, is needed"
        )
    return options


def _factors(key: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not value or not all(map(_is_positive, value)):
        raise ValueError(f"{key} = {value!r} of a rotary embedding: a list of numbers above 0 is needed")
    return tuple(map(float, value))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def head_order(head_dim: int, num_rotated: int, rotates_neighbours: bool) -> tuple[int, ...]:
    """The stored row of each row of a head, so that row i is rotated with row i + head_dim / 2; empty: all as stored.

    Queries and keys in one order have the same products. What is not rotated is paired too, by angles of 0.
    """
    if rotates_neighbours:
        pairs = [(row, row + 1) for row in range(0, num_rotated, 2)]
    else:
        pairs = [(row, row + num_rotated // 2) for row in range(num_rotated // 2)]
    num_others = (head_dim - num_rotated) // 2
    pairs += [(row, row + num_others) for row in range(num_rotated, num_rotated + num_others)]
    order = (*(first for first, _ in pairs), *(second for _, second in pairs))
    return () if order == tuple(range(head_dim)) else order


def with_default_rope(raw: Mapping[str, Any], default: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The same config with `rope_parameters`, where it says nothing of the rotary embedding but perhaps its theta."""
    if default is None or raw.get("rope_parameters") is not None or raw.get("rope_scaling"):
        return raw
    return {**raw, "rope_parameters": default}


def with_stretched_theta(raw: Mapping[str, Any], head_dim: int, default_theta: float) -> Mapping[str, Any]:
    """The same config, where a `dynamic` embedding has a fixed `alpha` (Hunyuan), with the theta that this makes."""
    parameters = _parameters(raw)
    kind, alpha = parameters.get("rope_type", parameters.get("type")), parameters.get("alpha")
    if kind != "dynamic" or not alpha:
        return raw
    theta = parameters.get("rope_theta", raw.get("rope_theta", default_theta))
    for key, value in (("alpha", alpha), ("rope_theta", theta)):
        if not _is_positive(value):
            raise ValueError(f"{key} = {value!r} of a rotary embedding: a number above 0 is needed")
    if head_dim < 3:
        raise ValueError(f"alpha = {alpha!r} of a rotary embedding: heads of more than 2 dimensions are needed")
    stretched = theta * alpha ** (head_dim / (head_dim - 2))
    return {**raw, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": stretched}}


def yarn_amplitude(options: Mapping[str, float]) -> float:
    """The amplitude of YaRN, by which cosines and sines are multiplied."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(options["factor"]) + 1.0 if options["factor"] > 1 else 1.0

    if (amplitude := options.get("attention_factor")) is not None:
        return amplitude
    if options.get("mscale") and options.get("mscale_all_dim"):
        return of(options["mscale"]) / of(options["mscale_all_dim"])
    return of(1.0)


def without_amplitude(rotaries: Sequence[RotaryConfig]) -> tuple[RotaryConfig, ...]:
    """The same of families that norm behind the embedding, which takes an amplitude away, but for its epsilon."""
    return tuple(
        replace(
            rotary,
            options={**rotary.options, "attention_factor": 1.0, NORM_AMPLITUDE: yarn_amplitude(rotary.options)},
        )
        if rotary.kind == "yarn"
        else rotary
        for rotary in rotaries
    )


def without_axes(raw: Mapping[str, Any], has_axes: bool) -> dict[str, Any]:
    """The same config for positions of text, which are equal on all axes of a rotary embedding for pictures.

    `has_axes`: they have to be named. Raises KeyError otherwise.
    """
    plain = dict(raw)
    if has_axes and _AXES_KEYS[0] not in _parameters(raw):
        raise KeyError(_AXES_KEYS[0])
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := raw.get(key), Mapping):
            kinds = {name: "default" if rope[name] == "mrope" else rope[name] for name in _TYPE_KEYS if name in rope}
            plain[key] = {name: value for name, value in rope.items() if name not in _AXES_KEYS} | kinds
    return plain


def layer_rotaries(
    raw: Mapping[str, Any],
    slides: Sequence[bool],
    theta: float,
    local_theta: float | None,
    share: float | None = None,
    scalings: tuple[str, ...] = SCALINGS,
    scales_queries: bool = False,
) -> tuple[RotaryConfig, ...]:
    """The embedding of each layer. With a `local_theta`, its default, layers that slide have their own (Gemma 3)."""
    if local_theta is None:
        return (RotaryConfig.from_model_config(raw, theta, share, scalings, scales_queries),) * len(slides)
    kinds = {} if raw.get("rope_scaling") and not raw.get("rope_parameters") else _parameters(raw)
    for key in kinds:
        if key not in _KINDS_OF_LAYERS:
            raise ValueError(f"rope_parameters has {key!r}: {', '.join(_KINDS_OF_LAYERS)} are accepted")
        if (kinds[key] or {}).get("truncate") is False:  # transformers looks for it outside of the two
            raise ValueError("truncate = false is not supported in a rotary embedding of some layers")
    wide = RotaryConfig.from_model_config(
        {**raw, "rope_parameters": kinds.get("full_attention")}, theta, share, scalings, scales_queries
    )
    local = RotaryConfig.from_model_config(
        {
            "rope_parameters": kinds.get("sliding_attention"),
            "rope_theta": raw.get("rope_local_base_freq", local_theta),
            "max_position_embeddings": raw["max_position_embeddings"],
        },
        local_theta,
    )
    return tuple(local if slide else wide for slide in slides)
