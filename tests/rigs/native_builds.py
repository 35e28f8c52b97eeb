"""The builds that the tests of the native CPU kernels run on, and their tolerances."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from motet.kernels.backend import Kernels, native_kernels
from motet.kernels.native.build import NativeUnavailable, cpu_flags, load_library

Build = tuple[torch.dtype, int, tuple[str, ...]]  # dtype, threads, flags of the CPU that it is compiled for

DTYPES = [torch.float32, torch.bfloat16]
# Sums run in another order; bfloat16 results have 8 bits, and the twin rounds between its steps where these do not.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
SANITIZERS = os.environ.get("MOTET_TEST_SANITIZERS", "").split()  # compiler flags
EXAMPLES = 4 if SANITIZERS else 12  # of random shapes, for each build
# What the kernels are compiled for: this CPU; one with AVX-512 but without its products of bfloat16; one with AVX2; one
# with neither AVX nor fused products.
HERE, AVX512, AVX2, PLAIN = cpu_flags(), ("-march=x86-64-v4",), ("-march=x86-64-v3",), ("-march=x86-64",)
NEEDED = {AVX512: "avx512bw", AVX2: "avx2"}  # flags of the CPU
BUILDS: list[Build] = [(dtype, threads, HERE) for dtype in DTYPES for threads in (1, 2)]
if platform.machine() in ("x86_64", "AMD64"):
    known = (AVX2, PLAIN) if SANITIZERS else (AVX512, AVX2, PLAIN)  # sanitized ones take long to build
    lesser = [flags for flags in known if NEEDED.get(flags, "") in Path("/proc/cpuinfo").read_text()]
    BUILDS += [
        (dtype, 2 if (dtype, flags) == (torch.bfloat16, AVX2) else 1, flags) for flags in lesser for dtype in DTYPES
    ]


def load_build(build: Build) -> Kernels:
    """The kernels of a build, with the sanitizers that are requested. Skips where they cannot be compiled."""
    dtype, num_threads, flags = build
    try:
        return native_kernels(dtype, num_threads, load_library(flags=[*flags, *SANITIZERS]))
    except NativeUnavailable as problem:
        pytest.skip(str(problem))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that both are equal within the dtype's tolerance and have no NaN."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
