"""Routes of operations and models, and what needs a real server: streaming, disconnects, OpenAI's client."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from motet.router.text.text import TextService
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.router_rig import BASE, CONTEXT, HEADERS, OPERATORS, RouterRig, failing, serving, text_service
from motet.workers.wire.messages import SequenceUpdate

ANSWER = "the quick brown fox 你好 jumps"
KEY_HEADER = HEADERS["Authorization"].encode()
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text, ready_interval_s=1000.0, ready_timeout_s=PATIENCE_S)
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


@pytest.fixture
def url(rig: RouterRig) -> Iterator[str]:
    with serving(rig.app) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key-of-acme", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


async def get(rig: RouterRig, path: str) -> httpx.Response:
    async with rig.client() as client:
        return await client.get(path)


async def test_health(rig: RouterRig) -> None:
    rig.dispatcher.is_connected = False
    assert (await get(rig, "/health")).status_code == 200


async def test_ready_is_proved_by_a_token_once(rig: RouterRig) -> None:
    assert (await get(rig, "/ready")).status_code == 200
    assert (await get(rig, "/ready")).status_code == 200
    assert [request.sampling.max_tokens for request in rig.dispatcher.submitted] == [1]
    rig.dispatcher.is_connected = False
    response = await get(rig, "/ready")
    assert response.status_code == 503
    assert "no gang" in response.json()["error"]["message"]


async def test_a_clients_token_is_proof_too(rig: RouterRig) -> None:
    async with rig.client() as client:
        await client.post("/v1/completions", json={"model": BASE, "prompt": "hello"})
        assert (await client.get("/ready")).status_code == 200
    assert len(rig.dispatcher.submitted) == 1


async def test_not_ready_says_why(rig: RouterRig) -> None:
    rig.dispatcher.script = failing("overloaded", "too many")
    response = await get(rig, "/ready")
    assert response.status_code == 503
    assert "too many" in response.json()["error"]["message"]
    rig.dispatcher.script = lambda request: []
    rig.dispatcher.hangs = True
    rig.config.now = replace(rig.config.now, ready_timeout_s=0.5)
    response = await get(rig, "/ready")
    assert "no token was served" in response.json()["error"]["message"]
    assert rig.dispatcher.streams[-1].cancelled.is_set()


async def test_metrics(rig: RouterRig) -> None:
    async with rig.client() as client:
        await client.post("/v1/completions", json={"model": BASE, "prompt": "hello"})
        await client.post("/v1/completions", json={"model": "absent", "prompt": "hello"})
        lines = (await client.get("/metrics")).text.splitlines()
    assert 'motet_requests_total{route="POST /v1/completions",status="200"} 1.0' in lines
    assert 'motet_requests_total{route="POST /v1/completions",status="404"} 1.0' in lines
    num_tokens = float(len(rig.ids(ANSWER)) + 1)
    assert f"motet_completion_tokens_total {num_tokens}" in lines
    assert f"motet_prompt_tokens_total {float(len(rig.ids('hello')))}" in lines
    assert "motet_first_token_seconds_count 1.0" in lines
    assert f"motet_inter_token_seconds_count {num_tokens - 1}" in lines
    assert 'motet_inter_token_seconds_bucket{le="+Inf"} ' + str(num_tokens - 1) in lines
    assert 'motet_engine_running{gang="gang-1"} 3.0' in lines
    assert 'motet_engine_generated_tokens_total{gang="gang-1"} 17.0' in lines
    assert "motet_connected_gangs 1.0" in lines
    assert "motet_open_generations 0.0" in lines


@pytest.mark.parametrize("path", ["/status", "/metrics"])
async def test_operators_routes_ask_for_the_operators_key(rig: RouterRig, path: str) -> None:
    transport = httpx.ASGITransport(app=rig.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for headers in (
            {},
            HEADERS,
            {"Authorization": "Bearer none"},
            {"Authorization": "Bearer \u00e9".encode("latin-1")},
        ):
            refused = await client.get(path, headers=headers)  # type: ignore[arg-type]
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["WWW-Authenticate"] == "Bearer"
        assert (await client.get(path, headers=OPERATORS)).status_code == 200
        assert (await client.get("/v1/models", headers=OPERATORS)).status_code == 401  # no tenant's
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200


async def test_status(rig: RouterRig) -> None:
    status = (await get(rig, "/status")).json()
    assert status["model"] == BASE
    assert status["redis_connected"] is True
    assert [gang["gang_id"] for gang in status["gangs"]] == ["gang-1"]
    assert (status["gangs"][0]["model"], status["gangs"][0]["load"]["num_running"]) == (BASE, 3)
    assert "/a/folder" not in json.dumps(status)
    assert status["load"]["num_running"] == 3
    rig.dispatcher.num_gangs = 2
    assert len((await get(rig, "/status")).json()["gangs"]) == 2
    rig.dispatcher.is_connected = False
    status = (await get(rig, "/status")).json()
    assert (status["gangs"], status["load"]) == ([], None)


async def test_unknown_routes_answer_in_openais_shape(rig: RouterRig) -> None:
    async with rig.client() as client:
        unknown = await client.get("/v1/nothing")
        wrong_method = await client.get("/v1/completions")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (wrong_method.status_code, wrong_method.json()["error"]["code"]) == (405, "method_not_allowed")


def test_models(rig: RouterRig, client: openai.OpenAI) -> None:
    rig.registry.add("acme", "pirate")
    rig.registry.add("zenith", "secret")
    assert [model.id for model in client.models.list()] == [BASE, "pirate"]
    base, pirate = client.models.retrieve(BASE), client.models.retrieve("pirate")
    assert (base.id, base.to_dict()["max_model_len"]) == (BASE, CONTEXT)
    assert (pirate.owned_by, pirate.to_dict()["parent"], pirate.created) == ("acme", BASE, 1700000000)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("secret")


def test_the_official_client_completes(rig: RouterRig, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=BASE, prompt="hello", logprobs=1, n=2)
    assert [choice.text for choice in answer.choices] == [ANSWER] * 2
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.token_logprobs == [-0.5] * len(rig.ids(ANSWER))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * (len(rig.ids(ANSWER)) + 1)
    streamed = client.completions.create(model=BASE, prompt="hello", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == ANSWER


def test_the_official_client_chats(rig: RouterRig, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=BASE, messages=HELLO, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert b"".join(bytes(token.bytes or []) for token in content) == ANSWER.encode()
    streamed = client.chat.completions.create(
        model=BASE, messages=HELLO, stream=True, stop="jumps", stream_options={"include_usage": True}
    )
    *chunks, last = streamed
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER.removesuffix("jumps")
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None


def test_the_official_client_raises_its_errors(rig: RouterRig, url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="absent", messages=HELLO)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=BASE, prompt="hello", max_tokens=CONTEXT)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "max_tokens")
    rig.dispatcher.script = failing("overloaded", "too many")
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=BASE, prompt="hello", stream=True)
    rig.dispatcher.script = failing("gang_lost", "the gang died", after=rig.ids("the"))
    with pytest.raises(openai.APIError, match="the gang died"):
        list(client.completions.create(model=BASE, prompt="hello", stream=True))


def test_tokens_arrive_as_they_come(rig: RouterRig, client: openai.OpenAI) -> None:
    rig.dispatcher.script = lambda request: [SequenceUpdate(1, [token_id]) for token_id in rig.ids("the")]
    rig.dispatcher.hangs = True
    with client.completions.create(model=BASE, prompt="hello", stream=True) as stream:
        assert next(iter(stream)).choices[0].text == "the"
        assert not rig.dispatcher.streams[0].cancelled.is_set()
    eventually(rig.dispatcher.streams[0].cancelled.is_set)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["", "the"])
def test_a_client_that_goes_away_cancels(rig: RouterRig, url: str, n: int, stream: bool, first: str) -> None:
    rig.dispatcher.script = lambda request: [SequenceUpdate(1, [token_id]) for token_id in rig.ids(first)]
    rig.dispatcher.hangs = True
    body = json.dumps({"model": BASE, "prompt": "hello", "n": n, "stream": stream}).encode()
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=PATIENCE_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nAuthorization: {HEADERS['Authorization']}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: len(rig.dispatcher.streams) == n)
        if stream and first:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    eventually(lambda: all(fake.cancelled.is_set() for fake in rig.dispatcher.streams))
    eventually(lambda: 'route="POST /v1/completions"' in httpx.get(f"{url}/metrics", headers=OPERATORS).text)
    lines = httpx.get(f"{url}/metrics", headers=OPERATORS).text.splitlines()
    status = 200 if stream and first else 499
    assert f'motet_requests_total{{route="POST /v1/completions",status="{status}"}} 1.0' in lines
    assert "motet_open_generations 0.0" in lines


async def test_a_server_that_cannot_report_disconnects_is_an_error(rig: RouterRig) -> None:
    body = json.dumps({"model": BASE, "prompt": "hello"}).encode()
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"authorization", KEY_HEADER)]}
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop()  # IndexError once the body is read

    async def send(message: Any) -> None:
        sent.append(message)

    rig.dispatcher.script = lambda request: []
    rig.dispatcher.hangs = True
    with pytest.raises(IndexError):
        await rig.app(scope, receive, send)
    assert sent[0]["status"] == 500
    assert rig.dispatcher.streams[0].cancelled.is_set()


def test_a_slow_reader_does_not_hold_up_others(rig: RouterRig, url: str) -> None:
    rig.dispatcher.script = lambda request: [
        *(SequenceUpdate(1, rig.ids("the quick brown fox ") * 50) for _ in range(5000)),
        SequenceUpdate(1, [1], None, "stop"),
    ]
    body = json.dumps({"model": BASE, "prompt": "hello", "stream": True}).encode()
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=PATIENCE_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nAuthorization: {HEADERS['Authorization']}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: rig.dispatcher.streams and rig.dispatcher.streams[0].num_read > 10)
        seen = -1
        while seen != (seen := rig.dispatcher.streams[0].num_read):
            time.sleep(0.2)
        assert seen < 5000  # the server's buffers are full, and memory is not filled instead
        assert httpx.get(f"{url}/health").status_code == 200
    eventually(rig.dispatcher.streams[0].cancelled.is_set)


def test_concurrent_streams_do_not_mix(rig: RouterRig, client: openai.OpenAI) -> None:
    def script(request: Any) -> list[SequenceUpdate]:
        token_ids = rig.ids(f"fox {request.sampling.seed} ") * 5
        return [*(SequenceUpdate(1, [i]) for i in token_ids), SequenceUpdate(1, [1], None, "stop")]

    rig.dispatcher.script = script
    answers: dict[int, str] = {}

    def ask(seed: int) -> None:
        stream = client.completions.create(model=BASE, prompt="hello", seed=seed, stream=True)
        answers[seed] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert answers == {seed: f"fox {seed} " * 5 for seed in range(16)}
