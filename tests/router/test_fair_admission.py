"""None is refused for another tenant's queue: real leaders and schedulers, in simulated time."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from motet.router.fleet.admission import AdmissionConfig
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.part_configs import admission_config
from motet.tests.rigs.simulated_fleet import SimulatedFleet, requested, simulated_fleet
from motet.tests.rigs.simulated_time import run_simulated

STRICT = admission_config(max_queue_wait_s=1.0)
PROMISED = admission_config(max_queue_wait_s=0, latency_objectives_s=(("quiet", 1.0), ("acme", 1.0)))


def submit(router: FleetDispatcher, tenant: str, seed: int, num_tokens: int = 50) -> OpenSequence:
    return router.submit(msgspec.structs.replace(requested(seed, num_tokens), tenant=tenant))


async def flooded(fleet: SimulatedFleet, admission: AdmissionConfig) -> None:
    """One router's tenant has filled a gang's queue, and all routers know what the gang's tokens cost by now."""
    await fleet.add_gang()
    await asyncio.sleep(1)
    patient, *_ = fleet.routers
    patient.change_admission(admission_config(max_queue_wait_s=0))
    for router in fleet.routers[1:]:
        router.change_admission(admission)
    for seed in range(600):
        submit(patient, "acme", seed, 200)
    await asyncio.sleep(20)


@pytest.mark.parametrize("admission", [STRICT, PROMISED])
def test_a_flood_refuses_its_own_tenant_alone(admission: AdmissionConfig) -> None:
    async def main() -> None:
        async with simulated_fleet(num_routers=2) as fleet:
            await flooded(fleet, admission)
            router = fleet.routers[1]
            assert submit(router, "acme", 1000).closed
            for number in range(20):  # one after the other, as a client without haste
                began_at = asyncio.get_running_loop().time()
                sequence = submit(router, "quiet", 2000 + number, 2)
                assert not sequence.closed
                async for update in sequence:
                    assert update.error is None
                assert asyncio.get_running_loop().time() - began_at < 1.0
                await asyncio.sleep(0.3)
            assert submit(router, "acme", 1001).closed

    run_simulated(main())


def test_routers_send_gangs_what_the_others_served() -> None:
    async def main() -> None:
        async with simulated_fleet(num_routers=2) as fleet:
            for _ in range(2):
                await fleet.add_gang()
            await asyncio.sleep(1)
            for seed in range(60):
                submit(fleet.routers[seed % 2], "acme", seed, 300)
            await asyncio.sleep(5)
            for gang, other in (fleet.gangs, fleet.gangs[::-1]):
                reported = gang.engine.scheduler.counters._elsewhere["acme"]
                (share,) = [one for one in other.server.shares if one.tenant == "acme"]
                assert 0.5 * share.served < reported <= share.served  # no more than there is, and not from long ago

    run_simulated(main())
