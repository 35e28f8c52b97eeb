"""What a leader refuses, and which sequences it ends because their time is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from motet.tests.rigs.leader_rig import TOKEN, Leader, Router, submit
from motet.tests.rigs.part_configs import leader_config
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import Cancel, Frame, SequenceUpdate, Submit


@pytest.fixture
async def narrow_leader() -> AsyncIterator[Leader]:
    """One place, and room for two without a token, the one in the place included."""
    engine = StandInEngine(num_places=1)
    server = FrameServer(engine, INFO, TOKEN, leader_config(max_waiting_sequences=2, tenant_queue_share=1.0))
    yield Leader(engine, server, await server.start("127.0.0.1"))
    await server.stop()


def with_time(message: Submit, **fields: Any) -> Submit:
    return Submit(msgspec.structs.replace(message.request, **fields))


async def ends_of(router: Router, *sequence_ids: int) -> dict[int, tuple[list[int], SequenceUpdate]]:
    """All tokens of each sequence, and its last update. One frame may report several ends."""
    tokens: dict[int, list[int]] = {sequence_id: [] for sequence_id in sequence_ids}
    ends: dict[int, SequenceUpdate] = {}
    async for update in router.updates():
        if update.sequence_id in tokens:
            tokens[update.sequence_id] += update.token_ids
            if update.finish_reason is not None or update.error is not None:
                ends[update.sequence_id] = update
        if len(ends) == len(tokens):
            return {sequence_id: (tokens[sequence_id], end) for sequence_id, end in ends.items()}
    raise AssertionError("the stream ended")


async def end_of(router: Router, sequence_id: int) -> tuple[list[int], SequenceUpdate]:
    return (await ends_of(router, sequence_id))[sequence_id]


async def test_a_full_queue_of_one_tenant_has_room_for_another(narrow_leader: Leader) -> None:
    router = Router(narrow_leader.address)
    await router.read()
    narrow_leader.engine.paused = True
    await router.send(submit(1, 0, 3), submit(2, 0, 3), with_time(submit(3, 70, 1), tenant="quiet"))
    await eventually(lambda: len(narrow_leader.engine.submitted) == 3)
    narrow_leader.engine.paused = False
    ends: dict[int, SequenceUpdate] = {}
    async for update in router.updates():
        if update.finish_reason is not None or update.error is not None:
            ends[update.sequence_id] = update
            if len(ends) == 3:
                break
    assert (ends[1].finish_reason, ends[3].finish_reason) == ("length", "length")
    assert ends[2].error is not None
    assert (ends[2].error.kind, ends[2].error.reason) == ("overloaded", "tenant_full")
    await router.channel.close()


async def test_a_full_queue_refuses_all_but_what_has_begun(narrow_leader: Leader) -> None:
    narrow_leader.engine.paused = True
    router = Router(narrow_leader.address)
    await router.read()
    await router.send(submit(1, 0, 1), submit(2, 0, 1), submit(3, 0, 1))
    _, refused = await end_of(router, 3)
    assert refused.error is not None
    assert (refused.error.kind, refused.error.reason) == ("overloaded", "full")
    assert refused.error.message.startswith("the gang's queue is full: the limit of sequences")
    assert refused.error.retry_after_s is not None
    begun = [with_time(submit(number, 0, 1, key=str(number)), has_begun=True) for number in (7, 8, 9)]
    await router.send(*begun)  # for what clients come back for there is as much room again
    _, refused = await end_of(router, 9)
    assert refused.error is not None
    assert refused.error.reason == "full"
    await router.send(Cancel(7), Cancel(8))
    await eventually(lambda: len(narrow_leader.engine.cancelled) == 2)
    resumed = with_time(submit(4, 0, 2), generated_token_ids=[1])
    await router.send(resumed, with_time(submit(5, 0, 1), has_begun=True))
    await eventually(lambda: len(narrow_leader.engine.submitted) == 6)
    narrow_leader.engine.paused = False
    assert (await end_of(router, 5))[1].finish_reason == "length"
    await router.send(submit(6, 10, 1))  # there is room again
    assert (await end_of(router, 6))[0] == [11]
    await router.channel.close()


async def test_who_still_waits_after_its_time_is_given_up_and_who_runs_is_not(narrow_leader: Leader) -> None:
    router = Router(narrow_leader.address)
    await router.read()
    # The first runs longer than it may wait, however fast the machine is, and has its first token before on any.
    await router.send(with_time(submit(1, 0, 2500), wait_s=2.0), with_time(submit(2, 0, 1), wait_s=0.3))
    oldest_s = 0.0
    given_up: SequenceUpdate | None = None
    ended: SequenceUpdate | None = None
    while ended is None:
        message = await router.read()
        assert isinstance(message, Frame)
        oldest_s = max(oldest_s, message.load.gauges.oldest_waiting_s)
        for update in message.updates:
            given_up = update if update.sequence_id == 2 else given_up
            ended = update if update.sequence_id == 1 and update.finish_reason is not None else ended
    assert given_up is not None
    assert given_up.token_ids == []
    assert given_up.error is not None
    assert (given_up.error.kind, given_up.error.reason) == ("overloaded", "waited")
    assert oldest_s > 0
    await router.channel.close()


async def test_an_error_for_a_long_wait_has_that_wait_only(narrow_leader: Leader) -> None:
    router = Router(narrow_leader.address)
    await router.read()
    narrow_leader.engine.paused = True
    await router.send(with_time(submit(1, 0, 1), tenant="other"))
    await eventually(lambda: len(narrow_leader.engine.submitted) == 1)
    await asyncio.sleep(1.0)  # the other one has waited for longer
    began = time.monotonic()
    await router.send(with_time(submit(2, 0, 1), wait_s=0.3))
    await eventually(lambda: narrow_leader.engine.num_running == 1 and len(narrow_leader.engine.submitted) == 2)
    waited_s = time.monotonic() - began
    narrow_leader.engine.paused = False
    _, given_up = await end_of(router, 2)
    assert given_up.error is not None and given_up.error.reason == "waited"
    assert given_up.error.retry_after_s is not None
    assert 0.2 < given_up.error.retry_after_s <= waited_s
    await router.channel.close()


async def test_all_of_a_sequences_time(narrow_leader: Leader) -> None:
    router = Router(narrow_leader.address)
    await router.read()
    await router.send(
        with_time(submit(1, 0, None), timeout_s=0.4, key="one"), with_time(submit(2, 0, 1), timeout_s=0.1)
    )
    ends = await ends_of(router, 1, 2)
    tokens, waited = ends[2]
    assert waited.error is not None
    assert (tokens, waited.error.kind) == ([], "timeout")
    _, ran = ends[1]
    assert ran.error is not None
    assert ran.error.kind == "timeout"
    await eventually(lambda: sorted(narrow_leader.engine.cancelled) == [1, 2])
    await router.send(with_time(submit(3, 50, 1), timeout_s=60.0))
    assert (await end_of(router, 3))[0] == [51]
    # What has ended in time is not ended twice, and a router that resumes what has not gets an error.
    await router.send(submit(4, 0, None, key="one"))
    tokens, again = await end_of(router, 4)
    assert tokens == [*range(1, len(tokens) + 1)]
    assert again.error == ran.error
    assert narrow_leader.server.num_sequences == 0
    await router.channel.close()
