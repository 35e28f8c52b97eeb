"""The line of waiting sequences against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.tests.rigs.scheduler_rig import request
from motet.workers.scheduling.sequence import Sequence
from motet.workers.scheduling.waiting_queue import WaitingQueue


def made(sequence_id: int, arrival: int) -> Sequence:
    return Sequence(request(sequence_id), arrival, 0, [1])


@given(st.lists(st.integers(-20, 20), unique=True), st.sets(st.integers(-20, 20)), st.integers(0, 9))
def test_the_oldest_are_first_whoever_came_and_left(arrivals: list[int], gone: set[int], num_sequences: int) -> None:
    line, sequences = WaitingQueue(), {arrival: made(100 + arrival, arrival) for arrival in arrivals}
    for number, sequence in enumerate(sequences.values(), 1):
        line.add(sequence)
        assert len(line) == number
    for arrival in gone & sequences.keys():
        line.remove(sequences.pop(arrival))
        line.check_integrity()
    expected = [sequences[arrival] for arrival in sorted(sequences)]
    assert [*line] == expected
    assert line.first(num_sequences) == expected[:num_sequences]
    assert bool(line) == bool(expected)
    assert [line.get(100 + arrival) for arrival in range(-20, 21)] == [*map(sequences.get, range(-20, 21))]


def test_who_waits_twice_or_not_at_all_is_our_own_mistake() -> None:
    line = WaitingQueue()
    line.add(made(1, 1))
    with pytest.raises(AssertionError, match="sequence 1 waits already"):
        line.add(made(1, 2))
    with pytest.raises(AssertionError):
        line.remove(made(1, 1))
    line.check_integrity()
