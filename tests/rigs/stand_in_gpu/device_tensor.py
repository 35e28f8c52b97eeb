"""A tensor whose memory the host cannot reach."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch

from motet.tests.rigs.stand_in_gpu.call import Call
from motet.tests.rigs.stand_in_gpu.tally import product_line
from motet.tests.rigs.stand_in_gpu.timeline import GpuProblem
from motet.tests.rigs.stand_in_gpu.watched_memory import Lease, WatchedMemory

DEVICE = torch.device("cuda", 0)


class HostReadError(GpuProblem):
    """The host takes the address of the device's memory: on a GPU the process dies of it."""


class Dispatch(Protocol):
    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class DeviceTensor(torch.Tensor):
    """Says that it is on `cuda:0`. Its numbers lie in `inner`, which only the stand-in touches.

    Views share `memory` and `lease`. Each operation comes to `dispatch`, below autograd, as torch's backends get it.
    """

    inner: torch.Tensor  # type: ignore[assignment]  # hides no attribute: torch.inner(a, b) is a function
    memory: WatchedMemory
    lease: Lease
    dispatch: Dispatch

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: WatchedMemory, lease: Lease, dispatch: Dispatch) -> DeviceTensor:
        with torch.inference_mode(False):  # autograd takes no view of another tensor that was made in that mode
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
            )
        made.inner, made.memory, made.lease, made.dispatch = inner, memory, lease, dispatch
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub forgets the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """In a thread that the stand-in has not entered."""
        found = next(x for x in Call(func, args, kwargs or {}).tensors if isinstance(x, DeviceTensor))
        return found.dispatch(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_moved(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_moved(index), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> NoReturn:
        raise self._refused("the address of the device's memory is requested")

    def numpy(self, *_: object, **__: object) -> NoReturn:
        raise self._refused("numpy is to read the device's memory")

    __array__ = numpy

    def untyped_storage(self) -> NoReturn:
        raise self._refused("the storage of the device's memory is requested")

    def _refused(self, what: str) -> GpuProblem:
        return self.memory.timeline.problem(HostReadError(f"{product_line()}: {what}"))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def _moved(index: Any) -> Any:
    """Lists in an index as torch moves them to a GPU: by a copy that waits."""
    if isinstance(index, tuple):
        return tuple(_moved(each) for each in index)
    return torch.tensor(index, device=DEVICE) if isinstance(index, list) else index
