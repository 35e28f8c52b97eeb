"""A sequence is in one place at a time, and the place where it is learns when it is cancelled."""

from __future__ import annotations

import pytest

from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.dispatch import UnsentSequences
from motet.router.fleet.open_sequence import AwaitingReconnect, CutOffSequence, OpenSequence
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate


class Place:
    def __init__(self) -> None:
        self.cancelled: list[OpenSequence] = []

    def cancel(self, sequence: OpenSequence) -> None:
        self.cancelled.append(sequence)


def sequence(key: str = "", timeout_s: float | None = None) -> OpenSequence:
    request = SequenceRequest(prompt_token_ids=[1], sampling=SamplingParams(), tenant="acme", key=key)
    return OpenSequence(request, limit=TimeLimit(timeout_s))


async def test_only_the_place_where_it_is_gets_a_cancel() -> None:
    before, now, moved = Place(), Place(), sequence()
    moved.move(None, before)
    moved.move(before, now)
    moved.cancel()
    moved.cancel()
    assert (before.cancelled, now.cancelled) == ([], [moved])


async def test_the_place_gets_a_timeout() -> None:
    place, late = Place(), sequence(timeout_s=0.0)
    late.move(None, place)
    update = await anext(late)
    assert update.error is not None
    assert update.error.kind == "timeout"
    assert place.cancelled == [late]


async def test_it_is_not_taken_from_where_it_is_not() -> None:
    place, other, moved = Place(), Place(), sequence()
    with pytest.raises(AssertionError):
        moved.move(place, other)
    moved.move(None, place)
    with pytest.raises(AssertionError):
        moved.move(None, other)
    moved.push(SequenceUpdate(0, [2], None, "stop"))
    with pytest.raises(AssertionError):
        moved.move(place, other)
    moved.cancel()
    assert not place.cancelled


async def test_unsent_sequences_let_go_of_a_sequence_that_has_waited_long_enough() -> None:
    timed_out: list[OpenSequence] = []
    unsent = UnsentSequences(0.0, timed_out.append)
    first, cancelled, removed, last = (sequence() for _ in range(4))
    for waiting in (first, cancelled, removed, last):
        unsent.add(waiting)
    assert list(unsent) == [first, cancelled, removed, last]
    cancelled.cancel()
    unsent.remove(removed)
    assert len(unsent) == 2
    await eventually(lambda: len(unsent) == 0)
    assert timed_out == [first, last]
    for waiting in (first, removed, last):
        waiting.move(None, Place())  # all are free to go anywhere


async def test_a_leader_that_is_back_gets_what_it_has_kept() -> None:
    lost: list[CutOffSequence] = []
    waiting = AwaitingReconnect(lambda cut_off, reason: lost.extend(cut_off))
    kept, cancelled, forgotten = (sequence(key) for key in "abc")
    waiting.wait([CutOffSequence(one, had_arrived=True) for one in (kept, cancelled, forgotten)], "it broke")
    cancelled.cancel()
    assert waiting.take(["a", "b", "another"]) == [kept]
    kept.move(None, Place())
    waiting.give_up()
    assert [one.sequence for one in lost] == [forgotten]
    forgotten.move(None, Place())
