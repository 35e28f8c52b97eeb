"""Where tests that draw begin: elsewhere at each commit, so that successive runs cover more."""

from __future__ import annotations

import subprocess
from functools import cache

from motet.tests.rigs.imports import ROOT

NUM_STARTS = 1_000_000


@cache
def commit_seed() -> int:
    """A number that follows from the commit that is checked out; 0 without git."""
    try:
        said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return int(said.stdout, 16) % NUM_STARTS if said.returncode == 0 else 0
