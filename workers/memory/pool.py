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
from ..window_pages import FullLayers


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
    full_layers: FullLayers | None = None  # page tables have numbers of slabs; None: of pages, and layers are in order

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
    return PoolGeometry(num_pages, config.num_layers, slab, block_size, *kv, dtype, kv_dtype, config.full_layers)


def make_pool(geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
    """`[num_pages, num_layers, slab]`. Zeroed, because masked attention still multiplies what it does not see.

    With one page more where tables have numbers of slabs: kernels may read, and ignore, what lies behind a dense page.
    """
    num_pages = geometry.num_pages + (geometry.full_layers is not None)
    shape = (num_pages, geometry.num_layers, geometry.slab)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=geometry.dtype, device=device)
    return zeros_in_huge_pages(math.prod(shape), geometry.dtype).view(shape)


def kv_layers(pool: torch.Tensor, geometry: PoolGeometry) -> tuple[LayerKV, ...]:
    """The same pages as KV, by layer: `[num_pages, 2, block_size, num_kv_heads, head_dim]`, or `Float8KV` of these.

    Where tables have numbers of slabs, the slabs from the layer's own on: `[num_slabs, …]`.
    """
    shape = (geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    if geometry.full_layers is None:
        layers = [pool[:, layer] for layer in range(geometry.num_layers)]
    else:
        slabs = pool.flatten(0, 1)
        layers = [slabs[slab:] for slab in geometry.full_layers.slab_order]
    if geometry.kv_dtype == "float8":
        return tuple(float8_view(layer, *shape) for layer in layers)
    return tuple(layer.unflatten(1, (2, *shape)) for layer in layers)
