"""The native kernels' tests once more, with the kernels compiled under address and undefined-behaviour sanitizers.

Memory of torch comes from the sanitizer's allocator, too, so that a kernel's access beyond a tensor is noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from motet.kernels.native.build import COMPILERS

# Without -O1 they take four times as long to build.
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1")
DEADLINE_S = 3600  # it builds all kernels and runs them some ten times slower: a minute on a fast machine
pytestmark = pytest.mark.timeout(DEADLINE_S)
NATIVE = (
    "test_native.py",
    "test_native_lora.py",
    "test_native_linear.py",
    "test_native_quantised.py",
    "test_native_experts.py",
    "test_native_gated_delta.py",
    "test_native_recurrence.py",
    "test_native_sampling.py",
    "test_native_step.py",
    "test_model_ends.py",
)
# Each function makes an error if its caller asks for it, so that a test sees that the sanitizers report errors.
PROBE = """
extern "C" int beyond(const int* from, long index) { return from[index]; }
extern "C" int shifted(int by) { return 1 << by; }
"""
CALLS = {
    "AddressSanitizer": "library.beyond(ctypes.c_void_p(torch.ones(8, dtype=torch.int32).data_ptr()), 8)",
    "shift exponent 40": "library.shifted(40)",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that can load sanitized libraries. Skips where the compiler has no sanitizers."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    folder = tmp_path_factory.mktemp("sanitizers")
    (folder / "probe.cpp").write_text(PROBE)
    built = [compiler, *FLAGS, "-shared", "-fPIC", str(folder / "probe.cpp"), "-o", str(folder / "probe.so")]
    done = subprocess.run(built, capture_output=True, text=True)
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if done.returncode != 0 or not os.path.isabs(runtime):
        pytest.skip(f"{compiler} has no sanitizers: {done.stderr.strip()[:200]}")
    return {
        **os.environ,
        "LD_PRELOAD": runtime,
        # Python leaves objects behind at its end.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "MOTET_TEST_SANITIZERS": " ".join(FLAGS),
        "PROBE": str(folder / "probe.so"),
    }


@pytest.mark.parametrize("found", CALLS)
def test_the_sanitizers_are_awake(environment: dict[str, str], found: str) -> None:
    program = f"import ctypes, os, torch; library = ctypes.CDLL(os.environ['PROBE']); {CALLS[found]}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode != 0
    assert found in done.stderr


def test_the_native_kernels_are_clean(environment: dict[str, str]) -> None:
    tests = [Path(__file__).with_name(name) for name in NATIVE]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-s",  # else pytest keeps what a sanitizer says to itself
        "-p",
        "no:cacheprovider",
        "-k",
        "not onednn and not compiler",
    ]
    done = subprocess.run(
        [*command, *map(str, tests)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=tests[0].parents[2],
    )
    report = (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0, report
    assert "passed" in done.stdout and "skipped" not in done.stdout, report
