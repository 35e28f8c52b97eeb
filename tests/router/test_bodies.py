"""Bodies of requests: their size, their pace, their memory, and what is decoded in another process."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from motet.router.bodies.body_reader import TENANT_SHARE, BodyBudget, BodyReader, Turns
from motet.router.bodies.request_decoder import (
    BYTES_PER_TOKEN,
    FIXED_BYTES,
    MAX_BYTES_ON_LOOP,
    MOST_BYTES,
    ArrivalPace,
    max_body_bytes,
    packed,
    unpacked,
)
from motet.router.http.access_log import begin_record
from motet.router.http.errors import ApiError
from motet.router.metrics import Metrics
from motet.router.openai.request_schema import ChatRequest, CompletionRequest
from motet.router.text.text import TextService
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.router_rig import BASE, RouterRig, text_service

MIB = 1 << 20
PATIENT = ArrivalPace(PATIENCE_S, 1.0, PATIENCE_S)


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids("hello")
    return rig


class Client:
    """A request whose body comes when the test says so."""

    def __init__(self, **headers: str) -> None:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        scope = {"type": "http", "method": "POST", "headers": raw}
        self.record = begin_record(scope, "POST /v1/completions")
        self.request = Request(scope, self._messages.get)

    def send(self, body: bytes, *, more: bool = True) -> None:
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more})


def body_of(num_bytes: int) -> bytes:
    return json.dumps({"model": "m", "prompt": "x" * num_bytes}).encode()


async def read(reader: BodyReader, client: Client, tenant: str = "acme", **limits: Any) -> CompletionRequest:
    limits = {"max_bytes": 16 * MIB, "context": 4096, **limits}
    async with reader.open(client.request, tenant, CompletionRequest, **limits) as request:
        return request


def test_the_limit_follows_the_context() -> None:
    assert max_body_bytes(2048, 1, None) == FIXED_BYTES + 2048 * BYTES_PER_TOKEN
    assert max_body_bytes(131_072, 1, None) < MOST_BYTES // 3
    assert max_body_bytes(131_072, 128, None) == max_body_bytes(None, 1, None) == MOST_BYTES
    assert max_body_bytes(2048, 128, 1000) == 1000


async def test_a_body_that_cannot_fit_the_context_is_not_read(rig: RouterRig) -> None:
    body = json.dumps({"model": BASE, "messages": [{"role": "user", "content": "x" * MIB}]})
    async with rig.client() as client:
        response = await client.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
async def test_compressed_bodies_are_refused(rig: RouterRig, encoding: str) -> None:
    async with rig.client() as client:
        response = await client.post("/v1/completions", content=b"\x1f\x8b", headers={"Content-Encoding": encoding})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")


def test_the_pace() -> None:
    pace = ArrivalPace(grace_s=10.0, bytes_per_s=100.0, deadline_s=60.0)
    assert pace.latest_s(0) == 10
    assert pace.latest_s(500) == 15
    assert pace.latest_s(10**9) == 60


async def test_a_body_that_comes_too_slowly_is_given_up() -> None:
    reader = BodyReader(MIB, Metrics(), ArrivalPace(grace_s=0.05, bytes_per_s=1000.0, deadline_s=60.0))
    client = Client()
    client.send(b"{")
    with pytest.raises(ApiError, match="too slowly") as reported:
        await asyncio.wait_for(read(reader, client), PATIENCE_S)
    assert (reported.value.status_code, reported.value.detail.code) == (408, "body_timeout")
    assert reader.budget.num_held == 0


async def test_a_trickle_does_not_last_to_the_deadline() -> None:
    """Each byte comes in time after the one before it, and all of them would take hours."""
    reader = BodyReader(MIB, Metrics(), ArrivalPace(grace_s=0.2, bytes_per_s=10_000.0, deadline_s=PATIENCE_S))
    client = Client()
    task = asyncio.create_task(read(reader, client))
    async with asyncio.timeout(PATIENCE_S / 2):
        while not task.done():
            client.send(b" ")
            await asyncio.sleep(0.02)
    with pytest.raises(ApiError, match="too slowly"):
        task.result()


async def test_unfinished_bodies_are_bounded_by_tenant_and_in_all() -> None:
    reader, tasks = BodyReader(8 * MIB, Metrics(), PATIENT), []
    for tenant in ("a", "b", "c", "d", "e"):
        for _ in range(5):
            client = Client()
            client.send(b"x" * MIB)
            tasks.append((tenant, asyncio.create_task(read(reader, client, tenant))))
    await eventually_in_loop(lambda: reader.budget.num_held == 8 * MIB)
    reader.budget.check_integrity()
    refused = [(tenant, task) for tenant, task in tasks if task.done()]
    assert [tenant for tenant, _ in refused] == [*"aaabbbcccddd", *"eeeee"]
    for _, task in refused:
        error = task.exception()
        assert isinstance(error, ApiError)
        assert (error.status_code, error.detail.code) == (429, "bodies_full")
    for _, task in tasks:
        task.cancel()
    await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
    assert reader.budget.num_held == 0
    reader.budget.check_integrity()


def test_a_budget_that_is_taken_and_given_back_at_random() -> None:
    rng, budget = random.Random(0), BodyBudget(1000)
    held: list[tuple[str, int]] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            budget.give_back(*held.pop(rng.randrange(len(held))))
        else:
            tenant, num_bytes = rng.choice("abcdefgh"), rng.randrange(120)
            own = sum(size for owner, size in held if owner == tenant)
            fits = own + num_bytes <= 1000 // TENANT_SHARE and sum(size for _, size in held) + num_bytes <= 1000
            if fits:
                budget.take(tenant, num_bytes)
                held.append((tenant, num_bytes))
            else:
                with pytest.raises(ApiError):
                    budget.take(tenant, num_bytes)
        budget.check_integrity()


async def test_turns_of_one_tenant_come_one_after_the_other() -> None:
    turns, inside, most = Turns(2), {"a": 0, "b": 0}, {"a": 0, "b": 0}

    async def stay(tenant: str) -> None:
        async with turns.of(tenant):
            inside[tenant] += 1
            most[tenant] = max(most[tenant], inside[tenant])
            turns.check_integrity()
            await asyncio.sleep(0.001)
            inside[tenant] -= 1

    tasks = [asyncio.create_task(stay(tenant)) for tenant in "aaaaab"]
    await asyncio.sleep(0)
    tasks[4].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == {"a": 2, "b": 1}
    turns.check_integrity()
    assert turns.num_here("a") == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "wörld 你好 😀" * 50_000},
        {"prompt": ["a" * 300_000, "", "b"]},
        {"prompt": [*range(150_000)]},
        {"prompt": [[1, 2], [], [3] * 70_000], "logit_bias": {"5": 1.5}, "stop": ["x"], "seed": -(2**63)},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [""]},
    ],
)
def test_a_request_comes_out_of_its_pieces_as_it_went_in(fields: dict[str, Any]) -> None:
    request = msgspec.json.decode(json.dumps({"model": "m", **fields}), type=CompletionRequest)
    assert unpacked(packed(request), CompletionRequest) == request


def test_a_chat_comes_out_of_its_pieces_as_it_went_in() -> None:
    messages = [
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm" * 100_000,
            "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": '{"a":"' + "b" * 200_000 + '"}'}},
                {"function": {"name": "g"}},
            ],
        },
        {"role": "user", "content": "你" * 200_000, "name": "n"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": ""}],
        },
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    request = msgspec.json.decode(json.dumps({"model": "m", "messages": messages}), type=ChatRequest)
    assert unpacked(packed(request), ChatRequest) == request


async def test_large_bodies_get_the_same_errors_as_small_ones(rig: RouterRig) -> None:
    rig.dispatcher.context = 4096
    broken: list[tuple[str, dict[str, Any] | bytes]] = [
        ("completions", {"model": BASE, "prompt": "a", "n": "x"}),
        ("completions", {"model": BASE, "prompt": [1, "a"]}),
        ("completions", {"model": BASE, "prompt": ["a", 1]}),
        ("completions", {"model": BASE, "prompt": [2**70]}),
        ("completions", {"model": BASE}),
        ("completions", {"model": BASE, "prompt": "a", "suffix": "s"}),
        ("completions", {"model": "unknown", "prompt": "a"}),
        ("chat/completions", {"model": BASE, "messages": []}),
        ("chat/completions", {"model": BASE, "messages": [{"role": "absent", "content": "a"}]}),
        ("completions", b'{"model": "a", "prompt": "\xff"'),
        ("completions", b'{"model": ' + b"[" * 5000),
    ]
    async with rig.client() as client:
        for route, fields in broken:
            small = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
            large = small.replace(b"{", b"{" + b" " * MAX_BYTES_ON_LOOP, 1)
            errors = []
            for content in (small, large):
                response = await client.post(f"/v1/{route}", content=content)
                assert 400 <= response.status_code < 500, response.text
                errors.append((response.status_code, response.json()["error"]))
            assert errors[0][1].pop("message")[:20] == errors[1][1].pop("message")[:20]
            assert errors[0] == errors[1]


@pytest.fixture
async def reader() -> BodyReader:
    return BodyReader(64 * MIB, Metrics(), PATIENT)


async def test_a_decoding_process_that_dies_fails_one_body(reader: BodyReader) -> None:
    client = Client()
    client.send(body_of(MIB), more=False)
    assert len((await read(reader, client)).prompt) == MIB
    (process,) = reader._decoder._processes._idle
    process.kill()
    await asyncio.to_thread(process.wait)
    client = Client()
    client.send(body_of(MIB), more=False)
    assert len((await read(reader, client)).prompt) == MIB
    assert reader._decoder._processes._idle != [process]


async def test_a_request_that_is_given_up_while_it_is_decoded(reader: BodyReader) -> None:
    client = Client()
    client.send(b'{"model":"m","tools":' + b"[" + b",".join([b"[]"] * 2_000_000) + b"]}", more=False)
    task = asyncio.create_task(read(reader, client))
    await eventually_in_loop(lambda: reader._turns.num_here("acme") == 1)
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert reader.budget.num_held == 0
    client = Client()
    client.send(body_of(MIB), more=False)
    async with asyncio.timeout(PATIENCE_S):
        assert len((await read(reader, client)).prompt) == MIB
