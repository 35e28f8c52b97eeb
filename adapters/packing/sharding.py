"""How one worker's part of a base's modules is cut, and with it its part of every adapter.

Column-parallel modules are cut along their outputs, row-parallel ones along their inputs (Megatron-LM, arXiv
1909.08053, §3). Adapters follow them as S-LoRA (arXiv 2311.03285) §6 has it, so that only rank-sized vectors are added
to what the workers of a gang exchange:

- column-parallel: A by rows (ranks), B by outputs. Workers gather the rank-sized vectors.
- row-parallel: A by inputs, B by outputs. Workers add up the rank-sized vectors; each then adds its outputs to its
  partial sum of the base, whose own all-reduce brings them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """The part of worker `rank` of `degree`. A module in neither mapping is not cut: every worker has it whole."""

    degree: int
    rank: int
    outputs: Mapping[str, tuple[int, int]]  # column-parallel: start and stop of the module's outputs
    inputs: Mapping[str, tuple[int, int]]  # row-parallel: start and stop of the module's inputs

    def key(self, modules: Iterable[str]) -> str:
        """Names the part; equal keys cut the modules alike."""
        uncut = any(module not in self.outputs and module not in self.inputs for module in modules)
        return f"tp{self.degree}-{self.rank}{'-uncut' if uncut else ''}"

    def padded(self, lora_rank: int) -> int:
        """The rank that is packed: a multiple of the degree, so that all workers' parts are equal."""
        return -(-lora_rank // self.degree) * self.degree
