"""Frames are cut by bytes: a stream with a long past, or a slow router, costs only itself."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

import grpc
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motet.tests.rigs.leader_rig import TOKEN, Leader, Router, submit
from motet.tests.rigs.part_configs import leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine
from motet.workers.leader import router_stream
from motet.workers.leader.frame_server import FrameServer
from motet.workers.leader.router_stream import FRAME_BYTES, UnsentUpdates, tenants_to_give_back
from motet.workers.wire.messages import (
    Frame,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    Submit,
    SubmitPart,
    TokenLogprobs,
    ToLeader,
)
from motet.workers.wire.stream_options import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from motet.workers.wire.unread_update import UnreadUpdate

NUM_TOP = 200  # ten times what a client may ask for: as many bytes in a tenth of the time
TOP = TokenLogprobs(-1.0, list(range(100_000, 100_000 + NUM_TOP)), [-float(n) - 0.1 for n in range(NUM_TOP)])


class WordyEngine(StandInEngine):
    """Where log-probabilities are requested, a step brings many tokens with many of them; after some steps none."""

    def __init__(self, tokens_a_step: int) -> None:
        super().__init__()
        self.num_wordy_steps: int | None = None
        self._tokens_a_step = tokens_a_step

    def _next(self, request: SequenceRequest, count: int) -> SequenceUpdate:
        num = self._tokens_a_step if request.sampling.num_logprobs else 1
        update = super()._next(request, count)
        if request.sampling.num_logprobs and self.num_wordy_steps is not None and count >= self.num_wordy_steps:
            return SequenceUpdate(request.sequence_id)
        rows = [TOP] * num if request.sampling.num_logprobs else None
        return msgspec.structs.replace(update, token_ids=update.token_ids * num, logprobs=rows)


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    engine = WordyEngine(tokens_a_step=50)
    server = FrameServer(engine, INFO, TOKEN, leader_config())
    yield Leader(engine, server, await server.start("127.0.0.1"))
    await server.stop()


def wordy(sequence_id: int, num_steps: int | None, tenant: str = "acme") -> Submit:
    sampling = SamplingParams(max_tokens=num_steps, num_logprobs=NUM_TOP)
    return Submit(
        SequenceRequest(
            sequence_id=sequence_id,
            prompt_token_ids=[1, sequence_id],
            sampling=sampling,
            tenant=tenant,
            key=f"k{sequence_id}",
        )
    )


async def test_many_resumed_streams_with_log_probabilities(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as broke the stream for ever before; another tenant's tokens come between them."""
    assert isinstance(leader.engine, WordyEngine)
    lost = Router(leader.address)
    await lost.read()
    num_streams, num_steps = 50, 12
    leader.engine.num_wordy_steps = num_steps
    monkeypatch.setattr(router_stream, "MAX_UNREAD_VALUES", 1 << 30)  # the lost router reads nothing
    await lost.send(*[wordy(number, None) for number in range(num_streams)])
    await eventually(lambda: len(leader.engine.submitted) == num_streams)
    num_turns = leader.engine.num_turns
    await eventually(lambda: leader.engine.num_turns > num_turns + num_steps + 1)
    await lost.channel.close()
    await eventually(lambda: leader.server.num_sequences == 0)
    monkeypatch.undo()
    router = Router(leader.address)
    await router.read()
    neighbour = Submit(
        SequenceRequest(
            sequence_id=900, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=None), tenant="zenith"
        )
    )
    await router.send(*[wordy(number, None) for number in range(num_streams)], neighbour)
    num_tokens: dict[int, int] = defaultdict(int)
    expected = dict.fromkeys(range(num_streams), 50 * num_steps)
    num_frames_without = most_without = num_bytes = 0
    while {number: num_tokens[number] for number in expected} != expected:
        frame = await router.read()
        assert isinstance(frame, Frame)
        assert router.num_bytes < MAX_MESSAGE_BYTES
        num_bytes += router.num_bytes
        received = {update.sequence_id for update in frame.updates}
        num_frames_without = 0 if 900 in received or not received else num_frames_without + 1
        most_without = max(most_without, num_frames_without)
        for update in frame.updates:
            assert update.error is None
            num_tokens[update.sequence_id] += len(update.token_ids)
            assert update.logprobs is None or len(update.logprobs) == len(update.token_ids)
            assert num_tokens[update.sequence_id] <= expected.get(update.sequence_id, 1 << 30)
    assert num_bytes > 64 << 20, "this would have fitted into one frame"
    assert leader.server.largest_frame_bytes < 2 * FRAME_BYTES
    assert len(leader.engine.submitted) == num_streams + 1, "nothing was computed again"
    assert most_without < 20
    await router.channel.close()


async def test_a_router_that_reads_nothing_is_given_its_sequences_back(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens so far come first. Another router's stream goes on all the while."""
    monkeypatch.setattr(router_stream, "MAX_UNREAD_VALUES", 1 << 18)
    slow, quick = Router(leader.address), Router(leader.address)
    await slow.read()
    await quick.read()
    await slow.send(*[wordy(number, None) for number in range(8)])
    await quick.send(submit(1, 5, None))
    await eventually(lambda: len(leader.engine.cancelled) == 8)  # it does not even call read
    await eventually(lambda: leader.server.num_sequences == 1)  # that of the other router, which may come later
    num_before = leader.engine.num_turns
    async for update in quick.updates():
        assert update.error is None
        if leader.engine.num_turns > num_before + 50:
            break
    given_back: dict[int, SequenceError | None] = {}
    async for update in slow.updates():
        if update.error is not None:
            given_back[update.sequence_id] = update.error
            if len(given_back) == 8:
                break
        else:
            assert update.sequence_id not in given_back
    assert {error.kind for error in given_back.values() if error is not None} == {"given_back"}
    await slow.send(wordy(20, 1))  # and it may come again
    async for update in slow.updates():
        if update.sequence_id == 20 and update.finish_reason is not None:
            break
    await slow.channel.close()
    await quick.channel.close()


async def test_only_those_are_given_back_who_have_most_unread(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router reads nothing: one tenant's log-probabilities fill what it may leave unread, another one goes on."""
    monkeypatch.setattr(router_stream, "MAX_UNREAD_VALUES", 1 << 18)
    slow = Router(leader.address)
    await slow.read()
    neighbour = SequenceRequest(
        sequence_id=900, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=None), tenant="zenith"
    )
    await slow.send(*[wordy(number, None) for number in range(8)], Submit(neighbour))
    await eventually(lambda: len(leader.engine.cancelled) == 8)
    num_turns = leader.engine.num_turns
    await eventually(lambda: leader.engine.num_turns > num_turns + 50)
    assert leader.server.num_sequences == 1, "the neighbour was given back too"
    num_given_back = 0
    async for update in slow.updates():
        num_given_back += update.error is not None
        assert update.error is None or update.sequence_id != 900
        if num_given_back == 8 and update.sequence_id == 900:
            break
    await slow.channel.close()


@given(st.dictionaries(st.text(max_size=2), st.integers(0, 100), max_size=6))
def test_who_has_most_unread_gives_way_until_half_is_free(num_values: dict[str, int]) -> None:
    chosen = tenants_to_give_back(num_values, 0)
    left = [count for tenant, count in num_values.items() if tenant not in chosen]
    assert sum(left) <= sum(num_values.values()) / 2
    assert all(num_values[tenant] >= count for tenant in chosen for count in left)
    if chosen:
        least = min(num_values[tenant] for tenant in chosen)
        assert sum(left) + least > sum(num_values.values()) // 2, "one gave way without need"
    assert tenants_to_give_back(num_values, 1 << 40) == {*num_values}


@given(st.lists(st.tuples(st.sampled_from(["add", "drop", "end", "take"]), st.integers(0, 3), st.integers(0, 9))))
@example([("add", 0, 0), ("end", 0, 0), ("take", 0, 0), ("add", 0, 0), ("add", 0, 0)])
def test_what_is_unread_is_counted(changes: list[tuple[str, int, int]]) -> None:
    unsent = UnsentUpdates()
    ended: set[int] = set()
    for change, number, num_tokens in changes:
        if change == "add" and number not in ended:
            unsent.add(SequenceUpdate(number, [1] * num_tokens))
        elif change == "drop":
            unsent.drop(number)
        elif change == "end":
            unsent.end(number)
        elif change == "take":
            unsent.take()
        ended = {number for number in ended | {number} if change == "end" or number in ended} & unsent._by_id.keys()
        counts = {key: one.num_added_values for key, one in unsent._by_id.items() if isinstance(one, UnreadUpdate)}
        assert unsent.num_values == {key: count for key, count in counts.items() if key not in ended}
        assert unsent.num_left_values == sum(counts.values()) - sum(unsent.num_values.values())
        assert unsent._num_unread_values == sum(unsent.num_values.values())


def test_a_frame_has_a_piece_of_each_long_one_and_all_that_is_short() -> None:
    unsent = UnsentUpdates()
    for number in range(100):
        unsent.add(SequenceUpdate(number, [number] * 40_000))
        unsent.add(SequenceUpdate(1000 + number, [number]))
    counts: dict[int, int] = defaultdict(int)
    num_frames = 0
    while unsent:
        frame = unsent.take()
        num_frames += 1
        assert len(msgspec.msgpack.encode(frame)) <= FRAME_BYTES
        for update in frame:
            counts[update.sequence_id] += len(update.token_ids)
        if num_frames == 1:
            assert {update.sequence_id for update in frame} >= set(range(1000, 1100))
        if num_frames == 8:
            assert min(counts[number] for number in range(100)) > 0, "one had to wait for all of another"
    assert {counts[number] for number in range(100)} == {40_000}


def test_a_step_of_single_tokens_is_one_frame() -> None:
    unsent = UnsentUpdates()
    updates = [SequenceUpdate(number, [number]) for number in range(4096)]
    for update in updates:
        unsent.add(update)
    assert unsent.take() == updates
    assert not unsent


async def test_a_long_request_comes_in_parts(leader: Leader) -> None:
    router = Router(leader.address)
    await router.read()
    prompt = [1] * 10_000
    request = SequenceRequest(sequence_id=3, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1), tenant="a")
    data = msgspec.msgpack.encode(Submit(request))
    for start in range(0, len(data), 1000):
        part = SubmitPart(3, data[start : start + 1000], is_last=start + 1000 >= len(data))
        await router.call.write(msgspec.msgpack.encode(ToLeader([part])))
    async for update in router.updates():
        if update.finish_reason is not None:
            break
    assert leader.engine.submitted[0].prompt_token_ids == prompt
    await router.channel.close()


async def test_parts_have_a_bound(leader: Leader) -> None:
    router = Router(leader.address)
    await router.read()
    part = SubmitPart(3, bytes(2 << 20), is_last=False)
    for _ in range(MAX_REQUEST_BYTES // (2 << 20) + 1):
        await router.call.write(msgspec.msgpack.encode(ToLeader([part])))
    with pytest.raises(grpc.aio.AioRpcError):
        await asyncio.wait_for(router.read_to_the_end(), PATIENCE_S)
    await router.channel.close()
