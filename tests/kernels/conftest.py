"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.backend import Kernels
from motet.tests.rigs.native_builds import BUILDS, load_build


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def native(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    """The native CPU kernels of each build in turn, and their dtype."""
    return load_build(request.param), request.param[0]
