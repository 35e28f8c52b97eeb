"""How the modules of a base are cut into parts for the workers of a gang, and every adapter with them.

Column-parallel modules are cut along their outputs, row-parallel ones along their inputs (Megatron-LM, arXiv
1909.08053, §3). Adapters are cut to match, as in S-LoRA (arXiv 2311.03285, §6), so that workers exchange no more than
rank-sized vectors for them:

- column-parallel: A by rows (ranks), B by outputs. An all-gather gives every worker all rank-sized vectors.
- row-parallel: A by inputs, B by outputs. An all-reduce adds up the rank-sized vectors. Each worker then adds its
  outputs of the adapter to its partial sum of the base, and the base's own all-reduce completes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """The part of worker `rank` among `degree` workers. A module in neither mapping is whole on every worker."""

    degree: int
    rank: int
    outputs: Mapping[str, tuple[int, int]]  # column-parallel: start and stop of the module's outputs
    inputs: Mapping[str, tuple[int, int]]  # row-parallel: start and stop of the module's inputs

    def key(self, modules: Iterable[str]) -> str:
        """The part's name. Parts with equal keys cut the modules alike."""
        uncut = any(module not in self.outputs and module not in self.inputs for module in modules)
        return f"tp{self.degree}-{self.rank}{'-uncut' if uncut else ''}"

    def padded(self, lora_rank: int) -> int:
        """The rank that is packed: `lora_rank` rounded up to a multiple of the degree, so that parts are equal."""
        return -(-lora_rank // self.degree) * self.degree
