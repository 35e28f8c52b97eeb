"""The host tier keeps what was used last within its bytes."""

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


def tier(max_bytes: int) -> tuple[HostAdapterCache, Disk]:
    disk = Disk()
    return HostAdapterCache(disk, None, max_bytes, pinned=False), disk  # type: ignore[arg-type]


def test_recent_adapters_are_not_read_again() -> None:
    host, disk = tier(250)
    for digest in ("a", "b", "a", "c", "a", "b"):
        host.get(digest)
        assert host.num_bytes <= 250
    assert disk.reads == ["a", "b", "c", "b"]
    assert host.num_reads == 4


def test_an_adapter_larger_than_the_tier_passes_through() -> None:
    host, disk = tier(50)
    assert host.get("a").nbytes == 100
    host.get("a")
    assert (disk.reads, host.num_reads, host.num_bytes) == (["a", "a"], 2, 0)


def test_a_corrupt_adapter_is_not_kept() -> None:
    host, disk = tier(250)
    for _ in range(2):
        with pytest.raises(AdapterCorrupt, match="cut short"):
            host.get("bad")
    assert disk.reads == ["bad", "bad"]


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_what_numpy_read_is_not_copied_for_torch(dtype: np.dtype[np.generic]) -> None:
    pages = np.arange(24).reshape(2, 3, 4).astype(dtype)
    seen = as_torch(pages)
    assert seen.dtype == getattr(torch, dtype.name)
    assert torch.equal(seen, torch.arange(24).reshape(2, 3, 4).to(seen.dtype))
    assert seen.data_ptr() == pages.ctypes.data
