"""Runs a command as on a CPU that has AVX2 and no more: `python benchmarks/rigs/with_avx2.py COMMAND`.

Its native kernels are compiled for that, and torch, oneDNN and MKL use nothing else.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from motet.kernels.native.build import COMPILERS

MARCH = "x86-64-v3"


def with_avx2() -> Mapping[str, str]:
    """Environment variables for such a command. The first compiler on its PATH compiles for AVX2."""
    folder = Path.home() / ".cache" / "motet" / MARCH  # stays, so that kernels are compiled once
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
    instead = folder / COMPILERS[0]
    if not instead.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        instead.write_text(
            f'#!/bin/sh\nfor each; do shift; [ "$each" = -march=native ] && each=-march={MARCH}; '
            f'set -- "$@" "$each"; done\nexec {compiler} "$@"\n'
        )
        instead.chmod(0o755)
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    return {"PATH": f"{folder}:{os.environ['PATH']}", **limits}


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit((__doc__ or "").splitlines()[0])
    os.execvpe(sys.argv[1], sys.argv[1:], os.environ | with_avx2())


if __name__ == "__main__":
    main()
