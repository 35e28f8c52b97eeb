"""A base's tensors, read by ranges of bytes and copied straight to a GPU.

No tensor is whole in the host's memory: pieces of them pass through a `Staging`, whatever the size of the base. While
one piece is copied the next is read.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from ...kernels.pinned_zeros import pinned_zeros
from .stored_tensor import (
    StoredTensor,
    check_float,
    has_other_head,
    lacks_head,
    named_in_full,
    part_name,
    rows_of_parts,
    shards,
    stored_tensors,
)

# Ranges of a checkpoint's files, read into memory of the host.

# One thread reads neither a fast disk nor a network's storage at full speed, nor copies as fast as a GPU takes in.
_NUM_READERS = 4
_LEAST_BYTES = 4 << 20  # for which it is worth to wake another thread


class FileRanges:
    """Files stay open from their first read on, until `close`."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="weight-reader")

    def read(self, tensor: StoredTensor, start: int, target: memoryview) -> None:
        """Fills `target` with the tensor's bytes from its byte `start` on; several threads read at once.

        Raises ValueError if the file ends before, or cannot be read.
        """
        num_bytes = len(target)
        part_bytes = max(-(-num_bytes // _NUM_READERS), _LEAST_BYTES)
        parts = [(start + at, target[at : at + part_bytes]) for at in range(0, num_bytes, part_bytes)]
        try:
            descriptor = self._descriptor(tensor.path)
            if len(parts) == 1:
                self._read_part(descriptor, tensor, *parts[0])
            else:
                under_way = [self._readers.submit(self._read_part, descriptor, tensor, *part) for part in parts]
                problems = [each.exception() for each in under_way]  # all have ended, whatever comes next
                for problem in problems:
                    if problem is not None:
                        raise problem
        except OSError as error:
            raise ValueError(f"{tensor.path}: tensor {tensor.name!r} cannot be read: {error}") from error

    def close(self) -> None:
        self._readers.shutdown()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[path]

    @staticmethod
    def _read_part(descriptor: int, tensor: StoredTensor, start: int, target: memoryview) -> None:
        num_read = 0
        while num_read < len(target):
            at = tensor.start + start + num_read
            more = os.preadv(descriptor, [target[num_read:]], at)
            if more == 0:
                raise ValueError(
                    f"{tensor.path} ends at byte {at} or before, and tensor {tensor.name!r} lies at bytes "
                    f"{tensor.start} to {tensor.start + tensor.num_bytes}: the file was cut short while it was read"
                )
            num_read += more


# Progress of loading a base: reported at each percent, and logged every few seconds.

_log = logging.getLogger(__name__)
_INTERVAL_S = 5.0  # between two lines of the log
_GIB = 1 << 30

OnProgress = Callable[[str, int, int], None]  # what, done, total


class LoadProgress:
    """Counts bytes of the base that are done, and bytes read, which are fewer in a gang."""

    def __init__(
        self,
        total_bytes: int,
        on_progress: OnProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total_bytes`: of the base. `on_progress`: called with activity, done and total bytes, at each percent and at
        the end.
        """
        self._total_bytes, self._on_progress, self._clock = total_bytes, on_progress, clock
        self._began_at = self._logged_at = clock()
        self._num_done = self._num_read = self._num_read_when_logged = 0
        self._reported_percent = -1

    def read(self, num_bytes: int) -> None:
        """Counts bytes read from a file."""
        self._num_read += num_bytes
        now = self._clock()
        if now - self._logged_at >= _INTERVAL_S:
            rate = (self._num_read - self._num_read_when_logged) / (now - self._logged_at)
            _log.info(
                "loading weights: %.2f GiB read, %d %% of a base of %.2f GiB are done, %.2f GiB/s",
                *(self._num_read / _GIB, self._percent(), self._total_bytes / _GIB, rate / _GIB),
            )
            self._logged_at, self._num_read_when_logged = now, self._num_read

    def done(self, num_bytes: int) -> None:
        """Counts bytes of the base that are in place, or are not this worker's."""
        self._num_done += num_bytes
        percent = self._percent()
        if percent != self._reported_percent:
            self._report(self._num_done)

    def end(self) -> None:
        """Logs and reports the end."""
        took_s = max(self._clock() - self._began_at, 1e-3)
        _log.info(
            "weights are loaded: %.2f GiB read of a base of %.2f GiB in %.1f s, %.2f GiB/s",
            *(self._num_read / _GIB, self._total_bytes / _GIB, took_s, self._num_read / _GIB / took_s),
        )
        self._report(self._total_bytes)

    def _percent(self) -> int:
        return 100 * self._num_done // max(self._total_bytes, 1)

    def _report(self, num_done: int) -> None:
        self._reported_percent = self._percent()
        if self._on_progress is not None:
            self._on_progress("loading weights", num_done, self._total_bytes)


# Pinned memory through which numbers of the host come to a GPU, however many they are.

STAGING_BYTES = 64 << 20
_ALIGNMENT_BYTES = 512  # of what is copied: the GPU's own allocations have it, too


class Staging:
    """Two halves: while one is copied, on a stream of its own, the host fills the other.

    The host waits once for each half that it uses again.
    """

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        """Raises ValueError if the driver does not pin this much memory."""
        self.half_bytes = num_bytes // 2 // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        assert self.half_bytes > 0, f"{num_bytes} bytes have no two halves of {_ALIGNMENT_BYTES}"
        advice = "a base is loaded through it: the machine must have as much free memory"
        self._halves = pinned_zeros((2, self.half_bytes), torch.uint8, advice)
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._copied: list[torch.cuda.Event | None] = [None, None]  # what was copied from each half
        self._half, self._num_used = 0, 0
        self._scratch: torch.Tensor | None = None  # [half_bytes] on the device: what is not yet as it is wanted

    def begin(self) -> None:
        """What is copied from now on comes after all that the calling thread has launched.

        That may still use the memory that a target was allocated in.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """What the calling thread launches from now on comes after all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def num_fitting(self, item_bytes: int, num_wanted: int) -> int:
        """How many of the wanted items to take next: those that fit into the rest of this half, or into a whole one.

        Raises ValueError if an item is larger than that.
        """
        if item_bytes > self.half_bytes:
            raise ValueError(f"a row of {item_bytes} bytes: {self.half_bytes} are the most that can be loaded")
        return min((self.half_bytes - self._num_used) // item_bytes or self.half_bytes // item_bytes, num_wanted)

    def take(self, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` uint8 to be filled and sent, at most `half_bytes`. Waits if copies are still to leave it."""
        assert 0 < num_bytes <= self.half_bytes, f"{num_bytes} of {self.half_bytes} bytes"
        if self._num_used + num_bytes > self.half_bytes:
            self._copied[self._half] = self._stream.record_event()
            self._half, self._num_used = 1 - self._half, 0
            copied = self._copied[self._half]
            if copied is not None:
                copied.synchronize()
        buffer = self._halves[self._half, self._num_used : self._num_used + num_bytes]
        self._num_used += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return buffer

    def send(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        """Copies to a contiguous target of the same size, unchanged."""
        with torch.cuda.stream(self._stream):
            target.view(-1).view(torch.uint8).copy_(buffer, non_blocking=True)

    def send_changed(
        self, buffer: torch.Tensor, dtype: torch.dtype, num_columns: int, columns: slice, target: torch.Tensor
    ) -> None:
        """Copies rows of `num_columns` numbers of `dtype`, of which the target gets `columns`, in its dtype.

        The device picks and converts them: a copy from the host with gaps, or to another dtype, would have torch make
        the numbers in pageable memory first and wait for them.
        """
        if self._scratch is None:
            self._scratch = torch.empty(self.half_bytes, dtype=torch.uint8, device=self._device)
            self.begin()
        with torch.cuda.stream(self._stream):
            arrived = self._scratch[: len(buffer)]
            arrived.copy_(buffer, non_blocking=True)
            target.copy_(arrived.view(dtype).view(-1, num_columns)[:, columns])

    def close(self) -> None:
        """Waits for all copies, and gives the memory back, here and on the device."""
        self._stream.synchronize()
        self.end()  # the scratch is the calling thread's stream's again
        del self._halves, self._scratch


_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


class DeviceCheckpoint:
    """The tensors of a model folder, for a GPU: a `WeightSource`. A context manager: staging ends with its block."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Raises ValueError for a damaged file, and if there is no tensor."""
        stored = {tensor.name: tensor for path in shards(folder) for tensor in stored_tensors(path)}
        self.has_head = not lacks_head(stored)
        self._where = named_in_full(stored)
        if not self._where:
            raise ValueError(f"{folder} has no *.safetensors file with tensors in it")
        self._folder, self._dtype, self._device = folder, dtype, device
        self._progress = LoadProgress(sum(tensor.num_bytes for tensor in self._where.values()), on_progress)
        self._staging, self._files = Staging(device, staging_bytes), FileRanges()

    def __enter__(self) -> DeviceCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._files.close()
        self._staging.close()

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        *,
        in_floats: bool = False,
    ) -> torch.Tensor:
        """The tensor or the given part of it, on the device in the engine's dtype; the host does not wait for the copy.

        Of rows only those are read; where columns are wanted, whole rows are, and the device picks the columns: pieces
        of a few kilobytes each would be slow to read. `shape` is the whole tensor's. Raises ValueError if the tensor is
        missing or misshapen, or its file ends within it.
        """
        stored = self._where.pop(name, None)
        if stored is None:
            raise ValueError(f"{self._folder} has no tensor {name!r}, or two parts of the model need it")
        if stored.shape != shape:
            raise ValueError(f"tensor {stored.name!r} has shape {stored.shape}: config.json needs {shape}")
        check_float(stored.name, stored.dtype)
        first, stop = rows if rows is not None else (0, shape[0] if shape else 1)
        own_shape = (stop - first, *shape[1:]) if shape else ()
        if columns is not None:
            own_shape = (stop - first, columns[1] - columns[0])
        target = torch.empty(own_shape, dtype=torch.float32 if in_floats else self._dtype, device=self._device)
        if target.numel() > 0:
            self._staging.begin()
            try:
                if columns is None or own_shape[1] == shape[1]:
                    self._copy_rows(stored, first * math.prod(shape[1:]), target)
                else:
                    self._copy_columns(stored, first, slice(*columns), target)
            finally:  # later users of the target or its memory wait for the copies
                self._staging.end()
        self._progress.done(stored.num_bytes)
        return target

    def take_quantised(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        """None: these files have no weights of few bits."""

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def has_other_head(self) -> bool:
        return has_other_head(self._folder)

    def split(self, name: str, num_rows: Mapping[str, int]) -> None:
        """See `WeightSource.split`."""
        stored = self._where.pop(name, None)
        if stored is None:
            raise ValueError(f"{self._folder} has no tensor {name!r}")
        for part, (start, stop) in rows_of_parts(name, stored.shape, num_rows).items():
            row_bytes = stored.num_bytes // stored.shape[0]
            self._where[part] = replace(
                stored,
                name=part_name(part, stored.name),
                shape=(stop - start, *stored.shape[1:]),
                start=stored.start + start * row_bytes,
                num_bytes=(stop - start) * row_bytes,
            )

    def drop(self, *, prefix: str = "", suffix: str = "") -> None:
        """Forgets tensors that the model computes by itself, shares or does not use."""
        for name in [name for name in self._where if name.startswith(prefix) and name.endswith(suffix)]:
            self._progress.done(self._where.pop(name).num_bytes)

    def finish(self) -> None:
        """Raises ValueError if tensors are left that no part of the model took."""
        if self._where:
            names = ", ".join(sorted(self._where)[:5])
            raise ValueError(f"{self._folder} has {len(self._where)} tensors that this model has no place for: {names}")
        self._progress.end()

    def _copy_rows(self, stored: StoredTensor, first: int, target: torch.Tensor) -> None:
        """The numbers from `first` on, which lie side by side in the file."""
        dtype, flat, done = _DTYPES[stored.dtype], target.view(-1), 0
        while done < len(flat):
            piece = flat[done : done + self._staging.num_fitting(dtype.itemsize, len(flat) - done)]
            buffer = self._read(stored, (first + done) * dtype.itemsize, len(piece) * dtype.itemsize)
            if dtype == target.dtype:
                self._staging.send(buffer, piece)
            else:
                self._staging.send_changed(buffer, dtype, 1, slice(None), piece.unsqueeze(1))
            done += len(piece)

    def _copy_columns(self, stored: StoredTensor, first: int, columns: slice, target: torch.Tensor) -> None:
        dtype, num_columns, done = _DTYPES[stored.dtype], stored.shape[1], 0
        row_bytes = num_columns * dtype.itemsize
        while done < len(target):
            piece = target[done : done + self._staging.num_fitting(row_bytes, len(target) - done)]
            buffer = self._read(stored, (first + done) * row_bytes, len(piece) * row_bytes)
            self._staging.send_changed(buffer, dtype, num_columns, columns, piece)
            done += len(piece)

    def _read(self, stored: StoredTensor, start: int, num_bytes: int) -> torch.Tensor:
        buffer = self._staging.take(num_bytes)
        self._files.read(stored, start, memoryview(buffer.numpy().data))
        self._progress.read(num_bytes)
        return buffer
