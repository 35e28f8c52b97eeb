"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from motet.kernels.backend import Kernels
from motet.kernels.native import build
from motet.tests.rigs.native_builds import BUILDS, load_build
from motet.tests.rigs.patience import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def patient_builds() -> Iterator[None]:
    """How long a compiler takes says only how busy the machine is. With sanitizers it takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_DEADLINE_S", 2 * PATIENCE_S)
        yield


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def native(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    """The native CPU kernels of each build in turn, and their dtype."""
    return load_build(request.param), request.param[0]
