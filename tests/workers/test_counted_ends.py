"""Which ends of sequences a leader counts, when its engine still reports some that were given up."""

from __future__ import annotations

import asyncio

import pytest

from motet.tests.rigs.part_configs import leader_config
from motet.tests.rigs.stand_in_engine import StandInEngine
from motet.workers.leader.routed_sequences import RoutedSequences
from motet.workers.leader.router_stream import RouterStream
from motet.workers.wire.messages import SamplingParams, SequenceError, SequenceRequest, SequenceUpdate

# The engine is never started: each test delivers what a step brings that was in flight.
ENDED = SequenceUpdate(1, [7], finish_reason="length")


def request(key: str = "", timeout_s: float | None = None) -> SequenceRequest:
    return SequenceRequest(
        sequence_id=5, prompt_token_ids=[1], sampling=SamplingParams(), tenant="a", key=key, timeout_s=timeout_s
    )


@pytest.fixture
async def sequences() -> RoutedSequences:
    return RoutedSequences(StandInEngine(), leader_config(), lambda keys: None)


async def test_an_end_is_counted_once(sequences: RoutedSequences) -> None:
    sequences.submit(RouterStream(1), request())
    sequences.deliver([SequenceUpdate(1, [6])])
    assert not sequences.num_ended
    sequences.deliver([ENDED])
    sequences.deliver([ENDED])
    assert sequences.num_ended == {"length": 1}


async def test_an_orphans_end_is_counted(sequences: RoutedSequences) -> None:
    stream = RouterStream(1)
    sequences.submit(stream, request(key="k"))
    sequences.close(stream)
    sequences.deliver([ENDED])
    assert sequences.num_ended == {"length": 1}


@pytest.mark.parametrize("how", ["cancel", "close", "hand_over"])
async def test_what_ends_after_it_was_given_up_is_not_counted(sequences: RoutedSequences, how: str) -> None:
    stream = RouterStream(1)
    sequences.submit(stream, request())
    if how == "cancel":
        sequences.cancel(stream, 5)
    elif how == "close":
        sequences.close(stream)
    else:
        sequences.hand_over()
    sequences.deliver([ENDED])
    assert not sequences.num_ended


async def test_what_ends_after_its_timeout_is_counted_once_as_the_engine_reports_it(
    sequences: RoutedSequences,
) -> None:
    sequences.submit(RouterStream(1), request(timeout_s=0.0))
    await asyncio.sleep(0.05)
    assert not sequences.num_ended  # the engine has to end it, and reports what it has computed
    sequences.deliver([SequenceUpdate(1, error=SequenceError("timeout", "its timeout passed"))])
    sequences.deliver([ENDED])
    assert sequences.num_ended == {"timeout": 1}
