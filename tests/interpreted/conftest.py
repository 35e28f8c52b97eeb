"""These tests run in a process of their own, because Triton decides at its import whether to interpret kernels.

`tests/kernels/test_triton.py` starts it; by hand: `TRITON_INTERPRET=1 python -m pytest tests/interpreted`.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
