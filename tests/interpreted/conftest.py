"""These tests need a process of their own: Triton decides at its import whether it interprets kernels.

`pytest tests/interpreted` is such a process, and so are its workers. A run that has other tests, too, leaves these out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    wanted = [Path(config.invocation_params.dir, name.partition("::")[0]).resolve() for name in config.args]
    if all(path.is_relative_to(HERE) for path in wanted) and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect() -> bool | None:
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # The interpreter computes exp with numpy, which warns where a GPU is silent.
            item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"))
