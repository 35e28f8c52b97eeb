"""CUDA graphs of a stand-in GPU: what is captured is noted, and computed only when it is replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from motet.tests.rigs.stand_in_gpu.call import leaves
from motet.tests.rigs.stand_in_gpu.device_tensor import DeviceTensor
from motet.tests.rigs.stand_in_gpu.pinned_memory import poison
from motet.tests.rigs.stand_in_gpu.tally import product_line
from motet.tests.rigs.stand_in_gpu.timeline import GpuProblem, Timeline, Work
from motet.tests.rigs.stand_in_gpu.watched_memory import Cells, WatchedMemory

Use = tuple[WatchedMemory, Cells, bool]  # of which memory which cells; True: they are written


class GraphError(GpuProblem):
    """Something that a graph cannot hold: it allocates, copies or waits while it is captured, or uses freed memory."""


@dataclass
class Capture:
    """What one graph holds."""

    kept: frozenset[int] = frozenset()  # ids of memory of earlier graphs of its pool that was not free when it began
    recorded: list[Callable[[Work], None]] = field(default_factory=list)  # each computes one operation again
    own_memory: dict[int, tuple[WatchedMemory, torch.Tensor]] = field(default_factory=dict)
    saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # memory from outside: content

    def own(self, memory: WatchedMemory, inner: torch.Tensor) -> None:
        self.own_memory[id(memory)] = (memory, inner)

    def spoil(self, kept: frozenset[int] = frozenset()) -> None:
        """Another graph of the same pool has run, or none yet: what lies in this one's memory is worth nothing.

        `kept`: the other one cannot have taken this memory.
        """
        for number, (_, inner) in self.own_memory.items():
            if number not in kept:
                poison(_whole(inner))

    def record(self, compute: Callable[[], Any], out: Any, uses: Callable[[], list[Use]]) -> None:
        """An operation whose results `out`, plain tensors, stay where they are."""

        def run(work: Work) -> None:
            self.note(uses(), work)
            for old, new in zip(leaves((out,)), leaves((compute(),)), strict=True):
                if isinstance(old, torch.Tensor) and old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.recorded.append(run)

    def note(self, uses: Iterable[Use], work: Work) -> None:
        """Raises GraphError if memory from outside is used that was freed, OrderError."""
        for memory, cells, writes in uses:
            if id(memory) in self.own_memory:
                continue
            if memory.is_free and id(memory) not in self.kept:
                problem = GraphError(f"a graph is replayed that uses {memory.what}, which was freed")
                raise memory.timeline.problem(problem)
            memory.use(cells, work, writes=writes)

    def replay(self, work: Work) -> None:
        for memory, _ in self.own_memory.values():
            memory.use(slice(None), work, writes=True)
        for run in self.recorded:
            run(work)


class Captures:
    """The capture under way in each thread."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._local = threading.local()
        self._in_pool: dict[object, list[Capture]] = {}

    @property
    def current(self) -> Capture | None:
        return getattr(self._local, "capture", None)

    def begin(self, pool: object) -> None:
        assert self.current is None, "a capture within another"
        before = (memory for each in self._in_pool.get(pool, ()) for memory, _ in each.own_memory.values())
        self._local.capture = Capture(frozenset(id(memory) for memory in before if not memory.is_free))

    def end(self, pool: object) -> Capture:
        """The capture that ends. What it has changed outside is as it was before."""
        capture = self.current
        assert capture is not None
        self._local.capture = None
        for tensor, content in capture.saved.values():
            tensor.copy_(content)
        capture.saved.clear()
        capture.spoil()
        self._in_pool.setdefault(pool, []).append(capture)
        return capture

    def others(self, pool: object, capture: Capture) -> list[Capture]:
        """Those that share their memory with this one."""
        return [each for each in self._in_pool.get(pool, ()) if each is not capture]

    def refuse(self, what: str) -> None:
        """Raises GraphError within a capture."""
        if self.current is not None:
            raise self._timeline.problem(GraphError(f"{product_line()}: {what} while a graph is captured"))

    def save(self, written: Iterable[DeviceTensor]) -> None:
        """Keeps what an operation of a capture is about to change outside of it."""
        capture = self.current
        if capture is None:
            return
        for x in written:
            if id(x.memory) not in capture.own_memory and x.memory.address not in capture.saved:
                whole = _whole(x.inner)
                capture.saved[x.memory.address] = (whole, whole.clone())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
