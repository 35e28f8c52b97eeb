"""A network that was away for a moment: what ran at a gang runs once afterwards, wherever that is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from unittest import mock

import grpc
import pytest

from motet.router.fleet.leader_connection import LeaderConnection
from motet.tests.rigs.simulated_fleet import read, requested, simulated_fleet
from motet.tests.rigs.simulated_gang import TOKEN
from motet.tests.rigs.simulated_network import Connection
from motet.tests.rigs.simulated_time import run_simulated
from motet.workers.wire.stream_options import CONNECT_KEY, ROUTER_KEY, TOKEN_KEY


def test_after_a_blip_nothing_is_computed_twice() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            a = await fleet.add_gang()
            await asyncio.sleep(1)
            (router,) = fleet.routers
            streams = [router.submit(requested(seed, 500, f"r-{seed}")) for seed in range(3)]
            reading = [asyncio.create_task(read(stream, seed)) for seed, stream in enumerate(streams)]
            await asyncio.sleep(1)
            await fleet.add_gang()
            await asyncio.sleep(0.2)
            fleet.link(0, 0).refuses = True
            fleet.link(0, 0).cut()
            await asyncio.sleep(1)
            assert {tuple(fleet.where(seed)) for seed in range(3)} == {(0, 1)}  # A cannot know better
            fleet.link(0, 0).mend()
            await asyncio.sleep(2)
            assert {tuple(fleet.where(seed)) for seed in range(3)} == {(1,)}
            assert await asyncio.gather(*reading) == [500] * 3
            a.check_idle()

    run_simulated(main())


def test_who_went_away_during_a_blip_is_forgotten() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            a = await fleet.add_gang()
            await asyncio.sleep(1)
            (router,) = fleet.routers
            gone_before, gone_during = (router.submit(requested(seed, 500, f"r-{seed}")) for seed in range(2))
            await asyncio.sleep(1)
            fleet.link(0, 0).refuses = True
            fleet.link(0, 0).cut()
            gone_before.cancel()  # the gang does not get it any more
            await asyncio.sleep(0.3)
            gone_during.cancel()
            await asyncio.sleep(0.2)
            assert len(a.engine.requests) == 2
            fleet.link(0, 0).mend()
            await asyncio.sleep(2)
            a.check_idle()

    run_simulated(main())


def test_a_router_is_known_again_before_its_old_stream_has_ended() -> None:
    """The gang believes for ten seconds that its stream is there; sequences without a key cannot be requested."""

    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            (router,) = fleet.routers
            streams = [router.submit(requested(seed, 300, key)) for seed, key in enumerate(["", "r-1"])]
            reading = [asyncio.create_task(read(stream, seed)) for seed, stream in enumerate(streams)]
            await asyncio.sleep(1)
            for connection in [*fleet.link(0, 0).connections]:
                connection.is_silent = True
                connection.cut(0.01, None)
            await asyncio.sleep(1)
            assert [fleet.where(seed) for seed in range(2)] == [[0], [0]]
            assert await asyncio.gather(*reading) == [300, 300]

    run_simulated(main())


def test_a_connect_that_was_overtaken_changes_nothing() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()

            async def greeted(num_connects: int) -> Connection:
                connection = Connection(fleet.network, fleet.link(0, 0), gang.address)
                connection.stream_stream("")(
                    ((TOKEN_KEY, TOKEN), (ROUTER_KEY, "a router"), (CONNECT_KEY, str(num_connects)))
                )
                assert await connection.read()
                return connection

            newer = await greeted(2)
            with pytest.raises(grpc.aio.AioRpcError, match="connected again"):
                await greeted(1)
            assert await newer.read()  # its first frame
            assert [stream.num_connects for stream in gang.server._streams.values() if stream.router == "a router"] == [
                2
            ]

    run_simulated(main())


def test_what_another_router_left_is_not_computed_beside_its_successor() -> None:
    """A router dies. Its client comes back to another one, which cannot reach the gang that has its stream."""

    async def main() -> None:
        async with simulated_fleet(2) as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            dies, takes_over = fleet.routers
            dies.submit(requested(7, 500, "r-7"))
            await asyncio.sleep(1)
            fleet.link(1, 0).refuses = True
            fleet.link(1, 0).cut()
            await fleet.add_gang()
            await asyncio.sleep(0.5)
            await dies.close()
            reading = asyncio.create_task(read(takes_over.submit(requested(7, 500, "r-7"), is_resumed=True), 7))
            await asyncio.sleep(1)
            assert fleet.where(7) == [0, 1]
            fleet.link(1, 0).mend()
            await asyncio.sleep(2)
            assert fleet.where(7) == [1]
            assert await reading == 500

    run_simulated(main())


def test_a_first_request_that_arrives_last_takes_nothing_over() -> None:
    """Its client has come back to another router since, whose request was faster."""

    async def main() -> None:
        async with simulated_fleet(2) as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            slow, fast = fleet.routers
            fleet.link(0, 0).stall()
            first = slow.submit(requested(3, 200, "r-3"))
            await asyncio.sleep(0.1)
            first.cancel()
            reading = asyncio.create_task(read(fast.submit(requested(3, 200, "r-3"), is_resumed=True), 3))
            await asyncio.sleep(1)
            fleet.link(0, 0).mend()
            assert await reading == 200

    run_simulated(main())


def test_a_router_that_goes_on_takes_nothing_from_who_came_back_since() -> None:
    """Its connection broke for a moment, and its client went to another router, whose request was faster."""

    async def main() -> None:
        async with simulated_fleet(2) as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            slow, fast = fleet.routers
            first = slow.submit(requested(3, 200, "r-3"), is_resumed=True)
            first_reading = asyncio.create_task(read(first, 3))
            await asyncio.sleep(1)
            fleet.link(0, 0).delay_s = 0.1
            has_asked = asyncio.Event()
            go_on = LeaderConnection._go_on

            def note(connection: LeaderConnection, orphans: Iterable[str]) -> None:
                go_on(connection, orphans)
                has_asked.set()

            with mock.patch.object(LeaderConnection, "_go_on", note):
                fleet.link(0, 0).cut()
                await has_asked.wait()
            fleet.link(0, 0).stall()
            first.cancel()
            await first_reading
            reading = asyncio.create_task(read(fast.submit(requested(3, 200, "r-3"), is_resumed=True), 3))
            await asyncio.sleep(0.5)
            fleet.link(0, 0).mend()
            assert await reading == 200

    run_simulated(main())
