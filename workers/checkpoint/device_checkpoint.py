"""A base's tensors, read by ranges of bytes and copied straight to a GPU.

No tensor is whole in the host's memory: pieces of them pass through a `Staging`, whatever the size of the base. While
one piece is copied the next is read.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType

import torch

from .file_ranges import FileRanges
from .load_progress import LoadProgress, OnProgress
from .staging import STAGING_BYTES, Staging
from .stored_tensor import StoredTensor, check_float, shards, stored_tensors
from .tensor_names import has_other_head, lacks_head, named_in_full

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
            raise ValueError(f"tensor {name!r} has shape {stored.shape}: config.json needs {shape}")
        check_float(name, stored.dtype)
        first, stop = rows if rows is not None else (0, shape[0] if shape else 1)
        own_shape = (stop - first, *shape[1:]) if shape else ()
        if columns is not None:
            own_shape = (stop - first, columns[1] - columns[0])
        target = torch.empty(own_shape, dtype=self._dtype, device=self._device)
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

    def has_other_head(self) -> bool:
        return has_other_head(self._folder)

    def drop(self, suffix: str) -> None:
        """Forgets tensors that the model computes by itself or shares."""
        for name in [name for name in self._where if name.endswith(suffix)]:
            self._progress.done(self._where.pop(name).num_bytes)

    def finish(self) -> None:
        """Raises ValueError if tensors are left that no part of the model took."""
        if self._where:
            shown = ", ".join(sorted(self._where)[:5])
            raise ValueError(f"{self._folder} has {len(self._where)} tensors that this model has no place for: {shown}")
        self._progress.end()

    def _copy_rows(self, stored: StoredTensor, first: int, target: torch.Tensor) -> None:
        """The numbers from `first` on, which lie side by side in the file."""
        dtype, flat, done = _DTYPES[stored.dtype], target.view(-1), 0
        while done < len(flat):
            piece = flat[done : done + self._staging.num_fitting(dtype.itemsize, len(flat) - done)]
            taken = self._read(stored, (first + done) * dtype.itemsize, len(piece) * dtype.itemsize)
            if dtype == self._dtype:
                self._staging.send(taken, piece)
            else:
                self._staging.send_changed(taken, dtype, 1, slice(None), piece.unsqueeze(1))
            done += len(piece)

    def _copy_columns(self, stored: StoredTensor, first: int, own: slice, target: torch.Tensor) -> None:
        dtype, num_columns, done = _DTYPES[stored.dtype], stored.shape[1], 0
        row_bytes = num_columns * dtype.itemsize
        while done < len(target):
            piece = target[done : done + self._staging.num_fitting(row_bytes, len(target) - done)]
            taken = self._read(stored, (first + done) * row_bytes, len(piece) * row_bytes)
            self._staging.send_changed(taken, dtype, num_columns, own, piece)
            done += len(piece)

    def _read(self, stored: StoredTensor, start: int, num_bytes: int) -> torch.Tensor:
        taken = self._staging.take(num_bytes)
        self._files.read(stored, start, memoryview(taken.numpy().data))
        self._progress.read(num_bytes)
        return taken
