"""Routers and gangs in simulated time, over a network whose links a test breaks as it likes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.part_configs import admission_config
from motet.tests.rigs.simulated_gang import TOKEN, SimulatedGang, token_of
from motet.tests.rigs.simulated_network import Link, SimulatedNetwork
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest

LIMITS = GangLimits(
    max_model_len=1000, vocab_size=1000, block_size=8, num_pages=1000, max_tokens_per_step=64, max_num_sequences=4
)
STEP_S = 0.02


class SimulatedFleet:
    """`routers` know the gangs that were added so far. Use as made by `simulated_fleet`."""

    def __init__(self, num_routers: int) -> None:
        self.network = SimulatedNetwork(random.Random(0))
        self.routers = [
            FleetDispatcher(TOKEN, 60.0, adapter_pages=lambda ref: 2, admission=admission_config())
            for _ in range(num_routers)
        ]
        self.gangs: list[SimulatedGang] = []

    async def add_gang(self, **leader: int) -> SimulatedGang:
        gang = SimulatedGang(f"gang{len(self.gangs)}:1", LIMITS, STEP_S, 60.0, **leader)
        await gang.start()
        self.gangs.append(gang)
        for number, router in enumerate(self.routers):
            router.update({str(n): f"router{number}@{gang.address}" for n, gang in enumerate(self.gangs)})
        return gang

    def link(self, router: int, gang: int) -> Link:
        return self.network.link(f"router{router}@{self.gangs[gang].address}")

    def where(self, seed: int) -> list[int]:
        """The gangs that compute the sequence with this seed, or will."""
        return [
            number
            for number, gang in enumerate(self.gangs)
            for request in gang.engine.requests.values()
            if request.sampling.seed == seed
        ]


@asynccontextmanager
async def simulated_fleet(num_routers: int = 1) -> AsyncIterator[SimulatedFleet]:
    fleet = SimulatedFleet(num_routers)
    with fleet.network.in_place_of_grpc():
        yield fleet
        for router in fleet.routers:
            await router.close()
        for gang in fleet.gangs:
            await gang.stop()
        await fleet.network.close()


def requested(seed: int, max_tokens: int, key: str = "", adapter: AdapterRef | None = None) -> SequenceRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return SequenceRequest(
        prompt_token_ids=[seed % 1000, 1, 2], sampling=sampling, tenant="acme", key=key, adapter=adapter
    )


async def read(stream: OpenSequence, seed: int) -> int:
    """Reads the stream to its end, of which every token must be right; their number."""
    num_tokens = 0
    async for update in stream:
        assert update.error is None, update.error
        for token_id in update.token_ids:
            assert token_id == token_of(seed, num_tokens)
            num_tokens += 1
    return num_tokens
