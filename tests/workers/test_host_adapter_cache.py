"""The cache keeps the adapters that were used last, within its bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from motet.adapters.errors import AdapterCorrupt
from motet.adapters.format.tensor_file import BFLOAT16, Tensor
from motet.workers.memory.host_adapter_cache import HostAdapterCache, as_torch


class Disk:
    """Stands in for the store: 100 bytes an adapter, and a count of reads."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def load_packed(self, digest: str, layout: object) -> Tensor:
        self.reads.append(digest)
        if digest == "bad":
            raise AdapterCorrupt("its file is cut short")
        return np.zeros(100, np.uint8)


def cache_of(max_bytes: int) -> tuple[HostAdapterCache, Disk]:
    disk = Disk()
    return HostAdapterCache(disk, None, max_bytes), disk  # type: ignore[arg-type]


def test_recent_adapters_are_not_read_again() -> None:
    cache, disk = cache_of(250)
    for digest in ("a", "b", "a", "c", "a", "b"):
        cache.get(digest)
        assert cache.num_bytes <= 250
    assert disk.reads == ["a", "b", "c", "b"]
    assert cache.num_reads == 4


def test_an_adapter_larger_than_the_cache_passes_through() -> None:
    cache, disk = cache_of(50)
    assert cache.get("a").nbytes == 100
    cache.get("a")
    assert (disk.reads, cache.num_reads, cache.num_bytes) == (["a", "a"], 2, 0)


def test_a_corrupt_adapter_is_not_kept() -> None:
    cache, disk = cache_of(250)
    for _ in range(2):
        with pytest.raises(AdapterCorrupt, match="cut short"):
            cache.get("bad")
    assert disk.reads == ["bad", "bad"]


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_what_numpy_read_is_not_copied_for_torch(dtype: np.dtype[np.generic]) -> None:
    pages = np.arange(24).reshape(2, 3, 4).astype(dtype)
    seen = as_torch(pages)
    assert seen.dtype == getattr(torch, dtype.name)
    assert torch.equal(seen, torch.arange(24).reshape(2, 3, 4).to(seen.dtype))
    assert seen.data_ptr() == pages.ctypes.data


def test_what_is_forgotten_takes_no_room() -> None:
    cache, disk = cache_of(250)
    cache.get("a")
    cache.get("b")
    for digest in ("a", "a", "unheard of"):
        cache.forget(digest)
    assert (cache.num_bytes, cache.find("a")) == (100, None)
    cache.get("b")
    assert disk.reads == ["a", "b"]
