"""Passes over the rows of a step, alone or in turn: while a sum of one is under way, another one computes.

In turn they are the nano-batches of NanoFlow (arXiv 2408.12757), whose network this hides behind computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

from ..parallel import Parallel, PendingSum

T = TypeVar("T")
# Yields each partial sum of this worker, is sent the sum of all workers' in return, and returns its result.
Pass = Generator[torch.Tensor, torch.Tensor, T]


def alone(forward: Pass[T], parallel: Parallel) -> T:
    """What the pass returns."""
    try:
        part = next(forward)
        while True:
            part = forward.send(parallel.all_reduce(part))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def in_turn(passes: Sequence[Pass[T]], parallel: Parallel) -> list[T]:
    """What each pass returns.

    Each computes its n-th partial sum after those before it have computed theirs: of rows of one sequence the earlier
    ones have written their KV then. The order depends on nothing else, so it is the same on all workers.
    """
    outputs: list[T] = []
    under_way: deque[tuple[Pass[T], PendingSum | None]] = deque((forward, None) for forward in passes)
    while under_way:
        forward, pending = under_way.popleft()
        try:
            part = next(forward) if pending is None else forward.send(pending.wait())
        except StopIteration as end:
            outputs.append(end.value)
        else:
            under_way.append((forward, parallel.begin_all_reduce(part)))
    return outputs
