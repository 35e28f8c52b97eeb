"""Whether gangs here would compute with the fast kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...kernels.native.build import COMPILERS
from ...workers.device_probe import has_driver
from ..config import CACHE_VARIABLE
from .finding import Finding, error, ok, warning

CHECK = "kernels"
CPU_FACTS = Path("/proc/cpuinfo")
# CPU features that the C++ kernels use, the best first, and their purpose.
INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2", "asimd": "NEON"}
WHY_SLOW = "gangs would compute with the plain kernels, with many times fewer tokens per second"


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    compiler: str | None
    cache: Path
    cache_is_writable: bool
    instructions: str | None  # the best of INSTRUCTIONS; None: none of them, or unknown
    has_gpu_driver: bool
    has_triton: bool


def gather_kernels() -> KernelFacts:
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "motet"
    try:
        text = CPU_FACTS.read_text()
        flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:
        flags = set()
    return KernelFacts(
        compiler=next((found for name in COMPILERS if (found := shutil.which(name))), None),
        cache=cache,
        cache_is_writable=_is_writable(cache),
        instructions=next((name for flag, name in INSTRUCTIONS.items() if flag in flags), None),
        has_gpu_driver=has_driver(),
        has_triton=importlib.util.find_spec("triton") is not None,
    )


def _is_writable(folder: Path) -> bool:
    """Whether files can be made there, once it and what is above it are made."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def check_kernels(facts: KernelFacts) -> list[Finding]:
    findings = []
    if facts.compiler is None:
        findings.append(
            error(
                CHECK,
                f"no C++ compiler was found ({', '.join(COMPILERS)})",
                why=WHY_SLOW,
                do="apt-get install g++; motet's images have it",
            )
        )
    else:
        cpu = facts.instructions or "no vector instructions that are known"
        findings.append(ok(CHECK, f"{facts.compiler} compiles for this CPU ({cpu})"))
    if not facts.cache_is_writable:
        findings.append(
            error(
                CHECK,
                f"{facts.cache} cannot be written",
                why=f"compiled kernels are kept there; {WHY_SLOW}",
                do=f"a folder that can be written, named by {CACHE_VARIABLE}: with readOnlyRootFilesystem an emptyDir "
                "at /var/cache",
            )
        )
    if facts.has_gpu_driver and not facts.has_triton:
        findings.append(
            warning(
                CHECK,
                "there is an NVIDIA driver, and Triton is not installed",
                why="gangs on a GPU would compute with the plain kernels, several times slower",
                do="pip install 'motet[gpu]', or the image motet-cuda",
            )
        )
    return findings
