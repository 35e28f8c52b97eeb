"""The facts of multi-head latent attention (DeepSeek V2, arXiv 2405.04434, §2.1), read from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .family import Family
from .rotary_config import RotaryConfig


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of the whole model, before any sharding.

    A token's keys and values of all heads are made of one latent vector. A page holds that, and behind it a part of the
    key that is rotated and the same for all heads.
    """

    query_rank: int | None  # of what queries are made of; None: they are made of the hidden state
    rank: int  # elements of the latent
    plain_dim: int  # elements of a head's q and k that are not rotated
    rotated_dim: int  # elements of those that are
    value_dim: int
    rotates_neighbours: bool  # pairs (0, 1), (2, 3) …, not (0, half), (1, half + 1) …
    has_input_bias: bool  # of q_a_proj and kv_a_proj_with_mqa

    @staticmethod
    def from_values(values: Mapping[str, Any], family: Family) -> LatentConfig:
        """Raises ValueError for sizes that transformers does not compute with."""
        latent = LatentConfig(
            values["q_lora_rank"],
            values["kv_lora_rank"],
            values["qk_nope_head_dim"],
            values["qk_rope_head_dim"],
            values["v_head_dim"],
            bool(values.get("rope_interleave", family.rotates_neighbours)),
            bool(values["attention_bias"]),
        )
        for key, size in (("kv_lora_rank", latent.rank), ("qk_rope_head_dim", latent.rotated_dim)):
            if size % 2:
                raise ValueError(f"{key} = {size}: an even number is needed")
        num_heads = values["num_attention_heads"]
        if values["num_key_value_heads"] not in (None, num_heads):
            raise ValueError(
                f"num_key_value_heads = {values['num_key_value_heads']}: num_attention_heads = {num_heads} is needed, "
                "or null, since all heads have the same latent"
            )
        head_dim = latent.rotated_dim if family.rotated_share is None else latent.query_dim
        for key, size in (("qk_head_dim", latent.query_dim), ("head_dim", head_dim)):
            if values.get(key) not in (None, size):
                raise ValueError(f"{key} = {values[key]}: leave it out, or set it to {size}, which follows from others")
        return latent

    @property
    def query_dim(self) -> int:
        """Elements of a head's q as it is projected."""
        return self.plain_dim + self.rotated_dim

    @property
    def width(self) -> int:
        """Elements that a page holds of a token, which are a key of all heads."""
        return self.rank + self.rotated_dim

    @property
    def num_biases(self) -> int:
        """Of a layer, o_proj's left out."""
        return self.width + (self.query_rank or 0) if self.has_input_bias else 0

    def modules(self, hidden: int, num_heads: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's linears."""
        query = num_heads * self.query_dim
        queries = {"q_proj": (hidden, query)}
        if self.query_rank is not None:
            queries = {"q_a_proj": (hidden, self.query_rank), "q_b_proj": (self.query_rank, query)}
        return queries | {
            "kv_a_proj_with_mqa": (hidden, self.width),
            "kv_b_proj": (self.rank, num_heads * (self.plain_dim + self.value_dim)),
            "o_proj": (num_heads * self.value_dim, hidden),
        }

    def rotary(self, rotary: RotaryConfig) -> RotaryConfig:
        """The embedding of what is rotated, which is rotated whole. Raises ValueError for another share of a head."""
        if rotary.share != 1.0 and int(self.query_dim * rotary.share) != self.rotated_dim:
            raise ValueError(
                f"partial_rotary_factor = {rotary.share:g} of {self.query_dim} dimensions contradicts qk_rope_head_dim "
                f"= {self.rotated_dim}: leave it out"
            )
        return replace(rotary, share=1.0)

    def scale(self, rotary: RotaryConfig) -> float:
        """Of scores. Where YaRN stretches the context `mscale_all_dim` is of all of a key, not of what is rotated."""
        scale, options = float(self.query_dim**-0.5), rotary.options
        if "mscale_all_dim" in options and options["factor"] > 1:
            scale *= (0.1 * options["mscale_all_dim"] * math.log(options["factor"]) + 1) ** 2
        return scale
