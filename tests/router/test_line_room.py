"""The answers of batches' lines never take more of a router's memory than is reserved, and all of them end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from motet.adapters.format.score_head import ScoreHead
from motet.router.batches.line_call import LINE_ROOM, LineRoom, ReservedRoom
from motet.router.text.text import TextService
from motet.tests.rigs.batch_client import BatchClient, line
from motet.tests.rigs.real_front import RealFront, real_front
from motet.tests.rigs.router_rig import RouterRig, posted, text_service
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate, TokenLogprobs


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_no_more_is_reserved_than_there_is_and_each_line_has_its_turn(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        room, had = LineRoom(100, 50), Counter[str]()

        async def answer(tenant: str, num_bytes: int) -> None:
            held = ReservedRoom(room, tenant)
            try:
                await held.reserve(num_bytes)
                assert room.num_bytes <= 100
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
                had[tenant] += 1
            finally:
                held.give_back()
                held.give_back()

        tasks = [asyncio.create_task(answer(rng.choice("abc"), rng.randint(1, 200))) for _ in range(rng.randint(1, 60))]
        for _ in range(rng.randint(0, 5)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, len(tasks) // 4):
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in ended)
        assert had.total() == sum(one is None for one in ended)
        assert room.num_bytes == 0

    asyncio.run(main())


async def test_the_tenant_that_has_least_goes_first() -> None:
    room, order = LineRoom(100, 50), list[str]()

    async def answer(tenant: str, name: str, num_bytes: int) -> ReservedRoom:
        held = ReservedRoom(room, tenant)
        await held.reserve(num_bytes)
        order.append(name)
        return held

    first = [await answer("a", "a", 50), await answer("a", "a", 50)]
    waiting = [asyncio.create_task(answer(*one)) for one in (("a", "a3", 50), ("b", "b1", 10))]
    await asyncio.sleep(0)
    first[0].give_back()
    await asyncio.sleep(0)
    assert order == ["a", "a", "b1"]
    first[1].give_back()
    for task in reversed(waiting):
        (await task).give_back()


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


async def test_a_line_over_the_bound_fails_by_itself(
    redis_url: str, tmp_path: Path, text: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of answers that have not much room together as many are under way as have."""
    most = list[int]()

    def script(front: RealFront) -> None:
        def updates(request: SequenceRequest) -> list[SequenceUpdate]:
            most.append(front.batches.room.num_bytes)
            values = TokenLogprobs(-0.5, [*range(40, 60)], [-1.25] * 20)
            num_tokens = request.sampling.max_tokens or 0
            likely = None if request.sampling.num_logprobs is None else [values] * num_tokens
            return [SequenceUpdate(1, [50] * num_tokens, likely, "length")]

        front.dispatcher.script = updates

    async with real_front(redis_url, tmp_path, text) as front:
        room = front.batches.room
        room.total_bytes, room.max_line_bytes = 300_000, 150_000
        script(front)
        front.batches.start()
        try:
            owner = BatchClient(front)
            lines = [line(f"id-{i}", logprobs=20, max_tokens=40) for i in range(8)]
            lines.append(line("large", logprobs=20, max_tokens=100, n=4))
            batch = await owner.ended(await owner.create(await owner.upload(lines)))
            assert batch["request_counts"] == {"total": 9, "completed": 8, "failed": 1}
            (failed,) = await owner.lines(batch["error_file_id"])
            assert failed["custom_id"] == "large"
            assert failed["response"]["body"]["error"]["code"] == "answer_too_large"
        finally:
            await front.batches.stop()
    assert max(most) <= 300_000 and room.num_bytes == 0


HELLO = [{"role": "user", "content": "hello"}]
PROMPT = 'hello "\x01' * 20
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "echoed": ("/v1/completions", {"prompt": [PROMPT] * 3, "max_tokens": 99, "echo": True, "n": 2, "logprobs": 5}),
    "ids": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 99, "return_token_ids": True}),
    "scored": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 99, "prompt_logprobs": 5}),
    "chat": (
        "/v1/chat/completions",
        {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "n": 2, "max_tokens": 99},
    ),
    "instructions": ("/v1/responses", {"input": "hello", "max_output_tokens": 99, "instructions": PROMPT * 20}),
    "metadata": (
        "/v1/responses",
        {"input": "hello", "max_output_tokens": 99, "metadata": {str(i): "\x01" * 500 for i in range(15)}},
    ),
    "embeddings": ("/v1/embeddings", {"input": [PROMPT] * 9}),
    "classes": ("/v1/classify", {"model": "wide", "input": [PROMPT] * 9}),
    "documents": ("/v1/rerank", {"model": "one", "query": PROMPT, "documents": ["\x01" * 999, PROMPT] * 9}),
}


class AsLine:
    """Makes a client's requests lines of a batch that have this room."""

    def __init__(self, app: ASGIApp, room: ReservedRoom) -> None:
        self._app, self._room = app, room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, LINE_ROOM: self._room}, receive, send)


@pytest.mark.parametrize("name", LINES)
async def test_no_answer_is_longer_than_what_is_reserved_for_it(text: TextService, tmp_path: Path, name: str) -> None:
    room = LineRoom(1 << 30)
    held = ReservedRoom(room, "acme")
    rig = RouterRig(tmp_path, text)
    rig.app.add_middleware(AsLine, room=held)
    for name_of_head, num_labels in (("one", 1), ("wide", 999)):
        head = ScoreHead(np.full((num_labels, 8), 1e-9, np.float32))
        rig.registry.add("acme", name_of_head, name_of_head[0] * 64, head=head)
    rig.dispatcher.context = 1 << 16
    path, fields = LINES[name]
    for answer in ("the fox ", "\x01", "猫", '"'):
        rig.dispatcher.answer = rig.ids(answer * 200)
        answered = await posted(rig, path, **fields)
        assert answered.status_code == 200, answered.text
        assert len(answered.content) <= room.num_bytes
        held.give_back()
