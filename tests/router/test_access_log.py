"""One line for each request, with what is known of it and nothing of its content."""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from motet.cluster.process_log import JsonLines, TextLines
from motet.router.http.access_log import LOGGER, request_id_of
from motet.router.text.text import TextService
from motet.tests.rigs.patience import eventually_in_loop
from motet.tests.rigs.router_rig import BASE, HEADERS, RouterRig, failing, serving, text_service

MARK = "xMARKx"
CHAT = {"model": BASE, "messages": [{"role": "user", "content": MARK}]}


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService, caplog: pytest.LogCaptureFixture) -> RouterRig:
    caplog.set_level(logging.DEBUG)
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids("the quick brown fox")
    rig.registry.add("acme", "pirate")
    return rig


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.name == LOGGER]


async def test_a_line_describes_an_answer(rig: RouterRig, caplog: pytest.LogCaptureFixture) -> None:
    async with rig.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-17"})
    (line,) = lines(caplog)
    assert answer.headers.get_list("x-request-id") == ["mine-17"] == [line["request_id"]]
    assert {name: line[name] for name in ("tenant", "method", "route", "status", "model", "finish")} == {
        "tenant": "acme",
        "method": "POST",
        "route": "POST /v1/chat/completions",
        "status": 200,
        "model": BASE,
        "finish": "stop:1",
    }
    usage = answer.json()["usage"]
    reported = line["prompt_tokens"], line["completion_tokens"], line["sent_bytes"]
    assert reported == (usage["prompt_tokens"], usage["completion_tokens"], len(answer.content))
    assert 0 < line["first_token_s"] <= line["duration_s"]
    assert "stream" not in line and "cancelled" not in line and "error" not in line
    assert [request.request_id for request in rig.dispatcher.submitted] == ["mine-17"]


async def test_the_answers_id_is_recognized_by_what_is_random_in_it(
    rig: RouterRig, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of it is a hash of the prompt, by which a reader of the log could try prompts."""
    async with rig.client() as client:
        ids = [(await client.post("/v1/chat/completions", json=CHAT)).json()["id"] for _ in range(2)]
    heads = {one.removesuffix(line["answer"]) for one, line in zip(ids, lines(caplog), strict=True)}
    reported = [line["answer"] for line in lines(caplog)]
    assert len(heads) <= 2 and reported[0] != reported[1] and all(len(one) == 21 for one in reported)
    assert [line["answer"] in answer for line, answer in zip(lines(caplog), ids, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error", "route"),
    [
        ("GET", f"/{MARK}?{MARK}", None, 404, "not_found", "unknown"),
        ("PUT", "/v1/models", None, 405, "method_not_allowed", "unknown"),
        ("GET", f"/v1/models/{MARK}", None, 404, "model_not_found", "GET /v1/models/{model:path}"),
        ("GET", f"/v1/adapters/{MARK}", None, 404, "adapter_not_found", "GET /v1/adapters/{name}"),
        ("POST", "/v1/completions", {"model": MARK, "prompt": MARK}, 404, "model_not_found", None),
        ("POST", "/v1/completions", {"model": BASE, "prompt": MARK, "n": MARK}, 400, None, None),
        ("POST", "/v1/chat/completions", {"model": MARK * 60_000}, 413, "request_too_large", None),
        ("POST", "/v1/chat/completions", {"model": BASE, "messages": [{"role": MARK}]}, 400, None, None),
    ],
)
async def test_a_refusal_has_its_code_and_its_id_and_no_word_of_the_client(
    rig: RouterRig,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    body: Any,
    status: int,
    error: str | None,
    route: str | None,
) -> None:
    async with rig.client() as client:
        answer = await client.request(method, path, json=body, headers={"x-request-id": "mine-17", "user-agent": MARK})
    (line,) = lines(caplog)
    assert answer.headers.get_list("x-request-id") == ["mine-17"] == [line["request_id"]]
    assert (line["status"], line["error"]) == (answer.status_code, answer.json()["error"]["code"])
    assert line["status"] == status and line["error"] == (error or line["error"])
    assert line["route"] == (route or f"{method} {path}")
    assert MARK not in shown(caplog)


async def test_unknown_keys_have_no_owner_and_are_not_shown(rig: RouterRig, caplog: pytest.LogCaptureFixture) -> None:
    async with rig.client() as client:
        for headers in ({"Authorization": f"Bearer {MARK}"}, {"Authorization": MARK}):
            await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert [(line["status"], line["error"]) for line in lines(caplog)] == [(401, "invalid_api_key")] * 2
    assert all("tenant" not in line for line in lines(caplog))
    assert MARK not in shown(caplog) and "key-of-acme" not in shown(caplog)


async def test_a_stream_has_its_line_when_it_has_ended(rig: RouterRig, caplog: pytest.LogCaptureFixture) -> None:
    async with rig.client() as client:
        body = {"model": "pirate", "prompt": MARK, "stream": True, "n": 2, "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body)
        rig.dispatcher.script = failing("internal", MARK, after=rig.ids("the"))
        broken = await client.post("/v1/completions", json=body | {"n": 1})
    whole, failed = lines(caplog)
    assert whole["stream"] and (whole["model"], whole["finish"]) == ("pirate", "length:2")
    assert (whole["completion_tokens"], whole["sent_bytes"]) == (4, len(answer.content))
    assert (failed["status"], failed["error"], failed["finish"]) == (200, "internal_error", "unfinished:1") or (
        failed["error"] == "internal"
    )
    for response, line in ((answer, whole), (broken, failed)):
        assert response.headers.get_list("x-request-id") == [line["request_id"]]
    assert MARK not in shown(caplog)


async def test_a_client_that_leaves_is_reported(rig: RouterRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.dispatcher.hangs, rig.dispatcher.answer = True, []
    rig.dispatcher.script = lambda request: []
    body = json.dumps({"model": BASE, "prompt": MARK, "stream": True}).encode()
    inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if inbox:
            return inbox.pop(0)
        await eventually_in_loop(lambda: rig.dispatcher.submitted)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    headers = [(b"authorization", HEADERS["Authorization"].encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await rig.app(scope, receive, send)
    (line,) = lines(caplog)
    assert (line["status"], line["cancelled"], line["finish"]) == (499, True, "unfinished:1")
    assert "first_token_s" not in line


async def test_without_the_access_log_there_is_none(
    tmp_path: Path, text: TextService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    rig = RouterRig(tmp_path, text, access_log=False)
    async with rig.client() as client:
        assert (await client.get("/v1/models")).headers["x-request-id"]
        assert (await client.get("/nowhere")).headers["x-request-id"]
    assert lines(caplog) == []


@pytest.mark.parametrize(
    "given", [b"", b"a" * 129, b"a b", b'"', b"\\", b"\xff", b"a\nb", b"\x1b[31m", b"\xe2\x80\xa8"]
)
def test_an_odd_id_is_replaced(given: bytes) -> None:
    assert uuid.UUID(request_id_of([(b"host", b"a"), (b"x-request-id", given)]))


def test_a_good_id_is_kept_and_two_are_none() -> None:
    assert request_id_of([(b"x-request-id", b"1-678-abc/+=:@~._")]) == "1-678-abc/+=:@~._"
    assert uuid.UUID(request_id_of([(b"x-request-id", b"a"), (b"x-request-id", b"b")]))
    assert request_id_of([]) != request_id_of([])


def test_every_answer_of_a_server_has_the_id(rig: RouterRig) -> None:
    """Those included that Starlette makes by itself."""
    with serving(rig.app) as url, httpx.Client(base_url=url, headers=HEADERS, trust_env=False) as client:
        for method, path in (
            ("GET", "/health"),
            ("HEAD", "/health"),
            ("OPTIONS", "/v1/models"),
            ("GET", "//"),
            ("PATCH", "/"),
        ):
            answer = client.request(method, path, headers={"x-request-id": "mine-17"})
            assert answer.headers.get_list("x-request-id") == ["mine-17"], (method, path)


def shown(caplog: pytest.LogCaptureFixture) -> str:
    """All lines, of all levels and loggers of motet, as routers write them."""
    records = [record for record in caplog.records if record.name.startswith("motet.")]
    return "\n".join(form.format(record) for record in records for form in (JsonLines({}), TextLines()))
