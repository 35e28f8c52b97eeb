"""The one tensor of pages that a worker has, for KV and adapters alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...kernels.huge_pages import zeros_in_huge_pages
from ..models.sharding import ModelSharding


@dataclass(frozen=True)
class PoolGeometry:
    """A page is `[num_layers, slab]` elements, contiguous: `block_size` tokens of KV in every layer, or a piece of an
    adapter."""

    num_pages: int
    num_layers: int
    slab: int  # elements
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.slab * self.dtype.itemsize


def plan_pool(sharding: ModelSharding, block_size: int, dtype: torch.dtype, pool_bytes: int) -> PoolGeometry:
    """The pool of one worker: as many pages as fit into `pool_bytes`. Raises ValueError if that is none."""
    page_bytes = pool_of(sharding, block_size, dtype, 1).page_bytes
    if pool_bytes < page_bytes:
        raise ValueError(f"pool_bytes = {pool_bytes}: a page of this model takes {page_bytes}, and one is needed")
    return pool_of(sharding, block_size, dtype, pool_bytes // page_bytes)


def pool_of(sharding: ModelSharding, block_size: int, dtype: torch.dtype, num_pages: int) -> PoolGeometry:
    """The pool of one worker that has so many pages."""
    config, slab = sharding.config, sharding.slab(block_size)
    return PoolGeometry(num_pages, config.num_layers, slab, block_size, sharding.num_kv_heads, config.head_dim, dtype)


def make_pool(geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
    """`[num_pages, num_layers, slab]`. Zeroed, because masked attention still multiplies what it does not see."""
    shape = (geometry.num_pages, geometry.num_layers, geometry.slab)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=geometry.dtype, device=device)
    return zeros_in_huge_pages(math.prod(shape), geometry.dtype).view(shape)


def kv_view(pool: torch.Tensor, geometry: PoolGeometry) -> torch.Tensor:
    """The same pages as KV: `[num_pages, num_layers, 2, block_size, num_kv_heads, head_dim]`."""
    return pool.view(
        geometry.num_pages, geometry.num_layers, 2, geometry.block_size, geometry.num_kv_heads, geometry.head_dim
    )
