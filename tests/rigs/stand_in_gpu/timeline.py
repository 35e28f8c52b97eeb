"""What is known to be done before what on a stand-in GPU: a vector clock for each stream, and one for the host."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

Clock = dict[int, int]  # by stream, the number of its last work that is known to be done


class GpuProblem(AssertionError):  # noqa: N818
    """What a GPU would not survive, or would get wrong. `StandInGpu.problems` keeps it, even if it is caught."""


class OrderError(GpuProblem):
    """Memory is used before what used it last is known to be done; the message names both lines."""


@dataclass(frozen=True)
class Work:
    """One thing that a stream does. Numbers rise over all streams."""

    stream: int
    number: int
    clock: Mapping[int, int]  # what is done before it


class Timeline:
    """Streams, and the order that events and waits give to their work."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.problems: list[str] = []
        self._clocks: list[Clock] = []  # by stream
        self._host: Clock = {}  # the host has waited for it, so all that is launched later comes after it
        self._lines = ["nowhere"]  # by number of a work, where the product launched it

    def problem(self, problem: GpuProblem) -> GpuProblem:
        """The same, to be raised."""
        self.problems.append(f"{type(problem).__name__}: {problem}")
        return problem

    def new_stream(self) -> int:
        with self.lock:
            self._clocks.append({})
            return len(self._clocks) - 1

    def launch(self, stream: int, line: str) -> Work:
        with self.lock:
            clock = self._clocks[stream]
            _join(clock, self._host)
            self._lines.append(line)
            clock[stream] = len(self._lines) - 1
            return Work(stream, clock[stream], clock)

    def last_of(self, stream: int) -> Work | None:
        """What the stream was given last; None: nothing yet."""
        with self.lock:
            clock = self._clocks[stream]
            return Work(stream, clock[stream], clock) if stream in clock else None

    def mark(self, stream: int) -> Clock:
        """The moment after all that the stream was given."""
        with self.lock:
            return dict(self._clocks[stream])

    def wait(self, stream: int, mark: Clock) -> None:
        """What the stream is given from now on comes after the mark."""
        with self.lock:
            _join(self._clocks[stream], mark)

    def finish(self, mark: Clock) -> None:
        """The host has waited for the mark."""
        with self.lock:
            _join(self._host, mark)

    @property
    def done(self) -> Mapping[int, int]:
        """What the host knows to be done."""
        return self._host

    def is_done_for(self, stream: int, other: int, number: int) -> bool:
        """Whether work `number` of stream `other` comes before all that `stream` is given from now on."""
        return number <= max(self._clocks[stream].get(other, 0), self._host.get(other, 0))

    def is_idle(self, stream: int) -> bool:
        """Whether the host knows that all is done that the stream was given."""
        return self._clocks[stream].get(stream, 0) <= self._host.get(stream, 0)

    def line_of(self, number: int) -> str:
        return self._lines[number]


def _join(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
