"""How the modules of a base are cut into parts for the workers of a gang, and every adapter with them.

Column-parallel modules are cut along their outputs, row-parallel ones along their inputs (Megatron-LM, arXiv
1909.08053, §3). Adapters are cut to match, where the base is cut, so that workers exchange nothing for them:

- column-parallel: A is whole on every worker, B is cut by outputs, and each worker has its outputs of both.
- row-parallel: A is cut by inputs, B is whole. Each worker adds what its inputs give to its partial sum of the base,
  and the base's own all-reduce completes both.

S-LoRA (arXiv 2311.03285, §6) cuts the other matrix of each pair, too, and exchanges rank-sized vectors: less memory,
and four more collectives a layer, each of which takes as long as the base's when rows are few.
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
        return f"gang{self.degree}-{self.rank}{'-uncut' if uncut else ''}"
