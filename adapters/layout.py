"""Where an adapter's matrices lie in the pages of the unified pool.

Per layer an adapter is one virtual array: for each present module, A `[rank, in]` then B transposed `[rank, out]`,
row after row. The array is cut into slabs of `slab` elements; slab i of every layer lies in the adapter's i-th page, a
block `[num_layers, slab]`. One page table therefore serves all layers, and one offset table all layers too. A module
whose rank differs between layers is padded with zero rows to its largest rank. The idea of one paged pool for KV and
adapters is S-LoRA's (arXiv 2311.03285) §5.1; pages as plain bytes make it hold for grouped-query attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal

from .adapter import MODULES, BaseShape

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ModuleOffsets:
    """Offsets of one module in the virtual array of a layer, in elements."""

    rank: int
    a: int  # A [rank, in]
    b: int  # B transposed [rank, out]


@dataclass(frozen=True)
class AdapterLayout:
    """How adapters of one base are packed for one degree of tensor parallelism (1 for now), page size and dtype."""

    shape: BaseShape
    slab: int  # elements that a page holds in one layer
    dtype: Dtype

    @property
    def tile(self) -> int:
        """Elements of the widest run that never straddles a slab at any row of any module."""
        return gcd(self.slab, *(side for module in MODULES for side in self.shape.modules[module]))

    @property
    def key(self) -> str:
        """Names the layout: equal keys mean byte-identical packing."""
        return f"tp1-slab{self.slab}-layers{self.shape.num_layers}-{self.dtype}"

    def offsets(self, module_ranks: Mapping[str, int]) -> dict[str, ModuleOffsets]:
        """Offsets of the present modules, in packing order."""
        found: dict[str, ModuleOffsets] = {}
        start = 0
        for module in MODULES:
            rank = module_ranks.get(module, 0)
            if rank == 0:
                continue
            num_in, num_out = self.shape.modules[module]
            found[module] = ModuleOffsets(rank, start, start + rank * num_in)
            start += rank * (num_in + num_out)
        return found

    def num_elements(self, module_ranks: Mapping[str, int]) -> int:
        """Elements of the virtual array of one layer."""
        return sum(rank * sum(self.shape.modules[module]) for module, rank in module_ranks.items())

    def num_pages(self, module_ranks: Mapping[str, int]) -> int:
        """Pages that an adapter takes, the same on every worker of a gang."""
        return -(-self.num_elements(module_ranks) // self.slab)
