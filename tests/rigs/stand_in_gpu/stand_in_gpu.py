"""A GPU for tests, on the CPU: `with stand_in_gpu() as gpu:` makes `torch.device("cuda")` work in all threads.

Nothing can reach its memory but torch's operations and interpreted kernels. What a GPU leaves to its programmer is
checked: what reads, waits and copies, and in which order. What it cannot show: times, and rounding of a GPU's kernels.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from motet.tests.rigs.stand_in_gpu.capture import Captures
from motet.tests.rigs.stand_in_gpu.cuda_names import cuda_names
from motet.tests.rigs.stand_in_gpu.operations import Operations
from motet.tests.rigs.stand_in_gpu.pinned_memory import PinnedMemory
from motet.tests.rigs.stand_in_gpu.streams import Streams
from motet.tests.rigs.stand_in_gpu.tally import Tally
from motet.tests.rigs.stand_in_gpu.timeline import Timeline
from motet.tests.rigs.stand_in_gpu.triton_launches import interpreted_launches
from motet.workers import worker_builder

_CUDA, _META = 1, 14  # c10::DeviceType
_NUM_DEVICE_TYPES = 21


class StandInGpu:
    """What the stand-in knows of its use."""

    def __init__(self) -> None:
        self.timeline, self.tally = Timeline(), Tally()
        self.streams = Streams(self.timeline, self.tally)
        self.captures = Captures(self.timeline)
        self.pinned = PinnedMemory(self.timeline, self.tally)
        self.operations = Operations(self.timeline, self.tally, self.pinned, self.streams, self.captures)

    @property
    def problems(self) -> list[str]:
        """All that were raised, wherever they were caught, and those that could not be raised where they happened."""
        return self.timeline.problems

    def names(self) -> dict[str, Any]:
        return cuda_names(self.streams, self.captures, self.operations, self.pinned, self.tally)


class _Mode(TorchDispatchMode):
    """Gives torch's operations of one thread to the stand-in."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operations.dispatch(func, args, kwargs or {})


class _Generator(torch.Generator):
    """Draws on the CPU, whatever device is requested."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


@contextmanager
def stand_in_gpu() -> Iterator[StandInGpu]:
    """Raises AssertionError at the end if `problems` has any. A test that expects some clears it."""
    gpu = StandInGpu()
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    make_tensor, as_numpy, as_list, move_memory = torch.tensor, torch.Tensor.numpy, torch.Tensor.tolist, ctypes.memmove

    def begun(thread: threading.Thread) -> None:
        with _Mode(gpu.operations):
            bootstrap(thread)

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """torch makes it on the CPU, where no mode sees it, and then moves it."""
        made = make_tensor(data, **kwargs)
        made = made.pin_memory() if pin_memory else made
        return made if device is None else made.to(device)

    def memmove(target: int, source: int, num_bytes: int) -> None:
        gpu.pinned.touch_on_host(source, num_bytes, writes=False)
        gpu.pinned.touch_on_host(target, num_bytes, writes=True)
        move_memory(target, source, num_bytes)

    def numpy(tensor: torch.Tensor, **kwargs: Any) -> Any:
        """The caller reads and writes pinned memory through the array from now on."""
        gpu.pinned.use_on_host((), [tensor])
        return as_numpy(tensor, **kwargs)

    def tolist(tensor: torch.Tensor) -> Any:
        """torch reads the host's memory itself, and dispatches nothing."""
        gpu.pinned.use_on_host([tensor], ())
        return as_list(tensor)

    try:
        with (
            _device_guard(),
            mock.patch.multiple(torch.cuda, create=True, **gpu.names()),
            mock.patch.object(threading.Thread, "_bootstrap_inner", begun),
            mock.patch.object(torch, "tensor", tensor),
            mock.patch.object(torch.Tensor, "numpy", numpy),
            mock.patch.object(torch.Tensor, "tolist", tolist),
            mock.patch.object(torch, "Generator", _Generator),
            mock.patch.object(ctypes, "memmove", memmove),
            mock.patch.object(worker_builder, "check_dtype"),  # float32, refused on a GPU, has the CPU's numbers here
            interpreted_launches(gpu.operations, gpu.captures),
            _Mode(gpu.operations),
        ):
            yield gpu
    finally:
        gpu.operations.is_closed = True
    assert gpu.problems == [], gpu.problems


@contextmanager
def _device_guard() -> Iterator[None]:
    """torch's builds for CPUs have no guard of CUDA devices, and refuse a view without one. That of `meta` is empty."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    assert guards[_META], "torch has no guard of meta devices"
    try:
        yield
    finally:
        guards[_CUDA] = before
