"""What CUDA takes as the grid of a launch, for every compute capability that is served."""

from __future__ import annotations

from collections.abc import Sequence

MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)  # along x, y and z


def grid_problem(kernel: str, grid: Sequence[int]) -> str | None:
    """Why a kernel cannot be launched on this grid; None: it can."""
    if len(grid) <= 3 and all(0 < side <= most for side, most in zip(grid, MOST_PROGRAMS, strict=False)):
        return None
    return f"{kernel}: no GPU launches a grid of {tuple(grid)}, with at most {MOST_PROGRAMS} programs"
