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

from motet.tests.rigs.stand_in_gpu.call import leaves
from motet.tests.rigs.stand_in_gpu.capture import Captures, Use
from motet.tests.rigs.stand_in_gpu.device_tensor import DeviceTensor
from motet.tests.rigs.stand_in_gpu.operations import MixedDevicesError, Operations
from motet.tests.rigs.stand_in_gpu.tally import product_line
from motet.tests.rigs.stand_in_gpu.timeline import Work
from motet.tests.rigs.stand_in_gpu.watched_memory import WatchedMemory


class _Addresses:
    """Cells of some memory that a kernel reads and writes, by the addresses that its programs load and store."""

    def __init__(self) -> None:
        self._memories: list[WatchedMemory] = []
        self._found: dict[tuple[int, bool], set[int]] = {}

    def begin(self, memories: list[WatchedMemory]) -> None:
        self._memories, self._found = memories, {}

    def note(self, addresses: np.ndarray, mask: np.ndarray, *, writes: bool) -> None:
        if not self._memories:
            return
        used = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)].astype(np.int64)
        for at, memory in enumerate(self._memories):
            inside = used[(used >= memory.address) & (used < memory.address + memory.num_bytes)]
            if inside.size:
                cells = np.unique((inside - memory.address) // memory.cell_bytes)
                self._found.setdefault((at, writes), set()).update(cells.tolist())

    def end(self) -> list[Use]:
        found = [(self._memories[at], np.array(sorted(cells)), w) for (at, w), cells in self._found.items()]
        self._memories = []
        return found  # type: ignore[return-value]


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
        # A view of a page in each layer, say: only the addresses tell which pages are used.
        scattered = list({id(x.memory): x.memory for x in ours if not x.inner.is_contiguous()}.values())
        whole: list[Use] = [
            (x.memory, x.memory.cells_of(x.inner), True) for x in ours if all(x.memory is not m for m in scattered)
        ]
        plain_args = [_plain(x) for x in args]
        plain_kwargs = {key: _plain(x) for key, x in kwargs.items()}

        def run(work: Work, note: Callable[[list[Use], Work], None]) -> None:
            note(whole, work)
            addresses.begin(scattered)
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
