"""Triton decides when it is imported whether it interprets, so these tests need a process of their own.

`tests/kernels/test_triton.py` starts it; by hand: `TRITON_INTERPRET=1 python -m pytest tests/interpreted`.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
