"""Pages in the pool, in host memory and on disk: what was written is read, or an error says why not."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from motet.kernels.pages import read_pages, write_pages
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.workers.memory.page_arrays import (
    DevicePages,
    DiskPages,
    HostPages,
    PageArray,
    PageLostError,
    PoolGeometry,
    make_pool,
)
from motet.workers.memory.page_mover import PageMover
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


class HangingDisk:
    """Disk pages whose reads wait until `goes_on` is set."""

    def __init__(self, pages: PageArray) -> None:
        self._pages, self.goes_on, self.num_reads = pages, threading.Event(), 0

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        self.num_reads += 1
        assert self.goes_on.wait(PATIENCE_S)
        return self._pages.read(pages)

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        self._pages.write(pages, content)


def test_moves_of_a_disk_that_hangs_are_given_up_and_write_nothing_later(tmp_path: Path) -> None:
    tiers = arrays(tmp_path)
    tiers["disk"].write([0], content(1))
    before = tiers["device"].read([1, 2]).clone()
    tiers["disk"] = hanging = HangingDisk(tiers["disk"])
    mover = PageMover(tiers, torch.device("cpu"), disk_deadline_s=0.1)  # type: ignore[arg-type]
    ends: list[MoveEnd] = []

    def problems(count: int) -> list[str | None]:
        def have_come() -> bool:
            ends.extend(mover.take_ended())
            return len(ends) == count

        eventually(have_come)
        return [end.problem for end in ends]

    mover.begin(PageMove(1, "disk", (0,), "device", (1,)))
    mover.begin(PageMove(2, "disk", (0,), "device", (2,)))
    assert all("the disk did nothing for 0.1 s" in str(problem) for problem in problems(2))
    mover.begin(PageMove(3, "disk", (0,), "device", (1,)))
    assert "the disk hangs" in str(problems(3)[2])
    mover.begin(PageMove(4, "device", (3,), "host", (0,)))  # copies in memory go on
    assert problems(4)[3] is None
    mover._disk_deadline_s = PATIENCE_S
    hanging.goes_on.set()
    eventually(lambda: not mover._hangs)
    mover.begin(PageMove(5, "disk", (0,), "device", (4,)))  # in the same thread, so the others are over
    assert problems(5)[4] is None
    assert hanging.num_reads == 2
    assert torch.equal(tiers["device"].read([1, 2]), before)
    mover.close()


def test_a_mover_is_closed_although_its_disk_hangs(tmp_path: Path) -> None:
    tiers = arrays(tmp_path)
    tiers["disk"] = hanging = HangingDisk(tiers["disk"])
    mover = PageMover(tiers, torch.device("cpu"))  # type: ignore[arg-type]
    mover.begin(PageMove(1, "disk", (0,), "device", (1,)))
    eventually(lambda: hanging.num_reads)
    mover.close()
    assert not hanging.goes_on.is_set()
    hanging.goes_on.set()
