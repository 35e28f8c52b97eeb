"""The line of waiting sequences against a plain list."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.tests.rigs.scheduler_rig import request
from motet.workers.fairness.prompt_budget import PromptBursts
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.waiting_queue import WaitingQueue


def made(sequence_id: int, arrival: int) -> GrowingSequence:
    return GrowingSequence(request(sequence_id), arrival, 0, [1])


@given(st.lists(st.integers(-20, 20), unique=True), st.sets(st.integers(-20, 20)), st.integers(0, 9))
def test_the_oldest_are_first_after_any_arrivals_and_ends(
    arrivals: list[int], gone: set[int], num_sequences: int
) -> None:
    line, sequences = WaitingQueue(PromptBursts()), {arrival: made(100 + arrival, arrival) for arrival in arrivals}
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
    line = WaitingQueue(PromptBursts())
    line.add(made(1, 1))
    with pytest.raises(AssertionError, match="sequence 1 waits already"):
        line.add(made(1, 2))
    with pytest.raises(AssertionError):
        line.remove(made(1, 1))
    line.check_integrity()


@given(st.integers(0, 2**32))
def test_who_can_start_is_known_whatever_comes_and_goes(seed: int) -> None:
    """Against plain sets: the adapters that are there, and the key that each sequence awaits."""
    rng = random.Random(seed)
    line, here, awaits = WaitingQueue(PromptBursts()), {"a1", "b2"}, dict[GrowingSequence, bytes]()
    for arrival in range(60):
        sequence = GrowingSequence(
            request(arrival, adapter=rng.choice([None, "a1", "b2", "c3"])), arrival, 0, [1, 2, 3]
        )
        digest = sequence.adapter_digest
        line.add(sequence, digest is None or digest in here)
        ready = [each for each in line.equipped_in_turn() if not each.awaits_page]
        match rng.randrange(6):
            case 0 if (digest := rng.choice(["a1", "b2", "c3"])) in here:
                here.remove(digest)
                line.adapter_evicted(digest)
                awaits = {each: key for each, key in awaits.items() if each.adapter_digest != digest}
            case 1 if (digest := rng.choice(["a1", "b2", "c3"])) not in here:
                here.add(digest)
                line.adapter_loaded(digest)
            case 2 if ready:
                awaits[(waiting := rng.choice(ready))] = key = rng.choice([b"x", b"y"])
                line.await_page(waiting, key, 2)
            case 3:
                line.page_resolved(key := rng.choice([b"x", b"y"]))
                awaits = {each: other for each, other in awaits.items() if other != key}
            case 4:
                line.remove(gone := rng.choice([*line]))
                awaits.pop(gone, None)
            case 5:
                line.set_found(rng.choice([*line]), rng.randrange(3))
        line.check_integrity(here.__contains__)
        equipped = [each for each in line if each.adapter_digest is None or each.adapter_digest in here]
        assert [*line.equipped_in_turn()] == equipped
        assert {each for each in line if each.awaits_page} == awaits.keys()
        assert line.num_ready == len(equipped) - len(awaits)
        lacking = [each for each in line if each not in equipped]
        assert line.num_lacking == len(lacking)
        assert line.oldest_lacking(lambda _: True) == next(iter(lacking), None)
