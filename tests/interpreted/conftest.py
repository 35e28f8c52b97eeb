"""These tests run in a process of their own, because Triton decides at its import whether to interpret kernels.

`tests/kernels/test_triton.py` starts it; by hand: `TRITON_INTERPRET=1 python -m pytest tests/interpreted`.
"""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # The interpreter computes exp with numpy, which warns where a GPU is silent.
        item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"))
