"""A search whose gang is lost in the middle finds what it would have found."""

from __future__ import annotations

import asyncio
import random

from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.generation.beam_search import BeamRules
from motet.router.generation.beam_streams import BeamRun
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate, TokenLogprobs

TOKEN = "a secret"
PROMPT = [7, 8, 9]
RULES = BeamRules(width=3, max_tokens=6, end_token_ids=frozenset({0}))


class RankingEngine(StandInEngine):
    """Its likeliest next tokens follow from all tokens before them."""

    @staticmethod
    def _next(request: SequenceRequest, count: int) -> SequenceUpdate:
        assert request.sampling.num_logprobs is not None
        generator = random.Random(str(request.prompt_token_ids))
        ranked = sorted(((-5 * generator.random(), token) for token in range(40)), reverse=True)
        top = ranked[: request.sampling.num_logprobs]
        told = TokenLogprobs(top[0][0], [token for _, token in top], [logprob for logprob, _ in top])
        return SequenceUpdate(request.sequence_id, [top[0][1]], [told], "length")


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
    engines = [RankingEngine(), RankingEngine()]
    servers = [FrameServer(engine, INFO, TOKEN, leader_config()) for engine in engines]
    addresses = [await server.start("127.0.0.1") for server in servers]
    try:
        dispatcher.update({"a": addresses[0]})
        expected = await found(dispatcher)
        assert len(expected) == RULES.width

        num_before = len(engines[0].submitted)
        searching = asyncio.create_task(found(dispatcher))
        async with asyncio.timeout(PATIENCE_S):
            while len(engines[0].submitted) < num_before + 5:  # noqa: ASYNC110
                await asyncio.sleep(0)
            engines[0].paused = True
            while not engines[0].num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        engines[0].fails = True
        engines[0].paused = False
        dispatcher.update({"a": addresses[0], "b": addresses[1]})
        assert await searching == expected
        assert engines[1].submitted
        assert dispatcher.num_resumed > 0
    finally:
        await dispatcher.close()
        for server in servers:
            await server.stop()
