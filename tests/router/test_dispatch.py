"""The router's side against real frame servers over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from motet.router.fleet.dispatch import FleetDispatcher, SequenceStream
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate, TokenLogprobs
from motet.workers.wire.stream_options import MAX_REQUEST_BYTES

TOKEN = "a secret"
StartGang = Callable[[], Awaitable["Gang"]]


class Gang:
    def __init__(self, engine: StandInEngine, server: FrameServer, address: str) -> None:
        self.engine, self.server, self.address = engine, server, address


@pytest.fixture
async def start_gang() -> AsyncIterator[StartGang]:
    gangs: list[Gang] = []

    async def start() -> Gang:
        engine = StandInEngine()
        server = FrameServer(engine, INFO, TOKEN, leader_config())
        gangs.append(Gang(engine, server, await server.start("127.0.0.1")))
        return gangs[-1]

    yield start
    for gang in gangs:
        await gang.server.stop()


@pytest.fixture
async def dispatcher() -> AsyncIterator[FleetDispatcher]:
    dispatcher = FleetDispatcher(
        TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
    )
    yield dispatcher
    await dispatcher.close()


def submit(dispatcher: FleetDispatcher, last_token: int, max_tokens: int | None) -> OpenSequence:
    return dispatcher.submit(
        SequenceRequest(prompt_token_ids=[1, last_token], sampling=SamplingParams(max_tokens=max_tokens), tenant="acme")
    )


async def read(stream: SequenceStream) -> tuple[list[int], SequenceUpdate]:
    """All tokens, and the last update."""
    tokens: list[int] = []
    last = None
    async with asyncio.timeout(PATIENCE_S):
        async for update in stream:
            tokens += update.token_ids
            last = update
    assert last is not None
    return tokens, last


async def test_many_sequences_over_one_connection(dispatcher: FleetDispatcher, start_gang: StartGang) -> None:
    dispatcher.update({"a": (await start_gang()).address})
    results = await asyncio.gather(*(read(submit(dispatcher, 10 * n, 5)) for n in range(50)))
    for n, (tokens, last) in enumerate(results):
        assert tokens == [10 * n + step for step in range(1, 6)]
        assert last.finish_reason == "length"
    assert dispatcher.gang() == INFO


async def test_facts_and_load_of_no_one_and_two_gangs(dispatcher: FleetDispatcher, start_gang: StartGang) -> None:
    assert dispatcher.gang() is None
    assert dispatcher.load() is None
    addresses = {key: (await start_gang()).address for key in "ab"}
    dispatcher.update(addresses)
    await eventually(lambda: len(dispatcher.gangs()) == 2)
    streams = [submit(dispatcher, 0, None) for _ in range(4)]

    def num_running() -> int:
        load = dispatcher.load()
        return 0 if load is None else load.gauges.num_running

    await eventually(lambda: num_running() == 4)
    assert [load.gauges.num_running for _, load in dispatcher.gangs()] == [2, 2]
    for stream in streams:
        stream.cancel()
    await eventually(lambda: num_running() == 0)


async def test_cancel_frees_the_leader_and_ends_the_iteration(
    dispatcher: FleetDispatcher, start_gang: StartGang
) -> None:
    gang = await start_gang()
    dispatcher.update({"a": gang.address})
    stream = submit(dispatcher, 0, None)
    async for _ in stream:
        stream.cancel()  # an async for that goes on would never end
    await eventually(lambda: gang.engine.num_running == 0)
    stream.cancel()
    assert len(gang.engine.cancelled) == 1


async def test_a_reader_that_waits_is_woken_by_cancel(dispatcher: FleetDispatcher) -> None:
    stream = submit(dispatcher, 0, 1)  # parked: there is no gang
    reader = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    stream.cancel()
    assert await asyncio.wait_for(reader, PATIENCE_S) is None


async def test_a_request_waits_for_the_successor(dispatcher: FleetDispatcher, start_gang: StartGang) -> None:
    old = await start_gang()
    dispatcher.update({"a": old.address})
    await read(submit(dispatcher, 0, 1))
    await old.server.stop()
    await eventually(lambda: dispatcher.gang() is None)
    stream = submit(dispatcher, 5, 2)
    dispatcher.update({"b": (await start_gang()).address})
    assert (await read(stream))[0] == [6, 7]


async def test_a_gang_at_the_same_address_is_found_again(dispatcher: FleetDispatcher, start_gang: StartGang) -> None:
    old = await start_gang()
    dispatcher.update({"a": old.address})
    await read(submit(dispatcher, 0, 1))
    await old.server.stop()
    host, port = old.address.split(":")
    server = FrameServer(StandInEngine(), INFO, TOKEN, leader_config())
    await server.start(host, int(port))
    assert (await read(submit(dispatcher, 5, 2)))[0] == [6, 7]
    await server.stop()


async def test_a_client_does_not_read_what_an_engine_failed_at(
    dispatcher: FleetDispatcher, start_gang: StartGang, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be another tenant's."""
    reader = asyncio.create_task(read(submit(dispatcher, 500, None)))
    for name in ("a", "b"):
        gang = await start_gang()
        gang.engine.paused = True
        dispatcher.update({name: gang.address})
        await eventually(lambda gang=gang: gang.engine.num_running == 1)  # type: ignore[misc]
        await eventually(lambda: all(one._last_arrived == one._last_id for one in dispatcher._fleet.connected))
        gang.engine.fails = True
        gang.engine.paused = False
    _, last = await reader
    assert last.error is not None and last.error.kind == "gang_lost"
    assert last.error.message == "2 gangs were lost with this request before its next token"
    assert "the last one lost to: the engine failed: by the test" in caplog.text


async def test_no_gang_within_the_wait() -> None:
    dispatcher = FleetDispatcher(TOKEN, gang_wait_s=0.05, adapter_pages=adapter_pages, admission=admission_config())
    _, last = await read(submit(dispatcher, 0, 1))
    assert last.error is not None
    assert last.error.kind == "gang_lost"
    assert "0.05 s" in last.error.message
    await dispatcher.close()


async def test_a_waiting_client_is_answered() -> None:
    """So that a gang can be requested where none runs without demand."""
    reported: list[int] = []
    router = FleetDispatcher(
        TOKEN,
        PATIENCE_S,
        on_wait=lambda: reported.append(router.num_waiting),
        adapter_pages=adapter_pages,
        admission=admission_config(),
    )
    streams = [submit(router, 0, 1) for _ in range(2)]
    assert reported == [1, 2]
    streams[0].cancel()
    assert router.num_waiting == 1
    await router.close()


async def test_too_many_waiting(dispatcher: FleetDispatcher) -> None:
    streams = [submit(dispatcher, 0, 1) for _ in range(1025)]
    _, last = await read(streams[-1])
    assert last.error is not None
    assert last.error.kind == "overloaded"
    for stream in streams:
        stream.cancel()
    assert not submit(dispatcher, 0, 1).closed  # cancelled ones make room


async def test_a_gang_that_leaves_finishes_what_it_serves(dispatcher: FleetDispatcher, start_gang: StartGang) -> None:
    leaving, staying = await start_gang(), await start_gang()
    dispatcher.update({"a": leaving.address})
    old = submit(dispatcher, 0, 2000)
    await eventually(lambda: leaving.engine.num_running == 1)
    dispatcher.update({"b": staying.address})
    await read(submit(dispatcher, 0, 1))
    assert len(staying.engine.submitted) == 1
    tokens, last = await read(old)
    assert len(tokens) == 2000
    assert last.finish_reason == "length"
    await eventually(lambda: leaving.server.num_sequences == 0)


async def test_a_wrong_token_connects_to_nothing(start_gang: StartGang) -> None:
    dispatcher = FleetDispatcher("another", gang_wait_s=0.5, adapter_pages=adapter_pages, admission=admission_config())
    dispatcher.update({"a": (await start_gang()).address})
    _, last = await read(submit(dispatcher, 0, 1))
    assert last.error is not None
    assert dispatcher.gang() is None
    await dispatcher.close()


@pytest.mark.parametrize("part", ["prompt", "bias"])
async def test_a_request_that_is_too_large_fails_alone(
    dispatcher: FleetDispatcher, start_gang: StartGang, part: str
) -> None:
    gang = await start_gang()
    dispatcher.update({"a": gang.address})
    await read(submit(dispatcher, 0, 1))
    others = [submit(dispatcher, 0, None) for _ in range(3)]
    for stream in others:
        await anext(stream)
    if part == "prompt":
        prompt, bias = [2**31] * (MAX_REQUEST_BYTES // 5 + 1), {}
    else:
        prompt, bias = [1], dict.fromkeys(range(70_000, 70_000 + MAX_REQUEST_BYTES // 14), 1.5)
    too_large = dispatcher.submit(
        SequenceRequest(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1, logit_bias=bias), tenant="acme")
    )
    after = submit(dispatcher, 5, 2)
    _, last = await read(too_large)
    assert last.error is not None
    assert last.error.kind == "invalid_request"
    assert str(MAX_REQUEST_BYTES) in last.error.message
    assert (await read(after))[0] == [6, 7]
    for stream in others:
        await anext(stream)
        assert not stream.closed
        stream.cancel()
    await eventually(lambda: gang.engine.num_running == 0)
    assert len(gang.engine.submitted) == 5  # the large one is not among them


async def test_requests_that_are_too_much_for_one_message_go_out_in_several(
    dispatcher: FleetDispatcher, start_gang: StartGang
) -> None:
    """In bytes they are; their prompts are short."""
    gang = await start_gang()
    dispatcher.update({"a": gang.address})
    await read(submit(dispatcher, 0, 1))
    bias = dict.fromkeys(range(70_000, 70_000 + MAX_REQUEST_BYTES // 4 // 14), 1.5)
    sampling = SamplingParams(max_tokens=2, logit_bias=bias)
    streams = [
        dispatcher.submit(SequenceRequest(prompt_token_ids=[5], sampling=sampling, tenant="acme")) for _ in range(12)
    ]
    for stream in streams:
        assert (await read(stream))[0] == [6, 7]


async def test_what_piles_up_is_merged_in_order() -> None:
    request = SequenceRequest(sequence_id=3, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=3), tenant="t")
    sequence = OpenSequence(request)
    for token, reason in ((5, None), (6, None), (7, "stop")):
        sequence.push(SequenceUpdate(3, [token], [TokenLogprobs(-token, [], [])], reason))  # type: ignore[arg-type]
    sequence.push(SequenceUpdate(3, [8]))  # after the end
    updates = [update async for update in sequence]
    assert updates == [
        SequenceUpdate(3, [5, 6, 7], [TokenLogprobs(-token, [], []) for token in (5, 6, 7)], "stop"),
    ]
