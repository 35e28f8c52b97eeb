"""A client that comes back for its stream again and again, many times at once, has no more computed than one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import SamplingParams, SequenceRequest

TOKEN = "a secret"
NUM_WAITING = 8


class Rig:
    """Two gangs with one place each."""

    def __init__(self) -> None:
        config = leader_config(max_waiting_sequences=NUM_WAITING, tenant_queue_share=1.0)
        self.engines = [StandInEngine(num_places=1) for _ in range(2)]
        self.servers = [FrameServer(engine, INFO, TOKEN, config) for engine in self.engines]
        self.router = FleetDispatcher(
            TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config(max_gangs=2)
        )

    @property
    def num_submitted(self) -> int:
        return sum(len(engine.submitted) for engine in self.engines)

    def ask(self, key: str, *, has_begun: bool, is_resumed: bool = True) -> OpenSequence:
        request = SequenceRequest(
            prompt_token_ids=[1] * 20, sampling=SamplingParams(max_tokens=None), tenant="acme", key=key
        )
        return self.router.submit(request, is_resumed=is_resumed, limit=TimeLimit(has_begun=has_begun))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.router.update({str(number): await server.start("127.0.0.1") for number, server in enumerate(rig.servers)})
    await eventually(lambda: len(rig.router.gangs()) == 2)
    yield rig
    await rig.router.close()
    for server in rig.servers:
        await server.stop()


async def test_replays_of_one_id_are_one_sequence(rig: Rig) -> None:
    first = rig.ask("k", has_begun=False, is_resumed=False)
    await anext(first)
    replays = [rig.ask("k", has_begun=True) for _ in range(30)]
    async with asyncio.timeout(PATIENCE_S):
        assert (await anext(replays[-1])).error is None
    await eventually(lambda: all(sequence.closed for sequence in (first, *replays[:-1])))
    assert rig.num_submitted == 1
    replays[-1].cancel()


async def test_ids_of_what_has_ended_are_bounded(rig: Rig) -> None:
    """As many as may wait at the gangs, and as many again, however many ids a client has collected."""
    holders = [rig.ask(f"h{number}", has_begun=False, is_resumed=False) for number in range(2)]
    for holder in holders:
        await anext(holder)
    for engine in rig.engines:
        engine.paused = True
    replays = [rig.ask(f"old{number}", has_begun=True) for number in range(100)]
    most = 2 * 2 * NUM_WAITING
    await eventually(lambda: sum(sequence.closed for sequence in replays) >= 100 - most)
    assert rig.num_submitted <= 2 + most
    refused = next(sequence for sequence in replays if sequence.closed)
    error = [update async for update in refused][-1].error
    assert error is not None
    assert (error.kind, error.reason) == ("overloaded", "full")


async def test_what_has_delivered_nothing_is_admitted_as_what_is_new(rig: Rig) -> None:
    replays = [rig.ask(f"forged{number}", has_begun=False) for number in range(100)]
    for engine in rig.engines:
        engine.paused = True
    await eventually(lambda: sum(sequence.closed for sequence in replays) >= 100 - 2 * (NUM_WAITING + 1))
