"""A search whose gang is lost in the middle finds what it would have found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.generation.beam_streams import BeamRun
from motet.tests.rigs.beam_gang import beam_updates
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate

TOKEN = "a secret"
PROMPT = [7, 8, 9]
RULES = BeamRules(width=3, max_tokens=6, end_token_ids=frozenset({0}))


class SearchingEngine(StandInEngine):
    """Its likeliest next tokens follow from all tokens before them."""

    num_rounds = 0  # of the last search

    def _next(self, request: SequenceRequest, count: int) -> SequenceUpdate:
        """`count`: of its updates so far."""
        self.num_rounds = count + 1
        return beam_updates(request, likeliest)[count]


def likeliest(token_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    generator = random.Random(str([*token_ids]))
    ranked = sorted(((-5 * generator.random(), token) for token in range(40)), reverse=True)
    return [token for _, token in ranked], [logprob for logprob, _ in ranked]


async def found(dispatcher: FleetDispatcher) -> list[list[int]]:
    request = SequenceRequest(prompt_token_ids=PROMPT, sampling=SamplingParams(), tenant="acme")
    run = BeamRun(dispatcher, request, RULES, lambda _: False, lambda _: None)
    updates = []
    async with asyncio.timeout(PATIENCE_S):
        for stream in run.streams():
            updates += [update async for update in stream]
    assert all(update.error is None for update in updates)
    return [update.token_ids for update in updates]


async def test_a_lost_gang_changes_nothing() -> None:
    dispatcher = FleetDispatcher(
        TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
    )
    engines = [SearchingEngine(), SearchingEngine()]
    servers = [FrameServer(engine, INFO, TOKEN, leader_config()) for engine in engines]
    addresses = [await server.start("127.0.0.1") for server in servers]
    try:
        dispatcher.update({"a": addresses[0]})
        expected = await found(dispatcher)
        assert len(expected) == RULES.width

        engines[0].most_tokens, engines[0].num_rounds = 3, 0
        searching = asyncio.create_task(found(dispatcher))
        async with asyncio.timeout(PATIENCE_S):
            while engines[0].num_rounds < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        engines[0].fails = True
        dispatcher.update({"a": addresses[0], "b": addresses[1]})
        assert await searching == expected
        (resumed,) = engines[1].submitted
        so_far = resumed.beams_so_far
        assert so_far is not None and len(so_far.beams[0]) == 3
        assert dispatcher.num_resumed > 0
    finally:
        await dispatcher.close()
        for server in servers:
            await server.stop()
