"""The facts of a base's layers with a recurrent state, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...adapters.adapter import RECURRENT_MODULES
from .family import Family
from .sliding import recurrent_layers


@dataclass(frozen=True)
class RecurrentConfig:
    """The layers with a recurrent state (Gated DeltaNet). Sizes are of the whole model, before any sharding."""

    layers: tuple[bool, ...]  # True: a recurrent state, False: attention
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # newest inputs that the convolution sees, a token's own included

    @staticmethod
    def from_values(values: Mapping[str, Any], family: Family) -> RecurrentConfig | None:
        """None: no layer has such a state. Raises ValueError for contradicting numbers."""
        if not family.recurrent or not any(layers := recurrent_layers(values)):
            return None
        if all(layers):
            key = "layer_types" if values["layer_types"] else "full_attention_interval"
            raise ValueError(
                f"{key} = {values[key]!r}: of num_hidden_layers = {len(layers)} at least one with attention is needed"
            )
        num_key_heads, num_value_heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
        if num_value_heads % num_key_heads:
            raise ValueError(
                f"linear_num_value_heads = {num_value_heads}: a multiple of linear_num_key_heads = {num_key_heads} "
                "is needed"
            )
        if values[family.activation_key] != "silu":
            raise ValueError(
                f"{family.activation_key} = {values[family.activation_key]!r}: layers with a recurrent state are "
                "computed with 'silu' alone"
            )
        return RecurrentConfig(
            layers,
            num_key_heads,
            num_value_heads,
            values["linear_key_head_dim"],
            values["linear_value_head_dim"],
            values["linear_conv_kernel_dim"],
        )

    @property
    def num_channels(self) -> int:
        """Of the convolution, over q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def modules(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of RECURRENT_MODULES."""
        values = self.num_value_heads * self.value_dim
        num_out = (self.num_channels, values, self.num_value_heads, self.num_value_heads)
        sides = [*((hidden, each) for each in num_out), (values, hidden)]
        return dict(zip(RECURRENT_MODULES, sides, strict=True))
