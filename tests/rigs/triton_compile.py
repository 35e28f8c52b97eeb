"""Triton kernels compiled ahead of time, without a GPU, exactly as the product launches them.

Launches are recorded from the product's own host code on tensors without memory (device "meta"), and each is compiled
with the argument types, specialisations and options that Triton's own launcher would choose.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
_OPTIONS = ("num_warps", "num_stages")
# Bytes of shared memory that a program may take.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    args: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True)
class Compiled:
    ptx: str = field(repr=False)
    shared_bytes: int
    registers: int
    stack_bytes: int  # spilled registers are here
    local_bytes: int

    @property
    def matrix_instructions(self) -> set[str]:
        return set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)", self.ptx))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records the kernels that the block would launch."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(0 < side < 2**31 for side in grid), f"{self.__name__}: no grid {grid}"
        assert all(side < 65536 for side in grid[1:]), f"{self.__name__}: no grid {grid}"
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        assert named.keys() == set(self.arg_names), f"{self.__name__}: {named.keys() ^ set(self.arg_names)}"
        launches.append(Launch(self, {name: named[name] for name in self.arg_names}, options))

    with patch.object(JITFunction, "run", record):
        yield launches


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Machine code for a GPU of this compute capability (80, 90), and the resources that it needs."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (parameter, value) in enumerate(zip(launch.kernel.params, launch.args.values(), strict=True)):
        kind = "constexpr"
        is_plain = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not is_plain):
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            kind = f"*{_TYPES[value.dtype]}"
            is_aligned = value.storage_offset() * value.element_size() % 16 == 0
            if is_aligned and not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not is_plain:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            kind = "fp32"
        signature[parameter.name] = kind
    source = ASTSource(launch.kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    usage = _resource_usage(built.asm["cubin"])
    return Compiled(built.asm["ptx"], built.metadata.shared, usage["REG"], usage["STACK"], usage["LOCAL"])


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said.stdout)}
