"""Sequences that move from one gang's queue to another's: over the real leader and scheduler, in simulated time."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from motet.router.fleet.open_sequence import OpenSequence
from motet.router.fleet.relocator import REST_S
from motet.tests.rigs.simulated_fleet import STEP_S, read, requested, simulated_fleet
from motet.tests.rigs.simulated_time import run_simulated


def test_a_new_gang_takes_of_what_waits() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            (router,) = fleet.routers
            reading = [asyncio.create_task(read(router.submit(requested(seed, 50)), seed)) for seed in range(84)]
            await asyncio.sleep(1)
            assert len(fleet.gangs[0].engine.requests) > 70
            b = await fleet.add_gang()
            await asyncio.sleep(2)
            assert 20 <= b.server.num_sequences <= 50
            # The oldest stay where they will begin sooner.
            assert not [seed for seed in range(8) if fleet.where(seed) == [1]]
            assert await asyncio.gather(*reading) == [50] * 84
            now = asyncio.get_running_loop().time()
            # One gang alone would need 21 rounds of 50 steps.
            assert now < 1 + 16 * 50 * STEP_S + 3
            assert router._fleet.num_moved < 84
            for gang in fleet.gangs:
                gang.check_idle()

    run_simulated(main())


def test_what_waited_for_any_gang_is_shared_by_those_that_come() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            (router,) = fleet.routers
            reading = [asyncio.create_task(read(router.submit(requested(seed, 50)), seed)) for seed in range(80)]
            await asyncio.sleep(1)
            assert router.num_waiting == 80
            await fleet.add_gang()
            await asyncio.sleep(0.5)
            await fleet.add_gang()
            await fleet.add_gang()
            await asyncio.sleep(3)
            assert all(gang.server.num_sequences >= 8 for gang in fleet.gangs)
            assert await asyncio.gather(*reading) == [50] * 80

    run_simulated(main())


def test_a_full_queue_takes_what_was_admitted_elsewhere() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            (router,) = fleet.routers
            reading = [asyncio.create_task(read(router.submit(requested(seed, 50)), seed)) for seed in range(60)]
            await asyncio.sleep(1)
            await fleet.add_gang(max_waiting_sequences=1)
            await asyncio.sleep(2)
            assert fleet.gangs[1].server.num_sequences > 5
            assert await asyncio.gather(*reading) == [50] * 60

    run_simulated(main())


def test_what_begins_as_it_is_recalled_stays() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await fleet.add_gang()
            await asyncio.sleep(1)
            (router,) = fleet.routers
            prompt = [1] * 64 * 10  # so many steps' budgets
            stream = router.submit(msgspec.structs.replace(requested(5, 100), prompt_token_ids=prompt))
            reading = asyncio.create_task(read(stream, 5))
            await asyncio.sleep(3 * STEP_S)
            (before,) = [one for one in router._fleet.connected if one.num_sequences]
            before.withdraw(stream, "1" if before.address.endswith("gang0:1") else "0")
            await asyncio.sleep(1)
            assert stream._place is before
            assert await reading == 100
            assert router._fleet.num_moved == 0

    run_simulated(main())


@pytest.mark.parametrize("ends", ["cancel", "gang"])
def test_what_ends_as_it_moves_leaves_nothing(ends: str) -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            (router,) = fleet.routers
            reading = [asyncio.create_task(read(router.submit(requested(seed, 100)), seed)) for seed in range(4)]
            moving = router.submit(requested(9, 100))
            router._fleet._relocator._next_round = float("inf")
            await asyncio.sleep(0.5)
            await fleet.add_gang()
            await asyncio.sleep(0.1)
            (before,) = [one for one in router._fleet.connected if one.num_sequences]
            before.withdraw(moving, "1")
            if ends == "cancel":
                moving.cancel()
            else:  # the gang that it is meant for goes meanwhile
                router.update({"0": "router0@gang0:1"})
                assert await read(moving, 9) == 100
            assert await asyncio.gather(*reading) == [100] * 4
            await asyncio.sleep(REST_S)
            assert not before.num_sequences and not before.num_unbegun
            fleet.gangs[0].check_idle()

    run_simulated(main())


def test_a_move_is_no_longer_wait() -> None:
    async def main() -> None:
        sequence = OpenSequence(requested(1, 1))
        sequence.admit(10.0)
        await asyncio.sleep(4)
        assert sequence.request_from_here(1).wait_s == 10
        sequence.leave_queue()
        moved = sequence.request_from_here(2)
        assert (moved.wait_s, moved.was_admitted, moved.has_begun) == (6, True, False)
        await asyncio.sleep(8)
        sequence.leave_queue()
        assert sequence.request_from_here(3).wait_s == 0

    run_simulated(main())
