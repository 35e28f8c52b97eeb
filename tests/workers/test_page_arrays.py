"""Pages in the pool, in host memory and on disk: what was written is read, or an error says why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from motet.kernels.pages import read_pages, write_pages
from motet.workers.copies.page_mover import PageMover
from motet.workers.memory.page_arrays import DevicePages, DiskPages, HostPages, PageArray, PageLostError
from motet.workers.memory.pool import PoolGeometry, make_pool
from motet.workers.plan import MoveEnd, PageMove

NUM_PAGES = 10


def geometry(dtype: torch.dtype = torch.float32) -> PoolGeometry:
    return PoolGeometry(NUM_PAGES, num_layers=3, slab=32, block_size=4, num_kv_heads=2, head_dim=2, dtype=dtype)


def content(num_pages: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_pages, 3, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arrays(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, PageArray]:
    of = geometry(dtype)
    return {
        "device": DevicePages(make_pool(of, torch.device("cpu")), read_pages, write_pages),
        "host": HostPages(NUM_PAGES, of, pinned=False),
        "disk": DiskPages(folder, of),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_what_was_written_is_read_and_nothing_else_is_touched(tmp_path: Path, tier: str, dtype: torch.dtype) -> None:
    array = arrays(tmp_path, dtype)[tier]
    first, second = content(3, dtype), content(2, dtype, seed=1)
    array.write([4, 0, 9], first)
    array.write([3, 4], second)
    torch.testing.assert_close(array.read([9, 4, 0]), torch.stack([first[2], second[1], first[1]]), rtol=0, atol=0)


def test_disk_pages_have_no_name_that_another_could_find(tmp_path: Path) -> None:
    disk = arrays(tmp_path / "kv")["disk"]
    disk.write([0], content(1))
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_truncated_or_changed_file_is_noticed(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, geometry())
    disk.write([0, 5], content(2))
    os.ftruncate(disk._file.fileno(), 5 * geometry().page_bytes + 3)
    with pytest.raises(PageLostError, match="page 5"):
        disk.read([0, 5])
    os.pwrite(disk._file.fileno(), b"x", 7)
    with pytest.raises(PageLostError, match="page 0"):
        disk.read([0])
    with pytest.raises(PageLostError, match="page 7"):
        disk.read([7])  # never written


def test_a_full_disk_is_an_error_and_the_page_is_not_there() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    disk = DiskPages(Path("/tmp"), geometry())
    with Path("/dev/full").open("r+b", buffering=0) as full:
        disk._file.close()
        disk._file = full
        with pytest.raises(OSError, match="space"):
            disk.write([0], content(1))
        with pytest.raises(PageLostError):
            disk.read([0])


def test_the_mover_copies_and_says_what_failed(tmp_path: Path) -> None:
    tiers = arrays(tmp_path)
    mover = PageMover(tiers, torch.device("cpu"))  # type: ignore[arg-type]
    first = content(2)
    tiers["device"].write([1, 2], first)
    ends: list[MoveEnd] = []
    for move in (
        PageMove(1, "device", (1, 2), "host", (7, 3)),
        PageMove(2, "host", (7, 3), "disk", (0, 8)),
        PageMove(3, "disk", (8, 6), "device", (5, 6)),  # slot 6 was never written
        PageMove(4, "disk", (8,), "device", (9,)),
    ):
        mover.begin(move)
        while len(ends) < move.number:
            ends += mover.take_ended()
    mover.close()
    assert [(end.number, end.problem is None) for end in ends] == [(1, True), (2, True), (3, False), (4, True)]
    assert "2 pages from disk to device: page 6" in str(ends[2].problem)
    assert all(end.seconds > 0 for end in ends)
    torch.testing.assert_close(tiers["device"].read([9])[0], first[1], rtol=0, atol=0)
