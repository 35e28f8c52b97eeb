"""What clients and proxies rely on beside the answers themselves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai._streaming import SSEDecoder
from starlette.types import Message

from motet.router.http import list_page
from motet.router.http.list_page import PageRequest
from motet.router.openai import generation_response
from motet.router.text.text import TextService
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.router_rig import BASE, CONTEXT, HEADERS, RouterRig, events_of, failing, text_service
from motet.tests.rigs.router_rig import completed as post
from motet.workers.wire.messages import SequenceError, SequenceUpdate

ANSWER = "the quick brown fox"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


async def get(rig: RouterRig, path: str) -> Any:
    async with rig.client() as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("error", "status", "retried"),
    [
        (SequenceError("timeout", "it passed"), 408, False),
        (SequenceError("overloaded", "too short for any gang", None, "timeout"), 429, False),
        (SequenceError("overloaded", "too short for this queue", 3.0, "timeout"), 429, True),
        (SequenceError("overloaded", "no gang", None, "no_gang"), 429, True),
    ],
)
async def test_what_time_cannot_mend_is_not_retried(
    rig: RouterRig, error: SequenceError, status: int, retried: bool
) -> None:
    rig.dispatcher.script = lambda request: [SequenceUpdate(1, error=error)]
    response = await post(rig)
    assert response.status_code == status
    assert response.headers.get("x-should-retry") == (None if retried else "false")
    assert ("retry-after" in response.headers) == retried


async def test_too_long_is_reported_in_the_words_that_clients_look_for(rig: RouterRig) -> None:
    start = f"This model's maximum context length is {CONTEXT} tokens. However, "
    for fields in (
        {"prompt": [5] * (CONTEXT + 1)},
        {"prompt": [5] * CONTEXT},
        {"prompt": [5], "max_tokens": CONTEXT},
        {"prompt": "word " * 20_000},
    ):
        error = (await post(rig, **fields)).json()["error"]
        assert error["message"].startswith(start) and error["code"] == "context_length_exceeded"
    error = (await post(rig, prompt=[5] * 10, max_tokens=CONTEXT)).json()["error"]
    assert f"you requested {CONTEXT + 10} tokens (10 in the prompt, {CONTEXT} in the completion)" in error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/pirate", "/v1/adapters", "/v1/adapters/pirate", "/health"])
async def test_a_slash_at_the_end_changes_nothing(rig: RouterRig, path: str) -> None:
    """A redirect would name http://, also where clients come by https://."""
    rig.registry.add("acme", "pirate")
    with_slash, without = await get(rig, f"{path}/"), await get(rig, path)
    assert with_slash.status_code == without.status_code == 200
    assert with_slash.content == without.content


async def test_a_completion_with_a_slash_at_the_end_of_its_path_is_answered(rig: RouterRig) -> None:
    async with rig.client() as client:
        body = {"model": BASE, "prompt": "a", "max_tokens": 1}
        assert (await client.post("/v1/completions/", json=body, headers=HEADERS)).status_code == 200
        assert (await client.post("/v1/completions//", json=body, headers=HEADERS)).status_code == 404


async def test_what_clients_ask_for_makes_no_labels(rig: RouterRig) -> None:
    for number in range(20):
        assert (await get(rig, f"/unknown/{number}")).status_code == 404
        await get(rig, f"/v1/adapters/name-{number}")
    assert (await get(rig, "/v1/completions")).status_code == 405
    reported = (await get(rig, "/metrics")).text
    assert 'motet_requests_total{route="unknown",status="404"} 20.0' in reported
    assert 'motet_requests_total{route="unknown",status="405"} 1.0' in reported
    assert 'motet_requests_total{route="GET /v1/adapters/{name}",status="404"} 20.0' in reported
    assert "name-3" not in reported


@pytest.mark.parametrize("path", ["/v1/models", "/v1/adapters"])
async def test_pages_of_lists(rig: RouterRig, path: str) -> None:
    for number in range(7):
        rig.registry.add("acme", f"voice-{number}")
    key = "id" if path == "/v1/models" else "name"
    all_of_them = [entry[key] for entry in (await get(rig, path)).json()["data"]]
    assert len(all_of_them) == (8 if key == "id" else 7)
    found: list[str] = []
    more = True
    while more:
        after = f"&after={found[-1]}" if found else ""
        page = (await get(rig, f"{path}?limit=3{after}")).json()
        names = [entry[key] for entry in page["data"]]
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", names[0], names[-1])
        found += names
        more = page["has_more"]
        assert len(names) == 3 or not more
    assert found == all_of_them
    assert [entry[key] for entry in (await get(rig, f"{path}?after={found[4]}")).json()["data"]] == found[5:]
    end = (await get(rig, f"{path}?after={found[-1]}")).json()
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)
    assert [entry[key] for entry in (await get(rig, f"{path}?after=")).json()["data"]] == all_of_them
    for bad in ("limit=0", "limit=-1", "limit=x", "limit=1e9", "limit=99999999999", "limit=²"):
        response = await get(rig, f"{path}?{bad}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, bad.split("=")[0])


@pytest.mark.parametrize("path", ["/v1/models", "/v1/adapters"])
async def test_a_list_without_a_limit_is_a_page(rig: RouterRig, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageRequest.__init__, "__defaults__", (5, None))
    monkeypatch.setattr(list_page, "MAX_LIMIT", 5)
    for number in range(12):
        rig.registry.add("acme", f"voice-{number:02}")
    page = (await get(rig, path)).json()
    sizes, last = [len(page["data"])], page["last_id"]
    while page["has_more"]:
        page = (await get(rig, f"{path}?after={last}")).json()
        sizes.append(len(page["data"]))
        last = page["last_id"]
    assert sizes == [5, 5, 3 if path == "/v1/models" else 2]


class Reader:
    """A client of a stream that says what came, message by message."""

    def __init__(self, rig: RouterRig, body: bytes, *, is_ready: bool = True) -> None:
        """`is_ready`: it takes in the headers at once, and not first when `ready` is set."""
        self.messages: list[Message] = []
        self.num_begun = 0  # messages that were given to it
        self.ready = asyncio.Event()
        if is_ready:
            self.ready.set()
        self._ended = asyncio.Event()
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]
        path = "/v1/completions"
        scope: Any = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"root_path": "", "headers": [(b"authorization", HEADERS["Authorization"].encode())]}
        self.task = asyncio.create_task(rig.app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.num_begun += 1
        if message["type"] == "http.response.start":
            await self.ready.wait()
        else:
            assert self.messages, "a body before its headers"
            assert len(self.messages) == 1 or self.messages[-1]["more_body"], "something follows on the end"
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def leave(self) -> None:
        self._ended.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


async def test_a_stream_that_waits_shows_that_it_is_there(rig: RouterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_response, "HEADERS_AFTER_S", 0.02)
    monkeypatch.setattr(generation_response, "HEARTBEAT_S", 0.02)
    rig.dispatcher.hangs = True
    rig.dispatcher.script = lambda request: []
    reader = Reader(rig, b'{"model":"%s","prompt":"a","stream":true}' % BASE.encode())
    await eventually_in_loop(lambda: len(reader.messages) > 4)
    assert (reader.messages[0]["type"], reader.messages[0]["status"]) == ("http.response.start", 200)
    assert set(reader.body.split(b"\n\n")) == {b": waiting", b""}
    await reader.leave()
    assert rig.dispatcher.streams[0].cancelled.is_set()


async def test_heartbeats_change_nothing_of_what_is_reported(rig: RouterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_response, "HEADERS_AFTER_S", 0.01)
    monkeypatch.setattr(generation_response, "HEARTBEAT_S", 0.01)
    fields: dict[str, Any] = {"stream": True, "echo": True, "stream_options": {"include_usage": True}, "n": 2}
    quiet = [event.chunk for event in events_of((await post(rig, **fields)).content)[:-1]]
    submit = rig.dispatcher.submit

    def slow(*args: Any, **kwargs: Any) -> Any:
        return Slow(submit(*args, **kwargs))

    class Slow:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        async def __aiter__(self) -> Any:
            await asyncio.sleep(0.05)
            async for update in self._stream:
                yield update
                await asyncio.sleep(0.03)

    monkeypatch.setattr(rig.dispatcher, "submit", slow)
    content = (await post(rig, **fields)).content
    assert content.count(b": waiting\n") > 3
    waited = [event.chunk for event in events_of(content)[:-1]]
    as_openai_reads = [event.data for event in SSEDecoder().iter_bytes(iter([content]))]
    assert as_openai_reads == [event.data for event in events_of(content)]

    def reported(chunks: list[Any]) -> list[Any]:
        return sorted(str({**chunk, "id": "", "created": 0}) for chunk in chunks)

    assert reported(waited) == reported(quiet)


@pytest.mark.parametrize(("fails", "headers_after_s"), [(False, 0.05), (True, 0.0)])
async def test_headers_that_take_their_time_are_followed_by_what_belongs_there(
    rig: RouterRig, monkeypatch: pytest.MonkeyPatch, fails: bool, headers_after_s: float
) -> None:
    """A token comes before the headers are to go out by themselves, or an error when they are going out."""
    monkeypatch.setattr(generation_response, "HEADERS_AFTER_S", headers_after_s)
    rig.dispatcher.hangs = True
    answer = SequenceUpdate(1, rig.ids("the"), finish_reason="length")
    rig.dispatcher.script = lambda request: [] if fails else [answer]
    reader = Reader(rig, b'{"model":"%s","prompt":"a","stream":true}' % BASE.encode(), is_ready=False)
    await eventually_in_loop(lambda: reader.num_begun > 0)
    await asyncio.sleep(0.1)
    if fails:
        rig.dispatcher.streams[0].cancelled.set()  # it ends without having said why
        await asyncio.sleep(0.1)
    reader.ready.set()
    await asyncio.wait_for(reader.task, PATIENCE_S)
    assert reader.body.endswith(b"data: [DONE]\n\n") != fails


@pytest.mark.parametrize(("kind", "status"), [("overloaded", 429), ("invalid_request", 400)])
async def test_an_early_refusal_of_a_stream_has_its_own_status(rig: RouterRig, kind: str, status: int) -> None:
    rig.dispatcher.script = failing(kind, "no")
    assert (await post(rig, stream=True)).status_code == status


async def test_a_late_refusal_is_the_last_event(rig: RouterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_response, "HEADERS_AFTER_S", 0.0)
    refused, submit = asyncio.Event(), rig.dispatcher.submit

    class Late:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        async def __aiter__(self) -> Any:
            await refused.wait()
            yield SequenceUpdate(1, error=SequenceError("overloaded", "it waited too long", 3.0, "waited"))

    monkeypatch.setattr(rig.dispatcher, "submit", lambda *args, **options: Late(submit(*args, **options)))
    reader = Reader(rig, b'{"model":"%s","prompt":"a","stream":true}' % BASE.encode())
    await eventually_in_loop(lambda: len(reader.messages) > 0)
    refused.set()
    await asyncio.wait_for(reader.task, PATIENCE_S)
    assert reader.messages[0]["status"] == 200  # it has gone out before
    assert not reader.messages[-1]["more_body"]
    events = [event for event in reader.body.split(b"\n\n") if event and not event.startswith(b":")]
    (data,) = [line for event in events for line in event.split(b"\n") if line.startswith(b"data: ")]
    error = json.loads(data.removeprefix(b"data: "))["error"]
    assert (error["code"], error["message"]) == ("overloaded", "it waited too long")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("word", ["你", "🎉", "é", "a"])
async def test_an_echo_that_ends_inside_of_a_character(rig: RouterRig, word: str, stream: bool) -> None:
    """However a text is cut into prompt and completion, echo and completion together are the text."""
    ids = rig.ids(f"hello {word} fox")
    for cut in range(1, len(ids)):
        rig.dispatcher.answer = ids[cut:]
        response = await post(rig, prompt=ids[:cut], echo=True, stream=stream, max_tokens=100)
        if stream:
            chunks = [event.chunk for event in events_of(response.content)[:-1]]
            reported = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        else:
            reported = response.json()["choices"][0]["text"]
        assert reported == f"hello {word} fox", cut


async def test_an_echo_of_a_character_that_nothing_ends(rig: RouterRig) -> None:
    ids = rig.ids("hello 🎉")[:-1]
    for answer in ([], rig.ids(" fox")):
        rig.dispatcher.answer = answer
        reported = (await post(rig, prompt=ids, echo=True)).json()["choices"][0]["text"]
        assert reported.startswith("hello ") and "�" in reported and reported.endswith("fox" if answer else "�")
