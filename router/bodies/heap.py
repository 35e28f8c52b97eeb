"""Gives freed memory back to the machine."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim_heap() -> None:
    """Returns the C library's free memory to the machine. Blocking, some ms; lets go of the interpreter's lock.

    The library keeps what lies below a block that is still in use, so a router that has once held many large bodies
    would stay as large. A no-op where the library cannot do it.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
