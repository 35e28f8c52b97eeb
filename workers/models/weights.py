"""A base's tensors, read by name from safetensors files. Opening them needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open

from .stored_tensor import (
    check_float,
    has_other_head,
    lacks_head,
    named_in_full,
    part_name,
    rows_of_parts,
    shards,
    stored_tensors,
)

if TYPE_CHECKING:
    import torch

    from ...kernels.quantised import QuantisedWeight


# The interface from which a decoder takes its tensors.


class WeightSource(Protocol):
    """Each tensor is taken once; `finish` raises an error if any is left over."""

    has_head: bool  # the model was saved with its head, or with one that is the embedding

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        *,
        in_floats: bool = False,
    ) -> torch.Tensor:
        """The tensor, or these rows and columns of it, in the engine's dtype and on its device.

        `shape` is that of the whole tensor. `in_floats`: in float32, whatever the engine's dtype. Raises ValueError if
        it is missing, has another shape or holds integers.
        """

    def take_quantised(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> QuantisedWeight | None:
        """The same of a weight that the file has in few bits; None: it has it in 16 or 32, and it is not taken."""

    def __contains__(self, name: str) -> bool:
        """The model has a tensor of this name that no part of it took yet."""

    def has_other_head(self) -> bool:
        """Whether the model was saved with a head that is not its embedding. Reads both."""

    def drop(self, *, prefix: str = "", suffix: str = "") -> None:
        """Removes tensors whose names begin and end so, which the model computes by itself, shares or does not use."""

    def split(self, name: str, num_rows: Mapping[str, int]) -> None:
        """Takes runs of a tensor's rows for tensors of their own, by name in their order. Raises ValueError if it is
        missing or has another number of rows.
        """

    def finish(self) -> None:
        """Raises ValueError if tensors are left that no part of the model took."""


class TensorPlace(NamedTuple):
    """Where a tensor is."""

    file: safe_open
    name: str
    rows: tuple[int, int] | None


Progress = Callable[[str, int, int], None]  # what, done, total


class Checkpoint:
    """The tensors of a model folder. Each is taken once; `finish` raises if one was not taken."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, on_progress: Progress | None = None
    ) -> None:
        files = open_checkpoint(folder, "pt")
        self.has_head = not lacks_head(files)
        # By name: the file, the tensor's name in it, and which of its rows; None: all.
        self._where = named_in_full({name: TensorPlace(file, name, None) for name, file in files.items()})
        self._folder, self._dtype, self._device, self._on_progress = folder, dtype, device, on_progress
        self._total = len(self._where)

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        *,
        in_floats: bool = False,
    ) -> torch.Tensor:
        """The tensor or the given part of it, in the engine's dtype and on its device; only that part is read.

        `shape` is the whole tensor's. Raises ValueError if it is missing or misshapen.
        """
        location = self._where.pop(name, None)
        if location is None:
            raise ValueError(f"{self._folder} has no tensor {name!r}, or two parts of the model need it")
        stored = location.file.get_slice(location.name)  # type: ignore[no-untyped-call]
        stored_shape, label = tuple(stored.get_shape()), location.name
        if location.rows is not None:
            label, (first, stop) = part_name(name, label), location.rows
            stored_shape = (stop - first, *stored_shape[1:])
            start, end = rows or (0, stop - first)
            rows = (first + start, first + end)
        if stored_shape != shape:
            raise ValueError(f"tensor {label!r} has shape {stored_shape}: config.json needs {shape}")
        check_float(label, stored.get_dtype())
        if not shape:
            tensor: torch.Tensor = location.file.get_tensor(location.name)  # type: ignore[no-untyped-call]
        elif columns is None:
            tensor = stored[slice(*rows)] if rows is not None else stored[:]
        else:
            tensor = stored[slice(*rows) if rows is not None else slice(None), slice(*columns)]
        if self._on_progress is not None:
            self._on_progress("loading weights", self._total - len(self._where), self._total)
        return tensor.to(self._device).float() if in_floats else tensor.to(self._device, self._dtype)

    def take_quantised(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> QuantisedWeight | None:
        """None: these files have no weights of few bits."""
        return None

    def split(self, name: str, num_rows: Mapping[str, int]) -> None:
        """See `WeightSource.split`."""
        location = self._where.pop(name, None)
        if location is None:
            raise ValueError(f"{self._folder} has no tensor {name!r}")
        shape = location.file.get_slice(location.name).get_shape()  # type: ignore[no-untyped-call]
        for part, rows in rows_of_parts(name, shape, num_rows).items():
            self._where[part] = TensorPlace(location.file, location.name, rows)
        self._total += len(num_rows) - 1

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def has_other_head(self) -> bool:
        return has_other_head(self._folder)

    def drop(self, *, prefix: str = "", suffix: str = "") -> None:
        """Forgets tensors that the model computes by itself, shares or does not use."""
        for name in [name for name in self._where if name.startswith(prefix) and name.endswith(suffix)]:
            del self._where[name]

    def finish(self) -> None:
        """Raises ValueError if tensors are left that no part of the model took."""
        if self._where:
            names = ", ".join(sorted(self._where)[:5])
            raise ValueError(f"{self._folder} has {len(self._where)} tensors that this model has no place for: {names}")
        if self._on_progress is not None:
            self._on_progress("loading weights", self._total, self._total)


def open_checkpoint(folder: Path, framework: Literal["numpy", "pt"]) -> Mapping[str, safe_open]:
    """The opened file of each tensor, by its name; only headers are read. `framework`: whose tensors it returns.

    Raises ValueError for a damaged file, and if there is no tensor.
    """
    files = [_open(path, framework) for path in shards(folder)]
    where = {name: file for file in files for name in file.keys()}  # type: ignore[no-untyped-call] # noqa: SIM118
    if not where:
        raise ValueError(f"{folder} has no *.safetensors file with tensors in it")
    return where


def _open(path: Path, framework: str) -> safe_open:
    try:
        return safe_open(path, framework=framework, device="cpu")
    except SafetensorError as error:
        stored_tensors(path)  # raises an error that names the tensor, if one is cut off
        raise ValueError(f"{path} is damaged: {error}") from error
