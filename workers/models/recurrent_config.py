"""The facts of a base's layers with a recurrent state, read from config.json."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...adapters.adapter import OutputGroups
from .config_keys import limits
from .family import Family
from .sliding import recurrent_layers

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class RecurrentPart:
    """What a worker has of a layer with a recurrent state: starts and stops in the whole layer's, side by side."""

    outputs: Mapping[str, tuple[Range, ...]]  # of the linears that give the rule's inputs
    inputs: Range  # of the linear of the rule's results
    heads: Range  # that have a matrix of state each
    channels: tuple[Range, ...]  # of the convolution

    @property
    def num_channels(self) -> int:
        return sum(stop - start for start, stop in self.channels)


@dataclass(frozen=True)
class RecurrentConfig(ABC):
    """The layers with a recurrent state, by one rule. Sizes are of the whole model, before any sharding.

    A layer's state is a matrix of each head, in float32, and the newest inputs of the layer's convolution.
    """

    layers: tuple[bool, ...]  # True: a recurrent state, False: attention
    kernel: int  # newest inputs that the convolution sees, a token's own included
    block: str  # of a layer, in names of tensors
    has_bias: bool  # of the linears that give the rule's inputs
    output_has_bias: bool  # of that of its results

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """That have a matrix of state each."""

    @property
    @abstractmethod
    def head_size(self) -> int:
        """Elements of a head's matrix."""

    @property
    @abstractmethod
    def num_channels(self) -> int:
        """Of the convolution."""

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """Of a layer beside its linears and norm."""

    @property
    @abstractmethod
    def norm_width(self) -> int:
        """Weights of a layer's norm of what its rule gives."""

    @property
    @abstractmethod
    def shared(self) -> Mapping[str, int]:
        """What the workers of a gang share evenly, by its name."""

    def unsupported_degree(self, degree: int) -> str | None:
        """What a gang of so many workers cannot share beside `shared`, and what it could; None: nothing."""
        return None

    @abstractmethod
    def modules(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's linears, that of the result last."""

    @property
    def output_groups(self) -> Mapping[str, OutputGroups]:
        """Of the linears whose outputs are not in the order of the rule's inputs."""
        return {}

    @abstractmethod
    def part(self, rank: int, degree: int) -> RecurrentPart:
        """That of one worker of a gang."""


@dataclass(frozen=True)
class DeltaConfig(RecurrentConfig):
    """Gated DeltaNet."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    is_grouped: bool  # two linears give the inputs, key head after key head (Qwen3-Next)

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def head_size(self) -> int:
        return self.key_dim * self.value_dim

    @property
    def num_channels(self) -> int:
        """Over q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_weights(self) -> int:
        return self.num_channels * self.kernel + 2 * self.num_value_heads

    @property
    def norm_width(self) -> int:
        return self.value_dim

    @property
    def shared(self) -> Mapping[str, int]:
        return {"key heads of layers with a recurrent state": self.num_key_heads}

    def modules(self, hidden: int) -> dict[str, tuple[int, int]]:
        values, heads = self.num_value_heads * self.value_dim, self.num_value_heads
        if self.is_grouped:
            num_out = {"in_proj_qkvz": self.num_channels + values, "in_proj_ba": 2 * heads}
        else:
            num_out = {"in_proj_qkv": self.num_channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        return {**{name: (hidden, number) for name, number in num_out.items()}, "out_proj": (values, hidden)}

    @property
    def output_groups(self) -> Mapping[str, OutputGroups]:
        """Where they are grouped each key head has its q, k, v and z, and its b and a."""
        if not self.is_grouped:
            return {}
        heads = self.num_value_heads // self.num_key_heads
        values = heads * self.value_dim
        widths = self.key_dim, self.key_dim, values, values
        return {"in_proj_qkvz": OutputGroups(widths), "in_proj_ba": OutputGroups((heads, heads))}

    def part(self, rank: int, degree: int) -> RecurrentPart:
        def share(count: int, first: int = 0) -> Range:
            return first + rank * count // degree, first + (rank + 1) * count // degree

        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        qkv = share(keys), share(keys, keys), share(values, 2 * keys)
        heads = share(self.num_value_heads)
        outputs = {"in_proj_qkv": qkv, "in_proj_z": (share(values),), "in_proj_b": (heads,), "in_proj_a": (heads,)}
        if self.is_grouped:
            both = 2 * self.num_value_heads
            outputs = {"in_proj_qkvz": (share(self.num_channels + values),), "in_proj_ba": (share(both),)}
        return RecurrentPart(outputs, share(values), heads, qkv)


@dataclass(frozen=True)
class ConvolutionConfig(RecurrentConfig):
    """Gated short convolutions, which have no matrices."""

    hidden: int

    num_heads = head_size = norm_width = 0

    @property
    def num_channels(self) -> int:
        return self.hidden

    @property
    def num_weights(self) -> int:
        return self.hidden * (self.kernel + self.has_bias)

    @property
    def shared(self) -> Mapping[str, int]:
        return {"channels of layers with a convolution": self.hidden}

    def modules(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {"in_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden)}

    def part(self, rank: int, degree: int) -> RecurrentPart:
        part, hidden = self.hidden // degree, self.hidden
        pieces = tuple((first + rank * part, first + (rank + 1) * part) for first in (0, hidden, 2 * hidden))
        return RecurrentPart({"in_proj": pieces}, pieces[0], (0, 0), pieces[:1])


@dataclass(frozen=True)
class MambaConfig(RecurrentConfig):
    """Mamba-2."""

    num_state_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    has_conv_bias: bool
    step_limits: tuple[float, float]
    has_norm: bool = True
    gates_first: bool = True  # before the norm

    @property
    def num_heads(self) -> int:
        return self.num_state_heads

    @property
    def head_size(self) -> int:
        return self.head_dim * self.state_size

    @property
    def width(self) -> int:
        """Of what the rule gives."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Over u, B and C."""
        return self.width + 2 * self.num_groups * self.state_size

    @property
    def num_weights(self) -> int:
        return self.num_channels * (self.kernel + self.has_conv_bias) + 3 * self.num_heads

    @property
    def norm_width(self) -> int:
        return self.width if self.has_norm else 0

    @property
    def shared(self) -> Mapping[str, int]:
        return {"heads of layers with a recurrent state": self.num_heads}

    def unsupported_degree(self, degree: int) -> str | None:
        if self.num_groups % degree and degree % self.num_groups:
            return f"{self.num_groups} groups of a recurrent state: a divisor or a multiple is needed"
        if self.norm_spans(degree) and not self.gates_first:
            return f"{self.num_groups} groups of a recurrent state that are gated after their norm: a divisor is needed"
        return None

    def modules(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {"in_proj": (hidden, self.width + self.num_channels + self.num_heads), "out_proj": (self.width, hidden)}

    def groups(self, rank: int, degree: int) -> Range:
        """Those of a worker's heads. Where workers outnumber them, several workers have the same."""
        first = rank * self.num_groups // degree
        return first, first + max(1, self.num_groups // degree)

    def norm_spans(self, degree: int) -> bool:
        """Whether heads that are normed together are on several workers of a gang."""
        return self.has_norm and degree > self.num_groups

    def part(self, rank: int, degree: int) -> RecurrentPart:
        width, size = self.width, self.state_size
        heads = rank * self.num_heads // degree, (rank + 1) * self.num_heads // degree
        results, states = _times(heads, self.head_dim), _times(self.groups(rank, degree), size)
        firsts = (0, self.width, width + self.num_groups * size)
        channels = tuple(_behind(first, each) for first, each in zip(firsts, (results, states, states), strict=True))
        inputs = (results, *(_behind(width, each) for each in channels), _behind(width + self.num_channels, heads))
        return RecurrentPart({"in_proj": inputs}, results, heads, channels)


def _times(part: Range, factor: int) -> Range:
    return part[0] * factor, part[1] * factor


def _behind(first: int, part: Range) -> Range:
    return first + part[0], first + part[1]


def kinds_of_layers(family: Family) -> tuple[str, ...]:
    """Entries of `layer_types` that are not of layers with attention, and other names of these."""
    kinds: Mapping[str | None, tuple[str, ...]] = {
        None: (),
        "short_convolution": ("conv",),
        "mamba": ("linear_attention", "mamba", "attention"),
        "parallel_mamba": (),
    }
    return (*kinds.get(family.recurrent, ("linear_attention",)), *(("mlp", "moe") if family.has_halves else ()))


def read_recurrent(values: Mapping[str, Any], family: Family) -> RecurrentConfig | None:
    """The layers with a recurrent state of a base whose family reads these keys; None: it has none.

    Raises ValueError for contradicting numbers.
    """
    if family.recurrent is None:
        return None
    if family.recurrent == "parallel_mamba":
        _check_activation(values, family)
        return _mamba(values, (True,) * values["num_hidden_layers"])
    layers = recurrent_layers(values)
    if family.has_halves:
        if not any(layers) or {*values["layer_types"]}.isdisjoint(("full_attention", "attention")):
            raise ValueError(
                f"layer_types = {values['layer_types']!r}: layers with attention and with a recurrent state are needed"
            )
        return replace(_mamba(_named_as_mamba(values), layers), block=family.mixer_block)
    mamba = _mamba(values, layers) if family.recurrent == "mamba" else None  # transformers checks these numbers too
    if not any(layers):
        return None
    if all(layers):
        rules = () if values["layer_types"] else ("full_attn_idxs", "full_attention_interval")
        key = next((key for key in rules if key in values), "layer_types")
        raise ValueError(
            f"{key} = {values[key]!r}: of num_hidden_layers = {len(layers)} at least one with attention is needed"
        )
    if family.recurrent == "short_convolution":
        bias = values["conv_bias"]
        return ConvolutionConfig(layers, values["conv_L_cache"], "conv", bias, bias, values["hidden_size"])
    _check_activation(values, family)
    return mamba or _delta(values, family, layers)


def _check_activation(values: Mapping[str, Any], family: Family) -> None:
    """Raises ValueError for one with which the convolution before a recurrent state is not computed."""
    if values[family.activation_key] != "silu":
        raise ValueError(
            f"{family.activation_key} = {values[family.activation_key]!r}: layers with a recurrent state are "
            "computed with 'silu' alone"
        )


def _delta(values: Mapping[str, Any], family: Family, layers: tuple[bool, ...]) -> DeltaConfig:
    num_key_heads, num_value_heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if num_value_heads % num_key_heads:
        raise ValueError(
            f"linear_num_value_heads = {num_value_heads}: a multiple of linear_num_key_heads = {num_key_heads} "
            "is needed"
        )
    return DeltaConfig(
        layers,
        values["linear_conv_kernel_dim"],
        "linear_attn",
        False,
        False,
        num_key_heads,
        num_value_heads,
        values["linear_key_head_dim"],
        values["linear_value_head_dim"],
        family.recurrent == "grouped_delta",
    )


def _named_as_mamba(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nemotron-H's keys by the names that other families have for them. Steps have no upper limit."""
    return {
        "mamba_n_heads": values["mamba_num_heads"],
        "mamba_n_groups": values["n_groups"],
        "mamba_d_head": values["mamba_head_dim"],
        "mamba_d_ssm": values["mamba_num_heads"] * values["mamba_head_dim"],
        "mamba_d_state": values["ssm_state_size"],
        "mamba_d_conv": values["conv_kernel"],
        "mamba_conv_bias": values["use_conv_bias"],
        "mamba_proj_bias": values["use_bias"],
        "time_step_limit": [values["time_step_min"], math.inf],
    }


def _mamba(values: Mapping[str, Any], layers: tuple[bool, ...]) -> MambaConfig:
    num_heads, num_groups = values["mamba_n_heads"], values["mamba_n_groups"]
    width = values.get("mamba_d_ssm") or values["mamba_expand"] * values["hidden_size"]
    head_dim = width // num_heads if values["mamba_d_head"] == "auto" else values["mamba_d_head"]
    if head_dim * num_heads != width:
        raise ValueError(
            f"mamba_n_heads = {num_heads} of mamba_d_head = {head_dim}: mamba_expand * hidden_size = {width} features "
            "are needed"
        )
    if num_heads % num_groups:
        raise ValueError(f"mamba_n_heads = {num_heads}: a multiple of mamba_n_groups = {num_groups} is needed")
    step_limits = limits(values["time_step_limit"])
    assert step_limits is not None
    return MambaConfig(
        layers,
        values["mamba_d_conv"],
        "mamba",
        values["mamba_proj_bias"],
        values.get("projectors_bias", values["mamba_proj_bias"]),
        num_heads,
        num_groups,
        head_dim,
        values["mamba_d_state"],
        values["mamba_conv_bias"],
        step_limits,
        has_norm=values.get("mamba_rms_norm", True),
        gates_first=not values.get("mamba_norm_before_gate", False),
    )
