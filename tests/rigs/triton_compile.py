"""Triton kernels compiled ahead of time, without a GPU, exactly as the product launches them.

Launches are recorded from the product's own host code on tensors without memory (device "meta"), and each is compiled
with the argument types, specialisations and options that Triton's own launcher would choose.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
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

from motet.tests.rigs.launch_grid import grid_problem

_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Chip:
    """What a multiprocessor has, from the tables of compute capabilities in NVIDIA's CUDA C++ programming guide."""

    shared_bytes: int
    shared_bytes_of_program: int  # at most
    registers: int = 65536
    warps: int = 64
    programs: int = 32


RESERVED_SHARED_BYTES = 1024  # for the system, in each program
CHIPS = {
    80: Chip(164 * 1024, 163 * 1024),
    90: Chip(228 * 1024, 227 * 1024),
    100: Chip(228 * 1024, 227 * 1024),
}


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    args: dict[str, Any]
    options: dict[str, int]
    grid: tuple[int, ...]

    @property
    def num_programs(self) -> int:
        return math.prod(self.grid)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True)
class Compiled:
    ptx: str = field(repr=False)
    capability: int
    warps: int
    shared_bytes: int
    registers: int  # of a thread
    stack_bytes: int  # spilled registers are here
    local_bytes: int

    @property
    def matrix_instructions(self) -> set[str]:
        return set(re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)", self.ptx))

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor runs at once. Registers are given out to a warp in runs of 256."""
        chip = CHIPS[self.capability]
        registers = -(-self.registers * 32 // 256) * 256 * self.warps
        shared = chip.shared_bytes // (self.shared_bytes + RESERVED_SHARED_BYTES)
        return min(chip.registers // registers, shared, chip.warps // self.warps, chip.programs)

    @property
    def load_bytes(self) -> Counter[int]:
        """How many instructions read global memory into registers, by the bytes that each reads."""
        found: Counter[int] = Counter()
        for vector, bits in re.findall(
            r"\bld\.(?:volatile\.)?global(?:\.[a-z]\w*)*?(?:\.v(\d))?\.[bfsu](\d+)", self.ptx
        ):
            found[int(vector or 1) * int(bits) // 8] += 1
        return found

    @property
    def copy_bytes(self) -> Counter[int]:
        """How many instructions copy from global to shared memory while the program goes on, by their bytes."""
        sizes = re.findall(r"cp\.async\.c[ag]\.\S* \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", self.ptx)
        return Counter(int(size, 0) for size in sizes)

    @property
    def rounds_ahead(self) -> int | None:
        """Rounds of the loop with products for which copies to shared memory are under way while one is computed.

        The least of such loops. None: no loop copies. A copy is waited for by how many later groups may be unfinished.
        """
        ahead = []
        for loop in _innermost_loops(self.ptx):
            groups = loop.count("cp.async.commit_group")
            waits = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", loop)]
            if groups and waits:
                ahead.append(max(waits) // groups)
        return min(ahead, default=None)


def _innermost_loops(ptx: str) -> list[str]:
    """The text of each loop that has no other within: from a label to the last jump back to it."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    ends: dict[int, int] = {}
    for number, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if jump and labels[jump[1]] < number:
            ends[labels[jump[1]]] = number
    inner = [(a, b) for a, b in ends.items() if not any(a < c and d <= b for c, d in ends.items())]
    return ["\n".join(lines[a : b + 1]) for a, b in inner]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records the kernels that the block would launch."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        problem = grid_problem(self.__name__, grid)
        assert problem is None, problem
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        assert named.keys() == set(self.arg_names), f"{self.__name__}: {named.keys() ^ set(self.arg_names)}"
        launches.append(Launch(self, {name: named[name] for name in self.arg_names}, options, tuple(grid)))

    with patch.object(JITFunction, "run", record):
        yield launches


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Machine code for a GPU of this compute capability, and the resources that it needs."""
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
    return Compiled(
        built.asm["ptx"],
        capability,
        built.metadata.num_warps,
        built.metadata.shared,
        usage["REG"],
        usage["STACK"],
        usage["LOCAL"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said.stdout)}
