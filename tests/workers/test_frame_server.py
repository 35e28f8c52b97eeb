"""The frame server of a leader, through a bare gRPC channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import msgspec
import pytest

from motet.tests.rigs.leader_rig import TOKEN, Leader, Router, submit
from motet.tests.rigs.part_configs import leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.engine_load import ServedElsewhere, TenantShare
from motet.workers.wire.messages import Cancel, Frame, FromLeader, Hello


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    engine = StandInEngine()
    server = FrameServer(engine, INFO, TOKEN, leader_config())
    yield Leader(engine, server, await server.start("127.0.0.1"))
    await server.stop()
    assert not engine.alive


async def test_greets_and_streams_tokens_to_the_end(leader: Leader) -> None:
    router = Router(leader.address)
    assert await router.read() == Hello(INFO)
    await router.send(submit(7, 100, 3), submit(8, 200, 2))
    got: dict[int, list[int]] = {7: [], 8: []}
    reasons: dict[int, str] = {}
    async for update in router.updates():
        got[update.sequence_id] += update.token_ids
        if update.finish_reason is not None:
            reasons[update.sequence_id] = update.finish_reason
        if len(reasons) == 2:
            break
    assert got == {7: [101, 102, 103], 8: [201, 202]}
    assert reasons == {7: "length", 8: "length"}
    assert leader.server.num_sequences == 0
    await router.channel.close()


async def test_routers_learn_which_adapters_are_there(leader: Leader) -> None:
    first = Router(leader.address)
    assert await first.read() == Hello(INFO, [])
    await first.send(submit(1, 0, 1, "digest-a"), submit(2, 0, 1, "digest-b"))
    reported: set[str] = set()
    while reported != {"digest-a", "digest-b"}:
        message = await first.read()
        assert isinstance(message, Frame)
        assert message.residency.went == []
        reported.update(message.residency.came)

    second = Router(leader.address)
    assert await second.read() == Hello(INFO, ["digest-a", "digest-b"])
    leader.engine.evict("digest-a")
    await first.send(submit(3, 0, 1))
    for router in (first, second):  # the second has no sequence there, and gets it all the same
        while True:
            message = await router.read()
            assert isinstance(message, Frame)
            assert message.residency.came == []
            if message.residency.went:
                assert message.residency.went == ["digest-a"]
                break
        await router.channel.close()


async def test_two_routers_use_the_same_ids(leader: Leader) -> None:
    routers = [Router(leader.address), Router(leader.address)]
    for number, router in enumerate(routers):
        await router.read()
        await router.send(submit(1, 100 * number, 3))
    for number, router in enumerate(routers):
        tokens: list[int] = []
        async for update in router.updates():
            assert update.sequence_id == 1
            tokens += update.token_ids
            if update.finish_reason is not None:
                break
        assert tokens == [100 * number + step for step in (1, 2, 3)]
        await router.channel.close()
    assert len({request.sequence_id for request in leader.engine.submitted}) == 2


async def test_shares_reach_every_router_and_what_others_served_reaches_the_engine(leader: Leader) -> None:
    first, later = Router(leader.address), Router(leader.address)
    share = TenantShare("acme", 12.5, 1, 2, 30, 4, 2.0, 10.0)
    await first.read()
    leader.engine.shares = [share]
    served = ServedElsewhere([("acme", 7.0)])
    await first.send(served, submit(1, 0, 3))
    for router in (first, later):  # the later one connects when all was sent
        while True:
            message = await router.read()
            if isinstance(message, Frame) and message.shares:
                assert message.shares == [share]
                break
    assert leader.engine.served_elsewhere == [served]
    for router in (first, later):
        await router.channel.close()


async def test_cancel_reaches_the_engine_and_silences_the_sequence(leader: Leader) -> None:
    router = Router(leader.address)
    await router.read()
    await router.send(submit(1, 0, None))
    await eventually(lambda: leader.engine.num_running == 1)
    await router.send(Cancel(1), Cancel(99))
    await eventually(lambda: leader.engine.num_running == 0)
    assert leader.engine.cancelled == [leader.engine.submitted[0].sequence_id]
    await router.send(submit(1, 500, 1))  # the id is free again, and nothing of its former owner comes
    async for update in router.updates():
        if update.finish_reason is not None:
            assert update.token_ids == [501]
            break
    await router.channel.close()


async def test_a_router_that_goes_takes_its_sequences_along(leader: Leader) -> None:
    gone, stays = Router(leader.address), Router(leader.address)
    for router in (gone, stays):
        await router.read()
        await router.send(submit(1, 0, None), submit(2, 0, None))
    await eventually(lambda: leader.engine.num_running == 4)
    await gone.channel.close()
    await eventually(lambda: leader.engine.num_running == 2)
    assert leader.server.num_sequences == 2
    await stays.call.done_writing()  # half-closed is gone too
    await eventually(lambda: leader.engine.num_running == 0)
    await stays.channel.close()


async def reported_orphans(router: Router) -> tuple[set[str], set[str]]:
    """The orphans that came and went, by the next frame that reports any."""
    while True:
        message = await router.read()
        assert isinstance(message, Frame)
        if message.orphans is not None:
            return set(message.orphans.came), set(message.orphans.went)


async def tokens_of(router: Router, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    async for update in router.updates():
        tokens += update.token_ids
        if len(tokens) >= num_tokens or update.finish_reason is not None:
            break
    return tokens


async def test_a_sequence_with_a_key_outlives_its_router(leader: Leader) -> None:
    gone, stays = Router(leader.address), Router(leader.address)
    for router in (gone, stays):
        assert await router.read() == Hello(INFO)
    await gone.send(submit(1, 100, 800, key="k/0"), submit(2, 0, 3, key="k/1"), submit(3, 0, None))
    await tokens_of(gone, 20)
    await gone.channel.close()
    assert await reported_orphans(stays) == ({"k/0", "k/1"}, set())  # the one that has ended, too
    await eventually(lambda: leader.engine.num_running == 1)
    assert leader.server.num_sequences == 0

    late = Router(leader.address)
    assert await late.read() == Hello(INFO, orphans=["k/0", "k/1"])
    await late.send(submit(5, 100, 800, key="k/0"))
    assert await tokens_of(late, 1000) == [(101 + n) % INFO.vocab_size for n in range(800)]
    assert await reported_orphans(stays) == (set(), {"k/0"})
    await stays.send(submit(9, 0, 3, key="k/1"))
    assert await tokens_of(stays, 3) == [1, 2, 3]
    assert len(leader.engine.submitted) == 3
    for router in (late, stays):
        await router.channel.close()


async def test_a_leader_that_leaves_loses_its_orphans(leader: Leader) -> None:
    router = Router(leader.address)
    await router.read()
    await router.send(submit(1, 100, None, key="k/0"))
    await tokens_of(router, 1)
    await router.channel.close()
    await eventually(lambda: leader.server.num_sequences == 0)
    assert leader.engine.num_running == 1
    assert await leader.server.drain(PATIENCE_S) == 0  # it does not wait for them
    await eventually(lambda: leader.engine.num_running == 0)


async def test_what_has_arrived_is_reported_at_once(leader: Leader) -> None:
    """Arrivals are reported before any token, so that a router knows which sequences may have killed a gang."""
    leader.engine.paused = True
    router = Router(leader.address)
    await router.read()
    await router.send(submit(4, 100, None), submit(7, 100, None))
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await router.read()
            assert isinstance(message, Frame)
            assert message.updates == []
            if message.last_submitted == 7:
                break
    await router.channel.close()


async def test_a_quiet_router_learns_the_load(leader: Leader) -> None:
    busy, quiet = Router(leader.address), Router(leader.address)
    await quiet.read()
    await busy.read()
    await busy.send(submit(1, 0, None))
    seen = 0
    async with asyncio.timeout(PATIENCE_S):
        while seen != 1:
            message = await quiet.read()
            assert isinstance(message, Frame)
            assert message.updates == []
            seen = message.load.gauges.num_running
    await busy.channel.close()
    await quiet.channel.close()


@pytest.mark.parametrize("token", ["", "another"])
async def test_a_stranger_is_refused(leader: Leader, token: str) -> None:
    router = Router(leader.address, token)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.call.read()
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert leader.engine.submitted == []
    await router.channel.close()


@pytest.mark.parametrize(
    "data",
    [b"\xc1", msgspec.msgpack.encode({"messages": [{"type": "submit"}]})],
    ids=["not msgpack", "fields missing"],
)
async def test_nonsense_ends_the_stream_with_a_reason(leader: Leader, data: bytes) -> None:
    router = Router(leader.address)
    await router.read()
    await router.call.write(data)
    with pytest.raises(grpc.aio.AioRpcError, match="not understood"):
        await router.read_to_the_end()
    await router.channel.close()


async def test_an_id_in_use_is_refused(leader: Leader) -> None:
    router = Router(leader.address)
    await router.read()
    await router.send(submit(1, 0, None), submit(1, 0, None))
    with pytest.raises(grpc.aio.AioRpcError, match="still in use"):
        await router.read_to_the_end()
    await eventually(lambda: leader.engine.num_running == 0)
    await router.channel.close()


async def test_a_dead_engine_ends_the_streams(leader: Leader) -> None:
    router = Router(leader.address)
    await router.read()
    await router.send(submit(1, 0, None))
    await eventually(lambda: leader.engine.num_running == 1)
    assert leader.server.healthy
    await asyncio.to_thread(leader.engine.stop)
    assert not leader.server.healthy
    with pytest.raises(grpc.aio.AioRpcError, match="engine has stopped"):
        await router.read_to_the_end()
    await router.channel.close()


async def test_drain_lets_sequences_end(leader: Leader) -> None:
    router = Router(leader.address)
    await router.read()
    await router.send(submit(1, 0, 100), submit(2, 0, None))
    await eventually(lambda: leader.server.num_sequences == 2)
    drained = asyncio.create_task(leader.server.drain(PATIENCE_S))
    tokens: list[int] = []
    async for update in router.updates():
        tokens += update.token_ids if update.sequence_id == 1 else []
        if update.finish_reason is not None:
            break
    assert tokens == list(range(1, 101))
    assert not drained.done()
    await router.send(Cancel(2))
    assert await drained == 0
    await router.read_to_the_end()
    assert await router.call.code() == grpc.StatusCode.OK
    await router.channel.close()


async def test_drain_hands_over_what_has_not_ended(leader: Leader) -> None:
    routers = [Router(leader.address) for _ in range(2)]
    for router in routers:
        await router.read()
        await router.send(submit(1, 0, None), submit(2, 500, None))
    await eventually(lambda: leader.engine.num_running == 4)
    num_turns = leader.engine.num_turns
    await eventually(lambda: leader.engine.num_turns > num_turns + 2)  # each has tokens
    assert await leader.server.drain(0.05) == 4
    assert leader.server.num_sequences == 0
    await eventually(lambda: leader.engine.num_running == 0)
    for router in routers:
        tokens: dict[int, list[int]] = {1: [], 2: []}
        handed_over: list[int] = []
        while (data := await router.call.read()) is not grpc.aio.EOF:
            frame = msgspec.msgpack.decode(data, type=FromLeader)
            assert isinstance(frame, Frame)
            for update in frame.updates:
                assert update.sequence_id not in handed_over, "an update after the hand-over"
                tokens[update.sequence_id] += update.token_ids
                if update.error is not None:
                    assert update.error.kind == "handed_over"
                    handed_over.append(update.sequence_id)
        assert sorted(handed_over) == [1, 2]
        for first, got in ((1, tokens[1]), (501, tokens[2])):
            assert got
            assert got == [(first + n) % INFO.vocab_size for n in range(len(got))]
        assert await router.call.code() == grpc.StatusCode.OK
        await router.channel.close()


@pytest.mark.parametrize("reason", ["drained", "dead"])
async def test_a_gang_that_serves_none_greets_none(leader: Leader, reason: str) -> None:
    if reason == "drained":
        await leader.server.drain(0)
    else:
        await asyncio.to_thread(leader.engine.stop)
    router = Router(leader.address)
    with pytest.raises(grpc.aio.AioRpcError, match="has stopped serving"):
        await router.call.read()
    await router.channel.close()
