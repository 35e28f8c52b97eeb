"""Triton's kernels on a stand-in GPU: interpreted, on the plain tensors within."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from motet.tests.rigs.launch_grid import grid_problem
from motet.tests.rigs.stand_in_gpu.call import leaves
from motet.tests.rigs.stand_in_gpu.capture import Captures, Use
from motet.tests.rigs.stand_in_gpu.device_tensor import DeviceTensor
from motet.tests.rigs.stand_in_gpu.operations import MixedDevicesError, Operations
from motet.tests.rigs.stand_in_gpu.tally import product_line
from motet.tests.rigs.stand_in_gpu.timeline import GpuProblem, Work
from motet.tests.rigs.stand_in_gpu.watched_memory import WatchedMemory

_POOL = "workers/memory/page_arrays.py"  # where it is made


class GridError(GpuProblem):
    """A launch has more programs along y or z than CUDA takes."""


class OutsideError(GpuProblem):
    """A program loads or stores outside of the memory that its kernel was given."""


class _Addresses:
    """Cells of some memory that a kernel reads and writes, by the addresses that its programs load and store."""

    def __init__(self) -> None:
        self._all: list[WatchedMemory] = []  # by address
        self._starts = self._ends = np.empty(0, np.int64)
        self._noted: set[int] = set()  # ids of memory whose cells are wanted
        self._found: dict[tuple[int, bool], set[int]] = {}

    def begin(self, given: list[WatchedMemory], noted: list[WatchedMemory]) -> None:
        """`given`: memory of all arguments; `noted`: of those whose cells are wanted."""
        self._all = sorted({id(memory): memory for memory in given}.values(), key=lambda memory: memory.address)
        self._starts = np.array([memory.address for memory in self._all], np.int64)
        self._ends = self._starts + np.array([memory.num_bytes for memory in self._all], np.int64)
        self._noted, self._found = {id(memory) for memory in noted}, {}

    def note(self, addresses: np.ndarray, mask: np.ndarray, *, writes: bool) -> None:
        if not self._all:
            return
        used = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)].astype(np.int64)
        places = np.searchsorted(self._starts, used, side="right") - 1
        if used.size and (places.min() < 0 or (used >= self._ends[places]).any()):
            problem = f"{product_line()}: a program {'stores' if writes else 'loads'} outside of its kernel's memory"
            raise self._all[0].timeline.problem(OutsideError(problem))
        for place in np.unique(places):
            memory = self._all[place]
            if id(memory) in self._noted:
                cells = np.unique((used[places == place] - memory.address) // memory.cell_bytes)
                self._found.setdefault((int(place), writes), set()).update(cells.tolist())

    def end(self) -> list[Use]:
        found = [(self._all[at], np.array(sorted(cells)), writes) for (at, writes), cells in self._found.items()]
        self._all = []
        return found  # type: ignore[return-value]


def _is_scattered(x: DeviceTensor) -> bool:
    """Whether a kernel uses only parts of it. The pool of a base of one layer is contiguous."""
    return not x.inner.is_contiguous() or _POOL in x.memory.what


@contextmanager
def interpreted_launches(operations: Operations, captures: Captures) -> Iterator[None]:
    """Launches take tensors of the device. Does nothing where kernels are not interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    addresses = _Addresses()
    launch = interpreter.GridExecutor.__call__
    load = interpreter.InterpreterBuilder.create_masked_load
    store = interpreter.InterpreterBuilder.create_masked_store

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        given = leaves((*args, *kwargs.values()))
        ours = [x for x in given if isinstance(x, DeviceTensor)]
        if not ours:
            launch(executor, *args, **kwargs)
            return
        name = executor.fn.__name__
        if len(ours) < sum(isinstance(x, torch.Tensor) for x in given):
            problem = f"{product_line()}: {name} gets tensors of the host and of the device"
            raise ours[0].memory.timeline.problem(MixedDevicesError(problem))
        refused = grid_problem(name, executor.grid)
        if refused is not None:
            raise ours[0].memory.timeline.problem(GridError(f"{product_line()}: {refused}"))
        # A layer's part of each page of the pool, say: only the addresses show which pages are used.
        scattered = list({id(x.memory): x.memory for x in ours if _is_scattered(x)}.values())
        whole: list[Use] = [
            (x.memory, x.memory.cells_of(x.inner), True) for x in ours if all(x.memory is not m for m in scattered)
        ]
        plain_args = [_plain(x) for x in args]
        plain_kwargs = {key: _plain(x) for key, x in kwargs.items()}

        def run(work: Work, note: Callable[[list[Use], Work], None]) -> None:
            note(whole, work)
            addresses.begin([memory for memory, *_ in whole] + scattered, scattered)
            with _disable_current_modes():
                launch(executor, *plain_args, **plain_kwargs)
            note(addresses.end(), work)

        capture = captures.current
        if capture is None:
            run(operations.launch(name), _note)
        else:
            capture.recorded.append(lambda work: run(work, capture.note))

    def loaded(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        addresses.note(ptrs.data, mask.data, writes=False)
        return load(builder, ptrs, mask, *rest)

    def stored(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses.note(ptrs.data, mask.data, writes=True)
        return store(builder, ptrs, value, mask, *rest)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
        mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", loaded),
        mock.patch.object(interpreter.InterpreterBuilder, "create_masked_store", stored),
    ):
        yield


def _note(uses: list[Use], work: Work) -> None:
    for memory, cells, writes in uses:
        memory.use(cells, work, writes=writes)


def _plain(x: Any) -> Any:
    return x.inner if isinstance(x, DeviceTensor) else x
