"""For which arguments Triton would compile the kernels that are launched, without compiling or running any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from motet.kernels.backend import triton_kernels
from motet.tests.rigs.launch_grid import grid_problem
from motet.tests.rigs.stand_in_gpu.device_tensor import DeviceTensor
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.workers import worker_builder

Specialisation = tuple[Any, ...]  # the kernel's name, then what it is compiled for


@contextmanager
def launched_specialisations() -> Iterator[set[Specialisation]]:
    """All of the block's launches, which compute nothing: their results are what lay in their memory before."""
    found: set[Specialisation] = set()

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        problem = grid_problem(self.__name__, grid)
        assert problem is None, problem
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        compiled_for = tuple(_compiled_for(parameter, named[parameter.name]) for parameter in self.params)
        found.add((self.__name__, *compiled_for, *sorted(options.items())))

    with patch.object(JITFunction, "run", record):
        yield found


@contextmanager
def recorded_gpu() -> Iterator[set[Specialisation]]:
    """Workers with Triton's kernels, whose launches are recorded. Linears give zeros, so that logits are finite."""

    def zeros(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros((len(x), len(weight)), dtype=x.dtype, device=x.device)

    kernels = replace(triton_kernels(torch.device("cuda"), torch.bfloat16), linear=zeros)
    with (
        stand_in_gpu(),
        patch.object(worker_builder, "choose_kernels", return_value=kernels),
        launched_specialisations() as found,
    ):
        yield found


def _compiled_for(parameter: Any, value: Any) -> Any:
    """Triton's rules: constants by value; integers by width and by whether they are 1 or multiples of 16; addresses by
    type and by whether they are multiples of 16."""
    if parameter.is_constexpr or value is None:
        return parameter.name, value
    if isinstance(value, torch.Tensor):
        inner = value.inner if isinstance(value, DeviceTensor) else value
        is_aligned = inner.storage_offset() * inner.element_size() % 16 == 0
        return parameter.name, inner.dtype, is_aligned and not parameter.do_not_specialize_on_alignment
    if isinstance(value, int):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        if parameter.do_not_specialize:
            return parameter.name, width
        is_aligned = value % 16 == 0 and not parameter.do_not_specialize_on_alignment
        return parameter.name, width, value == 1, is_aligned
    return parameter.name, type(value).__name__
