"""How others form batches and hold KV, as policies before motet's scheduler (`virtual_load.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence

from motet.benchmarks.papers.virtual_load import Job


class Continuous:
    """Everything joins at once: the scheduler forms each step's batch (Orca, OSDI 2022). motet as it is."""

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        return len(waiting)

    def end(self, job: Job) -> None: ...

    def num_rows(self, num_tokens: int) -> int:
        return num_tokens

    def pause_s(self) -> float:
        return 0.0


class Dynamic(Continuous):
    """A batch begins when the one before has ended, and it is full or its oldest request has waited for the window.

    Answers that have ended go on as padding until the longest one ends. `window_s` None: only full batches begin,
    which is static batching.
    """

    def __init__(self, size: int, window_s: float | None) -> None:
        self._size, self._window_s, self._batch = size, window_s, 0

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        if num_running or not waiting:
            return 0
        is_late = self._window_s is not None and now_s - waiting[0].arrives_s >= self._window_s
        if len(waiting) < self._size and not is_late and not is_last:
            return 0
        self._batch = min(self._size, len(waiting))
        return self._batch

    def num_rows(self, num_tokens: int) -> int:
        return max(num_tokens, self._batch)


def first_fit(slots: Iterable[tuple[int, int]], size: int) -> int:
    """Where the first gap of this size begins beside slots, each with its start and size; the last gap has no end."""
    start = 0
    for taken, length in sorted(slots):
        if taken - start >= size:
            break
        start = taken + length
    return start


class Reserved(Continuous):
    """Continuous, but a request joins only when there is room for all that its answer may need, and keeps it."""

    def __init__(self, num_tokens: int, size_of: Callable[[Job], int], is_contiguous: bool = False) -> None:
        """`is_contiguous`: the room must be in one piece (first fit). Otherwise it is only counted."""
        self._num_tokens, self._size_of, self._is_contiguous = num_tokens, size_of, is_contiguous
        self._slots: dict[Job, tuple[int, int]] = {}  # start and size

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        for number, job in enumerate(waiting):
            size = self._size_of(job)
            if self._is_contiguous:
                start = first_fit(self._slots.values(), size)
            else:
                start = sum(length for _, length in self._slots.values())
            if start + size > self._num_tokens:
                return number
            self._slots[job] = (start, size)
        return len(waiting)

    def end(self, job: Job) -> None:
        del self._slots[job]


def largest(context: int) -> Callable[[Job], int]:
    """Orca (max) of vLLM's paper: the longest that any sequence may become."""
    return lambda job: context


def power_of_two(context: int) -> Callable[[Job], int]:
    """Orca (pow2): the answer's room is at most twice what it will need."""
    return lambda job: min(context, job.prompt + (1 << (job.answer - 1).bit_length()))


def known(job: Job) -> int:
    """Orca (oracle): exactly what it will need, which no scheduler knows."""
    return job.prompt + job.answer
