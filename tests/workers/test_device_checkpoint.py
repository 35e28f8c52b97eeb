"""A base loaded straight to a GPU by ranges of bytes: on the stand-in, against what the CPU reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu, stand_in_gpu
from motet.workers.models import device_checkpoint
from motet.workers.models.device_checkpoint import DeviceCheckpoint, LoadProgress
from motet.workers.models.stored_tensor import stored_tensors
from motet.workers.models.weights import Checkpoint, open_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
STAGING_BYTES = 8192
Part = dict[str, tuple[int, int]]


@pytest.fixture
def gpu() -> Iterator[StandInGpu]:
    with stand_in_gpu() as gpu:
        yield gpu


def write(folder: Path, dtype: torch.dtype, *, per_file: int = 100, **shapes: tuple[int, ...]) -> Path:
    """A folder with random tensors of these shapes, so many in a file."""
    generator = torch.Generator().manual_seed(0)
    made = [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]
    folder.mkdir(exist_ok=True)
    for at in range(0, len(made), per_file):
        save_file(dict(made[at : at + per_file]), folder / f"part-{at:03d}.safetensors")
    return folder


def same_part(folder: Path, dtype: torch.dtype, name: str, shape: tuple[int, ...], **part: Any) -> None:
    """The part of a tensor is what the CPU reads."""
    expected = Checkpoint(folder, dtype, CPU).take(name, shape, **part)
    with DeviceCheckpoint(folder, dtype, CUDA, staging_bytes=STAGING_BYTES) as checkpoint:
        taken = checkpoint.take(name, shape, **part)
        assert (taken.device, taken.dtype, taken.shape) == (CUDA, dtype, expected.shape)
        assert torch.equal(taken.cpu(), expected)


PARTS: list[Part] = [
    {},
    {"rows": (0, 30)},
    {"rows": (30, 61)},
    {"rows": (0, 0)},
    {"columns": (0, 50)},
    {"columns": (50, 101)},
    {"columns": (0, 101)},
    {"rows": (7, 60), "columns": (13, 14)},
]


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
    ids=str,
)
def test_parts_of_workers_in_all_dtypes(
    tmp_path: Path, gpu: StandInGpu, stored: torch.dtype, wanted: torch.dtype, part: Part
) -> None:
    same_part(write(tmp_path, stored, weight=(61, 101)), wanted, "weight", (61, 101), **part)


def test_vectors_numbers_and_nothing(tmp_path: Path, gpu: StandInGpu) -> None:
    folder = write(tmp_path, torch.bfloat16, bias=(9001,), scale=(), none=(0, 4))
    same_part(folder, torch.bfloat16, "bias", (9001,))
    same_part(folder, torch.bfloat16, "bias", (9001,), rows=(4500, 9001))
    same_part(folder, torch.bfloat16, "none", (0, 4))
    with DeviceCheckpoint(folder, torch.bfloat16, CUDA, staging_bytes=STAGING_BYTES) as checkpoint:
        assert checkpoint.take("scale", ()).shape == ()


@dataclass
class Reads:
    """What was read of the files."""

    num_bytes: int = 0
    first_address: int = 1 << 62
    last_address: int = 0

    @property
    def held_bytes(self) -> int:
        """The stretch of memory that all of it came into."""
        return self.last_address - self.first_address


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found, preadv = Reads(), os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        num_bytes = preadv(descriptor, buffers, offset)
        address = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()
        found.num_bytes += num_bytes
        found.first_address = min(found.first_address, address)
        found.last_address = max(found.last_address, address + num_bytes)
        return num_bytes

    monkeypatch.setattr(os, "preadv", counted)
    return found


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32], ids=str)
def test_a_base_of_any_size_passes_through_bounded_pinned_memory(
    tmp_path: Path, gpu: StandInGpu, reads: Reads, wanted: torch.dtype
) -> None:
    """Thirty times what is pinned, in few large and many small tensors: nothing waits for one tensor's copy."""
    shapes: dict[str, tuple[int, ...]] = {f"large{at}": (40, 500) for at in range(6)}
    shapes |= {f"small{at}": (50,) for at in range(100)}
    folder = write(tmp_path, torch.bfloat16, per_file=30, **shapes)
    total = sum(tensor.num_bytes for path in folder.iterdir() for tensor in stored_tensors(path))
    assert total > 30 * STAGING_BYTES - 1000
    with DeviceCheckpoint(folder, wanted, CUDA, staging_bytes=STAGING_BYTES) as checkpoint:
        taken = {name: checkpoint.take(name, shape) for name, shape in shapes.items()}
        checkpoint.finish()
        copies, waits = list(gpu.tally.copies), list(gpu.tally.waits)
    assert reads.num_bytes == sum(copy.num_bytes for copy in copies) == total, "in the file's dtype, and once"
    assert reads.held_bytes <= STAGING_BYTES
    assert not [copy for copy in copies if copy.waits], "a copy that the host waits for"
    assert gpu.tally.pinned == [], "pinned memory beside the staging"
    padded = total + 100 * 512  # each small one takes as much
    assert len(waits) <= 2 * padded / STAGING_BYTES + 1 < len(shapes)
    expected = Checkpoint(folder, wanted, CPU)
    assert all(torch.equal(tensor.cpu(), expected.take(name, shapes[name])) for name, tensor in taken.items())
    assert gpu.pinned._regions == [], "what is pinned is given back"
    del taken
    assert gpu.streams.num_allocated_bytes == 0, "nothing is kept on the device"


def test_a_gangs_worker_reads_its_own_rows_alone(tmp_path: Path, gpu: StandInGpu, reads: Reads) -> None:
    folder = write(tmp_path, torch.bfloat16, weight=(64, 100), other=(64, 100))
    with DeviceCheckpoint(folder, torch.bfloat16, CUDA, staging_bytes=STAGING_BYTES) as checkpoint:
        checkpoint.take("weight", (64, 100), rows=(32, 64))
        checkpoint.take("other", (64, 100), rows=(0, 0))
    assert reads.num_bytes == 32 * 100 * 2


def test_copies_come_after_what_used_the_memory_before(tmp_path: Path, gpu: StandInGpu) -> None:
    """A product of the calling thread's stream reads memory that is free next; the stand-in sees what overtakes it."""
    folder = write(tmp_path, torch.float32, first=(64, 64), second=(64, 64))
    with DeviceCheckpoint(folder, torch.float32, CUDA, staging_bytes=STAGING_BYTES) as checkpoint:
        product = checkpoint.take("first", (64, 64)) @ checkpoint.take("second", (64, 64))
    expected = Checkpoint(folder, torch.float32, CPU)
    assert torch.equal(product.cpu(), expected.take("first", (64, 64)) @ expected.take("second", (64, 64)))


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


def grow_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] = 1
    path.write_bytes(data)


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"[61,101]", b"[61,102]"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: cut(path, 1),
            r"part-000\.safetensors is damaged: .* tensor 'weight' ends at byte \d+: .* completely",
        ),
        (lambda path: path.write_bytes(b"abc"), r"part-000\.safetensors is damaged: it has 3 bytes"),
        (grow_header, r"part-000\.safetensors is damaged: .* its header should end"),
        (spoil, r"part-000\.safetensors is damaged: tensor 'weight' lies at bytes 0 to \d+ .*\[61, 102\] in BF16"),
        (lambda path: path.write_bytes(b"\2" + b"\0" * 7 + b"[]"), "its header is not that of a safetensors file"),
    ],
)
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, gpu: StandInGpu, damage: Callable[[Path], None], message: str
) -> None:
    folder = write(tmp_path, torch.bfloat16, weight=(61, 101))
    damage(folder / "part-000.safetensors")
    with pytest.raises(ValueError, match=message):
        DeviceCheckpoint(folder, torch.bfloat16, CUDA)
    with pytest.raises(ValueError, match=r"part-000\.safetensors is damaged"):
        open_checkpoint(folder, "numpy")


def test_a_cpu_says_which_tensor_is_cut_short(tmp_path: Path) -> None:
    folder = write(tmp_path, torch.bfloat16, weight=(61, 101))
    cut(folder / "part-000.safetensors", 1)
    with pytest.raises(ValueError, match=r"part-000\.safetensors is damaged: .* tensor 'weight' ends at byte"):
        open_checkpoint(folder, "numpy")


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, gpu: StandInGpu) -> None:
    """The copies under way end before their memory is given back."""
    folder = write(tmp_path, torch.bfloat16, weight=(61, 101), x=(3,))
    message = r"part-000\.safetensors ends .* tensor 'weight' lies at bytes .* cut short"
    checkpoint = DeviceCheckpoint(folder, torch.bfloat16, CUDA, staging_bytes=STAGING_BYTES)
    cut(folder / "part-000.safetensors", 1000)
    with checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.take("weight", (61, 101))
    assert gpu.pinned._regions == []


def test_a_file_that_cannot_be_read(tmp_path: Path, gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    folder = write(tmp_path, torch.bfloat16, weight=(61, 101))
    with (
        DeviceCheckpoint(folder, torch.bfloat16, CUDA) as checkpoint,
        pytest.raises(ValueError, match=r"part-000\.safetensors: tensor 'weight' cannot be read: .*Input/output error"),
    ):
        checkpoint.take("weight", (61, 101))


def test_large_pieces_are_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of them fails, its error is reported when all have ended."""
    monkeypatch.setattr(device_checkpoint, "_LEAST_BYTES", 1000)
    folder = write(tmp_path, torch.bfloat16, first=(7,), weight=(61, 101))
    stored = next(each for each in stored_tensors(folder / "part-000.safetensors") if each.name == "weight")
    files, target = device_checkpoint.FileRanges(), bytearray(61 * 101 * 2 - 100)
    files.read(stored, 100, memoryview(target))
    expected = Checkpoint(folder, torch.bfloat16, CPU).take("weight", (61, 101)).view(torch.uint8).flatten()[100:]
    assert torch.equal(torch.frombuffer(target, dtype=torch.uint8), expected)
    cut(stored.path, 1)
    with pytest.raises(ValueError, match="was cut short while it was read"):
        files.read(stored, 100, memoryview(target))
    files.close()


def test_tensors_that_do_not_fit_the_model(tmp_path: Path, gpu: StandInGpu) -> None:
    shapes: dict[str, Any] = {"weight": (6, 8), "wide": (1, 9000), "rotary_emb.inv_freq": (4,)}
    folder = write(tmp_path, torch.bfloat16, **shapes)
    with DeviceCheckpoint(folder, torch.bfloat16, CUDA, staging_bytes=STAGING_BYTES) as checkpoint:
        with pytest.raises(ValueError, match=r"'weight' has shape \(6, 8\): config\.json needs \(8, 6\)"):
            checkpoint.take("weight", (8, 6))
        with pytest.raises(ValueError, match="has no tensor 'weight', or two parts"):
            checkpoint.take("weight", (6, 8))
        checkpoint.drop(suffix="inv_freq")
        with pytest.raises(ValueError, match="has 1 tensors that this model has no place for: wide"):
            checkpoint.finish()
        with pytest.raises(ValueError, match="a row of 18000 bytes: 4096 are the most"):
            checkpoint.take("wide", (1, 9000), columns=(0, 4500))
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file with tensors"):
        DeviceCheckpoint(tmp_path / "nothing", torch.bfloat16, CUDA)


def test_progress_is_reported_by_percent_and_logged_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now, reported = [0.0], []
    progress = LoadProgress(4000 << 20, lambda *each: reported.append(each), lambda: now[0])
    with caplog.at_level(logging.INFO, "motet.workers.models.device_checkpoint"):
        for _ in range(4000):  # of which this worker reads a half, at 512 MiB a second
            now[0] += 1 / 1024
            progress.read(1 << 19)
            progress.done(1 << 20)
        progress.done(0)
        assert caplog.messages == []
        now[0] += 4
        progress.read(1 << 30)
        progress.end()
    assert [done for _, done, _ in reported] == sorted(done for _, done, _ in reported)
    assert 100 <= len(reported) <= 102
    assert reported[-1] == ("loading weights", 4000 << 20, 4000 << 20)
    first, last = caplog.messages
    assert first == "loading weights: 2.95 GiB read, 100 % of a base of 3.91 GiB are done, 0.37 GiB/s"
    assert last == "weights are loaded: 2.95 GiB read of a base of 3.91 GiB in 7.9 s, 0.37 GiB/s"
