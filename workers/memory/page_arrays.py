"""Pages of one worker in the pool, in host memory and in a file, with one interface."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import weakref
import zlib
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch

from ...kernels.attention import LayerKV
from ...kernels.float8_kv import float8_view
from ...kernels.huge_pages import zeros_in_huge_pages
from ...kernels.pages import copy_runs, read_pages, write_pages
from ...kernels.pinned_zeros import pinned_zeros
from ...kernels.recurrence import LayerState
from ..config import KVDtype
from ..models.config import slab_of_head
from ..models.sharding import ModelSharding
from ..models.state_places import NO_STATE, StatePlaces, state_places
from ..window_pages import FullLayers

# A worker's one tensor of pages, for KV and adapters.


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
    window: int | None = None  # see `ModelSharding.window_pages`
    full_layers: FullLayers | None = None  # page tables have numbers of slabs, as these count them; None: of pages
    # By layer with KV: KV heads, and elements of one. None: all layers have such heads, alike.
    kv_heads: tuple[tuple[int, int], ...] | None = None
    first_kv: tuple[int, ...] = ()  # which of the layers with KV come first in a page
    state: StatePlaces = NO_STATE
    kv_sides: int = 2  # see `ModelConfig.kv_sides`

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
    kv = (sharding.num_kv_heads_of(0), config.head_dim)
    heads = tuple((sharding.num_kv_heads_of(layer), config.layer_sizes.head_dims[layer]) for layer in config.kv_layers)
    state = state_places(sharding, config.num_layers * slab * dtype.itemsize, dtype.itemsize)
    return PoolGeometry(
        num_pages,
        config.num_layers,
        slab,
        block_size,
        *kv,
        dtype,
        kv_dtype,
        *sharding.window_pages(block_size, kv_dtype, dtype.itemsize),
        heads if sharding.spreads_kv else None,
        tuple(i for i, layer in enumerate(config.kv_layers) if config.sliding_windows[layer] is None),
        state,
        config.kv_sides,
    )


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
    """The same pages as KV, by layer with attention: `[num_pages, 2, block_size, num_kv_heads, head_dim]`.

    Or `Float8KV` of these. Where V is read where K is, both sides are the same memory.

    Where tables have numbers of slabs, what begins with each slab: `[num_slabs, …]`.
    """
    heads = geometry.kv_heads or ((geometry.num_kv_heads, geometry.head_dim),) * geometry.num_layers
    entry = geometry.num_layers * geometry.slab // (geometry.full_layers.num_slabs if geometry.full_layers else 1)
    layers, start = dict[int, torch.Tensor](), 0
    for layer in (*geometry.first_kv, *(each for each in range(len(heads)) if each not in geometry.first_kv)):
        num_kv_heads, head_dim = heads[layer]
        size = num_kv_heads * slab_of_head(
            head_dim, geometry.block_size, geometry.kv_dtype, geometry.dtype.itemsize, geometry.kv_sides
        )
        layers[layer] = pool.flatten()[start:].unfold(0, size, entry)
        start += size
    views = [(layers[layer], (geometry.block_size, *each)) for layer, each in enumerate(heads)]
    if geometry.kv_dtype == "float8":
        return tuple(float8_view(pages, *shape) for pages, shape in views)
    if geometry.kv_sides == 1:
        sides = (pages.unflatten(1, shape).unsqueeze(1) for pages, shape in views)
        return tuple(keys.expand(-1, 2, -1, -1, -1) for keys in sides)
    return tuple(pages.unflatten(1, (2, *shape)) for pages, shape in views)


def layer_states(geometry: PoolGeometry) -> tuple[LayerState, ...]:
    """Where states lie, as kernels read it, by layer with a recurrent state."""
    return tuple(
        LayerState(
            torch.tensor([page for page, _ in layer.heads], dtype=torch.int32),
            torch.tensor([start // torch.float32.itemsize for _, start in layer.heads], dtype=torch.int32),
            layer.inputs[0],
            layer.inputs[1] // geometry.dtype.itemsize,
        )
        for layer in geometry.state.layers
    )


# Pinned pages of host memory, allocated once when a worker starts.


def pinned_pages(num_pages: int, geometry: PoolGeometry) -> torch.Tensor:
    """`[num_pages, num_layers, slab]` zeros; see `pinned_zeros`."""
    shape = (num_pages, geometry.num_layers, geometry.slab)
    advice = "host_bytes and kv_host_bytes together must fit into this machine's free memory"
    return pinned_zeros(shape, geometry.dtype, advice)


class PinnedArena:
    """Pinned pages, handed out in runs that lie side by side. For several threads."""

    def __init__(self, num_pages: int, geometry: PoolGeometry) -> None:
        """Raises ValueError if the driver cannot pin that much."""
        self._pages = pinned_pages(num_pages, geometry)
        self._free = [(0, num_pages)]  # runs `[start, end)`, ascending; no two touch
        self._lock = threading.RLock()  # a finalizer may release a run in the thread that takes one

    def take(self, num_pages: int) -> torch.Tensor | None:
        """A run of pages, released when the last reference to this tensor is gone; None: no run is long enough."""
        with self._lock:
            for place, (start, end) in enumerate(self._free):
                if end - start >= num_pages:
                    self._free[place : place + 1] = [(start + num_pages, end)] if end - start > num_pages else []
                    break
            else:
                return None
        pages = self._pages[start : start + num_pages]
        weakref.finalize(pages, self._give_back, start, start + num_pages)
        return pages

    @property
    def num_free(self) -> int:
        """Pages, of all runs together."""
        with self._lock:
            return sum(end - start for start, end in self._free)

    def _give_back(self, start: int, end: int) -> None:
        with self._lock:
            insort(self._free, (start, end))
            joined: list[tuple[int, int]] = []
            for run in self._free:
                if joined and joined[-1][1] == run[0]:
                    joined[-1] = (joined[-1][0], run[1])
                else:
                    joined.append(run)
            self._free = joined

    def check_integrity(self) -> None:
        """Raises AssertionError if free runs touch, overlap or lie outside."""
        with self._lock:
            edges = [edge for run in self._free for edge in run]
        assert all(before < after for before, after in pairwise(edges)), "free runs touch"
        assert not edges or (edges[0] >= 0 and edges[-1] <= len(self._pages)), "a run lies outside"


MOST_AT_ONCE = 32  # pages that a disk reads or writes at once, through its own buffer


class PageLostError(Exception):
    """A page does not hold what was written to it."""


def is_run(pages: Sequence[int]) -> bool:
    """The pages lie side by side, in this order."""
    return len(pages) > 0 and list(pages) == list(range(pages[0], pages[0] + len(pages)))


class PageArray(Protocol):
    """Pages by number; content is `[len(pages), num_layers, slab]`."""

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy, or a view of the pages where they lie side by side: the caller must ensure that they are not written.

        Raises PageLostError or OSError.
        """

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        """Raises OSError."""


class DevicePages:
    """The pool."""

    def __init__(
        self,
        pool: torch.Tensor,
        read_pages: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
        write_pages: Callable[[torch.Tensor, Sequence[int], torch.Tensor], None],
    ) -> None:
        self._pool, self._read_pages, self._write_pages = pool, read_pages, write_pages

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        return self._pool[pages[0] : pages[-1] + 1] if is_run(pages) else self._read_pages(self._pool, pages)

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        self._write_pages(self._pool, pages, content)


class HostPages:
    """Pages in host memory, which the system allocates as they are first written.

    Two threads may copy at once, but never the same page.
    """

    def __init__(self, num_pages: int, geometry: PoolGeometry, pinned: bool) -> None:
        """`pinned`: allocates all of it at once, for copies by a GPU while it computes. Raises ValueError."""
        shape = (num_pages, geometry.num_layers, geometry.slab)
        self._pages = pinned_pages(num_pages, geometry) if pinned else torch.empty(shape, dtype=geometry.dtype)

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        return self._pages[pages[0] : pages[-1] + 1] if is_run(pages) else read_pages(self._pages, pages)

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        copy = write_pages if content.device.type == "cpu" else copy_runs
        copy(self._pages, pages, content)


class DiskPages:
    """Pages in an unnamed temporary file, which ends with its process."""

    def __init__(self, folder: Path, geometry: PoolGeometry, pinned: bool = False) -> None:
        """`pinned`: reads and writes go through pinned memory, for a GPU.

        Raises OSError if the folder cannot be written to, ValueError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._geometry = geometry
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # lives as long as this object
        weakref.finalize(self, self._file.close)
        self._checksums: dict[int, int] = {}
        self._staging = pinned_pages(MOST_AT_ONCE, geometry) if pinned else None

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """See `PageArray.read`. At most MOST_AT_ONCE pages; with pinned memory they are valid until the next call."""
        geometry = self._geometry
        shape = (len(pages), geometry.num_layers, geometry.slab)
        content = torch.empty(shape, dtype=geometry.dtype) if self._staging is None else self._staging[: len(pages)]
        for page, row in zip(pages, content, strict=True):
            data = memoryview(row.view(torch.uint8).numpy()).cast("B")
            num_bytes = os.preadv(self._file.fileno(), [data], page * geometry.page_bytes)
            if num_bytes != geometry.page_bytes or zlib.crc32(data) != self._checksums.get(page):
                raise PageLostError(f"page {page} of the disk tier is not what was written")
        return content

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        page_bytes = self._geometry.page_bytes
        if content.device.type != "cpu":
            assert self._staging is not None, "the pages of a GPU need pinned memory"
            content = self._staging[: len(pages)].copy_(content)
        for page, row in zip(pages, content, strict=True):
            data = memoryview(row.contiguous().view(torch.uint8).numpy()).cast("B")
            self._checksums.pop(page, None)
            if os.pwrite(self._file.fileno(), data, page * page_bytes) != page_bytes:
                raise OSError(f"page {page} of the disk tier was not fully written: the disk may be full")
            self._checksums[page] = zlib.crc32(data)
