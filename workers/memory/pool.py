"""A worker's one tensor of pages, for KV and adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...kernels.attention import LayerKV
from ...kernels.float8_kv import float8_view
from ...kernels.huge_pages import zeros_in_huge_pages
from ..config import KVDtype
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
    kv_dtype: KVDtype = "dtype"  # "dtype": the pool's own

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.slab * self.dtype.itemsize


def plan_pool(
    sharding: ModelSharding, block_size: int, dtype: torch.dtype, pool_bytes: int, kv_dtype: KVDtype = "dtype"
) -> PoolGeometry:
    """The pool of one worker: as many pages as fit into `pool_bytes`. Raises ValueError if not even one fits."""
    page_bytes = pool_of(sharding, block_size, dtype, 1, kv_dtype).page_bytes
    if pool_bytes < page_bytes:
        raise ValueError(f"pool_bytes = {pool_bytes}: a page of this model takes {page_bytes}, and one is needed")
    return pool_of(sharding, block_size, dtype, pool_bytes // page_bytes, kv_dtype)


def pool_of(
    sharding: ModelSharding, block_size: int, dtype: torch.dtype, num_pages: int, kv_dtype: KVDtype = "dtype"
) -> PoolGeometry:
    """The pool of one worker with `num_pages` pages."""
    config, slab = sharding.config, sharding.slab(block_size, kv_dtype, dtype.itemsize)
    kv = (sharding.num_kv_heads, config.head_dim)
    return PoolGeometry(num_pages, config.num_layers, slab, block_size, *kv, dtype, kv_dtype)


def make_pool(geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
    """`[num_pages, num_layers, slab]`. Zeroed, because masked attention still multiplies what it does not see."""
    shape = (geometry.num_pages, geometry.num_layers, geometry.slab)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=geometry.dtype, device=device)
    return zeros_in_huge_pages(math.prod(shape), geometry.dtype).view(shape)


def kv_layers(pool: torch.Tensor, geometry: PoolGeometry) -> tuple[LayerKV, ...]:
    """The same pages as KV, by layer: `[num_pages, 2, block_size, num_kv_heads, head_dim]`, or `Float8KV` of these."""
    shape = (geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    if geometry.kv_dtype == "float8":
        return tuple(float8_view(pool[:, layer], *shape) for layer in range(geometry.num_layers))
    return tuple(pool[:, layer].unflatten(1, (2, *shape)) for layer in range(geometry.num_layers))
