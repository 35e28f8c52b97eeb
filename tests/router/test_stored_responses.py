"""Stored responses: what is kept, how a conversation goes on from it, who sees it, and that nothing is left."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter
from redis.exceptions import OutOfMemoryError

from motet.adapters.registry.tenants.records import KeyRecord, TenantRecord
from motet.router.batches.stored_responses import MAX_RECALLED
from motet.router.http.auth import Identity
from motet.router.http.errors import ApiError, NoSuchResponse
from motet.router.responses.response_chat import MAX_STORED_ITEMS, input_page, response_chat
from motet.router.responses.response_schema import InputItem, KeptConversation, ResponseChat, ResponsesRequest
from motet.router.text.text import TextService
from motet.tests.rigs.batch_client import BatchClient, line
from motet.tests.rigs.loop_holds import measured_holds
from motet.tests.rigs.real_front import (
    ASKER_KEY,
    BADGER_KEY,
    OPERATOR_KEY,
    OWNER,
    OWNER_KEY,
    WOMBAT_KEY,
    RealFront,
    key_without,
    real_front,
)
from motet.tests.rigs.router_rig import BASE, events_of, text_service
from motet.tests.router.test_loop_holds import ATTEMPTS, MOST_S

PATH: Final = "/v1/responses"
ANSWER: Final = "hello world"
MISSING: Final = "resp_" + "A" * 36
ITEM: Final[TypeAdapter[Any]] = TypeAdapter(ResponseItem)


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def front(redis_url: str, tmp_path: Path, text: TextService) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text) as front:
        yield front
        await front.batches.responses.wait()


@pytest.fixture
def owner(front: RealFront) -> BatchClient:
    return BatchClient(front)


def set_config(front: RealFront, **fields: Any) -> None:
    front.config.now = replace(front.config.now, **fields)


async def respond(client: BatchClient, **fields: Any) -> Any:
    return await client.done("POST", PATH, json={"model": BASE, "input": "hello", **fields})


async def refused(client: BatchClient, **fields: Any) -> tuple[int, str]:
    answer = await client.ask("POST", PATH, json={"model": BASE, "input": "hello", **fields})
    return answer.status_code, answer.json()["error"]["code"]


async def streamed(client: BatchClient, **fields: Any) -> list[Any]:
    answer = await client.ask("POST", PATH, json={"model": BASE, "input": "hello", "stream": True, **fields})
    assert answer.is_success, answer.text
    events = [json.loads(event.data) for event in events_of(answer.content)]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


async def stored_bytes(front: RealFront) -> int:
    return (await front.registry.stored.of(OWNER, ""))[0].stored_bytes


def on_disk(front: RealFront) -> list[Path]:
    return [path for path in (front.folder / "responses").rglob("*") if path.is_file()]


async def left_in_redis(front: RealFront) -> list[str]:
    places = await front.redis.zrange("motet:{registry}:file_ends", 0, -1)
    return [*places, *[key async for key in front.redis.scan_iter("motet:{registry}:responses:*")]]


def last_prompt(front: RealFront) -> list[int]:
    return list(front.dispatcher.submitted[-1].prompt_token_ids)


async def test_nothing_is_stored_unless_operators_say_so(front: RealFront, owner: BatchClient) -> None:
    set_config(front, response_days=0)
    made = await respond(owner)
    assert (made["store"], made["previous_response_id"]) == (False, None)
    assert (await owner.ask("GET", f"{PATH}/{made['id']}")).status_code == 404
    for fields in ({"store": True}, {"previous_response_id": made["id"]}):
        assert await refused(owner, **fields) == (400, "unsupported_parameter")
    assert not on_disk(front) and not await left_in_redis(front)


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_kept_as_it_was_answered(front: RealFront, owner: BatchClient, stream: bool) -> None:
    before = await stored_bytes(front)
    fields: dict[str, Any] = {"metadata": {"a": "b"}, "instructions": "be short", "max_output_tokens": 2}
    fields["include"] = ["message.output_text.logprobs"]
    made = (await streamed(owner, **fields))[-1]["response"] if stream else await respond(owner, **fields)
    assert made["store"] is True and made["status"] == "incomplete"
    one = f"{PATH}/{made['id']}"
    assert await owner.done("GET", one) == made
    Response.model_validate(await owner.done("GET", one))
    (path,) = on_disk(front)
    assert await stored_bytes(front) == before + path.stat().st_size
    refusal = await owner.ask("GET", one, params={"stream": "true"})
    assert refusal.json()["error"]["param"] == "stream"
    assert await owner.done("DELETE", one) == {"id": made["id"], "object": "response", "deleted": True}
    for method, where in (("GET", one), ("GET", f"{one}/input_items"), ("DELETE", one)):
        answer = await owner.ask(method, where)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert await stored_bytes(front) == before
    assert not on_disk(front) and not await left_in_redis(front)


async def test_store_false_keeps_nothing(front: RealFront, owner: BatchClient) -> None:
    made = await respond(owner, store=False)
    assert made["store"] is False
    assert not on_disk(front)
    for unknown in (made["id"], MISSING, "", "resp_1", "../x", "\ud800", "a" * 128):
        body = json.dumps({"model": BASE, "input": "a", "previous_response_id": unknown})
        answer = await owner.ask("POST", PATH, content=body)
        if unknown != "\ud800":  # which is no text
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert answer.status_code in (400, 404)
    for unknown in ("resp_1", "%ff", "a" * 2000, "%F0%9F%98%80", ".."):
        assert (await owner.ask("GET", f"{PATH}/{unknown}")).status_code in (404, 405)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_as_if_all_items_were_sent(
    front: RealFront, owner: BatchClient, stream: bool
) -> None:
    first = await respond(owner, instructions="not carried over")
    fields = {"input": [{"role": "user", "content": "and"}], "previous_response_id": first["id"]}
    second = (await streamed(owner, **fields))[-1]["response"] if stream else await respond(owner, **fields)
    assert second["previous_response_id"] == first["id"]
    await owner.done("DELETE", f"{PATH}/{first['id']}")  # what comes after it has all of it
    await respond(owner, input="now", previous_response_id=second["id"], instructions="be short")
    continued = last_prompt(front)
    items = [{"role": "user", "content": "hello"}, *first["output"], *fields["input"], *second["output"]]
    await respond(owner, input=[*items, {"role": "user", "content": "now"}], instructions="be short")
    assert last_prompt(front) == continued


async def test_items_are_referred_to_by_their_ids(front: RealFront, owner: BatchClient) -> None:
    first = await respond(owner)
    shown = (await owner.done("GET", f"{PATH}/{first['id']}/input_items"))["data"]
    references = [{"type": "item_reference", "id": one["id"]} for one in (*shown, *first["output"])]
    await respond(owner, input=[*references, {"role": "user", "content": "now"}])
    referred = last_prompt(front)
    await respond(owner, input="now", previous_response_id=first["id"])
    assert last_prompt(front) == referred
    unknown = first["output"][0]["id"]
    for item_id in (unknown[:-1] + "1", f"msg_{MISSING[5:]}_0", "msg_1", "", unknown[:-1] + "i1"):
        answer = await owner.ask(
            "POST", PATH, json={"model": BASE, "input": [{"type": "item_reference", "id": item_id}]}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "response_not_found", "input[0].id")


async def test_what_is_left_out_is_not_stored(front: RealFront, owner: BatchClient) -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "p", "input": "a"}
    output = {"type": "custom_tool_call_output", "call_id": "1", "output": "b"}
    search = {"type": "web_search_call", "id": "ws_1"}
    asks = [{"role": "user", "content": text} for text in ("hello", "now")]
    first = await respond(owner, input=[asks[0], search, call, output, asks[1]])
    shown = (await owner.done("GET", f"{PATH}/{first['id']}/input_items", params={"order": "asc"}))["data"]
    assert [one["type"] for one in shown] == ["message", "custom_tool_call", "custom_tool_call_output", "message"]
    assert (shown[1]["input"], shown[2]["output"]) == ("a", "b")
    await respond(owner, input="more", previous_response_id=first["id"])


async def test_input_items_have_pages_in_either_order(front: RealFront, owner: BatchClient) -> None:
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be short"}]},
        {"role": "user", "content": "one"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two"}, {"type": "refusal", "refusal": "no"}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "5"}]},
        {"role": "user", "content": "three"},
    ]
    made = await respond(owner, input=items)
    where = f"{PATH}/{made['id']}/input_items"
    found = await owner.done("GET", where, params={"order": "asc"})
    assert not found["has_more"]
    data = found["data"]
    for one in data:
        ITEM.validate_python(one)
    assert [one["type"] for one in data] == [item.get("type", "message") for item in items]
    assert [part["type"] for part in data[3]["content"]] == ["output_text", "refusal"]
    assert data[1]["content"] == [{"type": "input_text", "text": "one"}]
    assert (data[4]["arguments"], data[5]["output"]) == ("{}", [{"type": "input_text", "text": "5"}])
    ids, seen, page_of = [one["id"] for one in data], list[str](), dict[str, str]()
    assert len({*ids}) == len(ids)
    while True:
        page = await owner.done("GET", where, params={"limit": "3", **page_of})
        seen += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            break
        page_of = {"after": page["last_id"]}
    assert seen == ids[::-1]
    for after in ("msg_1", ids[0][:-1] + "7", made["output"][0]["id"]):
        assert (await owner.ask("GET", where, params={"after": after})).json()["error"]["param"] == "after"
    front.dispatcher.context = 4096
    many = await respond(owner, input=[{"role": "user", "content": str(number)} for number in range(30)])
    page = await owner.done("GET", f"{PATH}/{many['id']}/input_items")
    assert (len(page["data"]), page["has_more"]) == (20, True)


def test_a_page_of_long_items_has_few() -> None:
    items = [{"role": "user", "content": letter * 600_000} for letter in "abc"]
    fields: dict[str, Any] = {"response_id": MISSING, "limit": 9, "is_ascending": True}
    after, seen = None, list[int]()
    for _ in items:
        page, more = input_page(json.dumps(items).encode(), after=after, **fields)
        seen.append(len(page))
        after = page[-1].id
    assert (seen, more) == ([1, 1, 1], False)


async def test_no_other_tenant_or_user_sees_it(front: RealFront, owner: BatchClient) -> None:
    badger, wombat = BatchClient(front, BADGER_KEY), BatchClient(front, WOMBAT_KEY)
    plain, admin = BatchClient(front, key_without("admin")), BatchClient(front, ASKER_KEY)
    mine, of_badger, of_tenant = [await respond(client) for client in (owner, badger, plain)]
    seen = {owner: [mine], badger: [of_badger], wombat: [], plain: [of_tenant], admin: [of_badger, of_tenant]}
    for client, visible in seen.items():
        for made in (mine, of_badger, of_tenant):
            item = made["output"][0]["id"]
            bodies: list[dict[str, Any]] = [
                {"input": "x", "previous_response_id": made["id"]},
                {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": item}]},
            ]
            asked = [("GET", "", None), ("GET", "/input_items", None), *(("POST", None, body) for body in bodies)]
            for method, end, body in [*asked, ("DELETE", "", None)]:
                if made in visible and method == "DELETE":
                    continue
                there, nowhere = [
                    await client.ask(
                        method,
                        PATH if end is None else f"{PATH}/{response_id}{end}",
                        **({} if body is None else {"content": body_of(body, made["id"], response_id)}),
                    )
                    for response_id in (made["id"], MISSING)
                ]
                assert nowhere.status_code == 404
                if made in visible:
                    assert there.is_success, there.text
                else:
                    assert (there.status_code, there.content) == (404, nowhere.content)


def body_of(fields: dict[str, Any], response_id: str, other: str) -> bytes:
    return json.dumps({"model": BASE, "store": False, **fields}).replace(response_id[5:], other[5:]).encode()


async def test_bounds_of_number_and_bytes(front: RealFront, owner: BatchClient) -> None:
    operators = BatchClient(front, OPERATOR_KEY)
    set_config(front, max_stored_responses=1)
    await respond(owner)
    num_computed = len(front.dispatcher.submitted)
    assert await refused(owner) == (429, "insufficient_quota")
    set_config(front, max_stored_responses=9)
    quota = {"stored_bytes": await stored_bytes(front) + 40}
    await operators.done("PATCH", f"/v1/admin/tenants/{OWNER}", json={"quota": quota})
    await front.view.catch_up()
    assert await refused(owner, input="a" * 60) == (429, "insufficient_quota")
    assert len(front.dispatcher.submitted) == num_computed, "it is refused before anything is computed"
    answer = await owner.ask("POST", PATH, json={"model": BASE, "input": "x"})  # has room, and its answer has none
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert answer.headers["x-should-retry"] == "false" and "store: false" in answer.text
    await respond(owner, store=False)
    assert len(on_disk(front)) == 1


async def test_a_full_disk_is_known_before_anything_is_computed(
    front: RealFront, owner: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(front.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert await refused(owner) == (507, "insufficient_storage")
    assert await refused(owner, stream=True) == (507, "insufficient_storage")
    assert not front.dispatcher.submitted
    assert (await respond(owner, store=False))["status"] == "completed"
    assert not await left_in_redis(front)


@pytest.mark.parametrize("errno", [28, 5])
async def test_what_cannot_be_stored_in_the_end_fails_and_leaves_nothing(
    front: RealFront, owner: BatchClient, monkeypatch: pytest.MonkeyPatch, errno: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno, "no")

    expected = (507, "insufficient_storage") if errno == 28 else (500, "internal_error")
    before = await stored_bytes(front)
    monkeypatch.setattr("motet.router.batches.batch_files.os.fsync", fail)
    assert await refused(owner) == expected
    *_, done, error, failed = await streamed(owner)
    assert (done["type"], error["code"], failed["type"]) == (
        "response.output_item.done",
        expected[1],
        "response.failed",
    )
    assert (failed["response"]["store"], failed["response"]["output"]) == (False, [done["item"]])
    front.dispatcher.answer = []
    assert [event["type"] for event in await streamed(owner)][-2:] == ["error", "response.failed"]
    assert await stored_bytes(front) == before
    assert not on_disk(front) and not await left_in_redis(front)


async def test_a_full_redis_stores_nothing_and_answers_what_is_not_to_be_stored(
    front: RealFront, owner: BatchClient
) -> None:
    kept = await respond(owner)
    await front.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await front.redis.set("a", "b")
        assert await refused(owner) == (507, "registry_full")
        await respond(owner, store=False, previous_response_id=kept["id"])
        await owner.done("DELETE", f"{PATH}/{kept['id']}")
    finally:
        await front.redis.config_set("maxmemory", 0)
    assert not on_disk(front) and not await left_in_redis(front)


async def test_expired_ones_are_gone_and_swept(
    front: RealFront, owner: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await stored_bytes(front)
    gone = await respond(owner)
    monkeypatch.setattr(front.batches.responses, "_clock", lambda: time.time() + 31 * 86_400)
    assert (await owner.ask("GET", f"{PATH}/{gone['id']}")).status_code == 404
    assert await refused(owner, previous_response_id=gone["id"]) == (404, "response_not_found")
    kept = await respond(owner)
    monkeypatch.setattr(front.batches.files, "_clock", lambda: time.time() + 31 * 86_400)
    assert await front.batches.sweep.sweep()
    (path,) = on_disk(front)
    assert path.name == kept["id"]
    assert await stored_bytes(front) == before + path.stat().st_size
    assert await left_in_redis(front) == [f"{OWNER}/{kept['id']}", f"motet:{{registry}}:responses:{OWNER}"]


async def test_they_go_with_their_user_and_their_tenant(front: RealFront) -> None:
    badger, admin = BatchClient(front, BADGER_KEY), BatchClient(front, ASKER_KEY)
    await respond(badger)
    kept = await respond(admin)
    await admin.done("DELETE", "/v1/users/badger")
    assert [path.name for path in on_disk(front)] == [kept["id"]]
    await BatchClient(front, OPERATOR_KEY).done("DELETE", "/v1/admin/tenants/tenant-of-moles")
    assert not on_disk(front) and not await left_in_redis(front)


async def test_a_file_that_the_disk_has_lost_is_as_if_it_were_not_there(front: RealFront, owner: BatchClient) -> None:
    made = await respond(owner)
    on_disk(front)[0].unlink()
    assert (await owner.ask("GET", f"{PATH}/{made['id']}")).status_code == 404
    assert await refused(owner, previous_response_id=made["id"]) == (404, "response_not_found")
    await owner.done("DELETE", f"{PATH}/{made['id']}")
    assert not await left_in_redis(front)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_leaves_at_the_end_leaves_no_half(
    front: RealFront, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    writing, go_on = asyncio.Event(), asyncio.Event()
    responses, write = front.batches.responses, front.batches.responses._store.write
    loop = asyncio.get_running_loop()

    def slow(*args: Any) -> None:
        loop.call_soon_threadsafe(writing.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(responses._store, "write", slow)
    identity = Identity(TenantRecord(name=OWNER), KeyRecord(key_id="", tenant=OWNER))
    adding = asyncio.create_task(responses.add(identity, MISSING, b"[]", b"{}"))
    await writing.wait()
    adding.cancel()
    await asyncio.wait([adding])
    assert adding.cancelled()
    go_on.set()
    await responses.wait()
    await asyncio.sleep(0)  # the callback of what failed
    if fails:
        assert f"{MISSING}, whose client has left, was not stored: The server's disk is too full" in caplog.text
        assert not on_disk(front) and not await left_in_redis(front)
    else:
        record = await responses.find(identity, MISSING)
        assert await responses.with_conversation(record, bytes) == b"[]" and not caplog.text


@pytest.mark.parametrize("path", ["/v1/users/badger", "/v1/admin/tenants/tenant-of-moles"])
async def test_what_is_deleted_while_it_is_written_leaves_no_file(
    front: RealFront, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    loop, write = asyncio.get_running_loop(), front.batches.responses._store.write
    operators = BatchClient(front, OPERATOR_KEY if "admin" in path else ASKER_KEY)

    def late(*args: Any) -> None:
        asyncio.run_coroutine_threadsafe(operators.done("DELETE", path), loop).result()
        write(*args)

    monkeypatch.setattr(front.batches.responses._store, "write", late)
    await respond(BatchClient(front, BADGER_KEY))
    assert not on_disk(front) and not await left_in_redis(front)


async def test_lines_of_batches_store_nothing(front: RealFront, owner: BatchClient) -> None:
    kept = await respond(owner)
    lines = [
        line("a", url=PATH, input="hello", prompt=None, max_tokens=None),
        line("b", url=PATH, input="hello", prompt=None, max_tokens=None, previous_response_id=kept["id"]),
    ]
    front.batches.start()
    try:
        batch = await owner.ended(await owner.create(await owner.upload(lines), PATH))
    finally:
        await front.batches.stop()
    (answered,) = await owner.lines(batch["output_file_id"])
    (failed,) = await owner.lines(batch["error_file_id"])
    assert answered["response"]["body"]["store"] is False
    assert failed["response"]["body"]["error"]["code"] == "unsupported_parameter"
    assert [path.name for path in on_disk(front)] == [kept["id"]]


async def test_large_conversations_are_decoded_beside_the_router(front: RealFront, owner: BatchClient) -> None:
    front.dispatcher.context = 100_000
    long = "the quick fox " * 4000
    first = await respond(owner, input=long)
    await respond(owner, input="now", previous_response_id=first["id"])
    continued = last_prompt(front)
    await respond(
        owner, input=[{"role": "user", "content": long}, *first["output"], {"role": "user", "content": "now"}]
    )
    assert last_prompt(front) == continued
    (first_size,) = {path.stat().st_size for path in on_disk(front) if path.name == first["id"]}
    set_config(front, max_body_bytes=first_size - 1)
    assert await refused(owner, previous_response_id=first["id"]) == (413, "request_too_large")
    assert front.metrics.num_held_body_bytes == 0, "what was recalled is held no more"


async def test_no_long_conversation_holds_the_loop(front: RealFront, owner: BatchClient) -> None:
    set_config(front, max_body_bytes=16 << 20)
    front.dispatcher.context = 1 << 18
    items = [{"role": "user", "content": "a"}] * 4000 + [{"role": "user", "content": "the quick fox " * 20_000}]
    first = await respond(owner, input=items)
    for _ in range(ATTEMPTS):
        with measured_holds() as holds:
            await respond(owner, previous_response_id=first["id"])
            for order in ("asc", "desc"):
                await owner.done("GET", f"{PATH}/{first['id']}/input_items", params={"order": order, "limit": 10_000})
        if holds.within(MOST_S):
            return
    raise AssertionError(holds)


async def test_a_request_refers_to_a_bounded_number(front: RealFront, owner: BatchClient) -> None:
    references = [
        {"type": "item_reference", "id": f"msg_{'A' * 33}{number:03}_0"} for number in range(MAX_RECALLED + 1)
    ]
    assert await refused(owner, input=references) == (400, "invalid_value")
    set_config(front, max_body_bytes=16 << 20)
    front.dispatcher.context = 1 << 20
    thoughts = [{"type": "reasoning"}] * MAX_STORED_ITEMS
    assert await refused(owner, input=[{"role": "user", "content": "x"}, *thoughts]) == (400, "invalid_value")
    await respond(owner, input=[{"role": "user", "content": "x"}, *thoughts], store=False)


async def test_no_item_is_referred_to_twice(front: RealFront, owner: BatchClient) -> None:
    """Else a few bytes would stand for a long item again and again."""
    made = await respond(owner)
    item = {"type": "item_reference", "id": made["output"][0]["id"]}
    alike = {**item, "id": item["id"].replace("msg_", "fc_")}  # the same place
    for other in (item, alike):
        answer = await owner.ask("POST", PATH, json={"model": BASE, "input": [item, other]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "input[1].id")


async def test_a_conversation_takes_what_its_responses_hold_and_its_newest_is_enough(
    front: RealFront, owner: BatchClient
) -> None:
    before, sizes, newest = await stored_bytes(front), list[int](), None
    for _ in range(4):
        newest = (await respond(owner, previous_response_id=newest))["id"]
        sizes.append(next(path.stat().st_size for path in on_disk(front) if path.name == newest))
        assert await stored_bytes(front) == before + sum(sizes)
    grown = [more - size for size, more in pairwise(sizes[1:])]
    assert grown[0] == grown[1] > 0, "each takes a turn more than the one before"
    for path in on_disk(front):
        if path.name != newest:
            await owner.done("DELETE", f"{PATH}/{path.name}")
    assert await stored_bytes(front) == before + sizes[-1]
    items = await owner.done("GET", f"{PATH}/{newest}/input_items")
    assert len(items["data"]) == 7


async def test_the_client_of_openai(front: RealFront) -> None:
    async with front.client() as http:
        where: Any = {"api_key": OWNER_KEY, "base_url": "http://router/v1", "http_client": http}
        async with openai.AsyncOpenAI(**where, max_retries=0) as client:
            first = await client.responses.create(model=BASE, input="hello")
            assert (await client.responses.retrieve(first.id)).output_text == ANSWER
            async with client.responses.stream(model=BASE, input="now", previous_response_id=first.id) as stream:
                async for _ in stream:
                    pass
                second = await stream.get_final_response()
            assert second.previous_response_id == first.id
            items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
            texts = [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]
            assert texts == ["hello", ANSWER, "now"]
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)


# By turns or at once

TEXTS: Final = st.text("ab", min_size=1, max_size=3)
MESSAGES: Final = st.builds(
    lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "developer"]), TEXTS
)
OUTPUTS: Final = st.one_of(
    st.builds(
        lambda text: {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
        TEXTS,
    ),
    st.builds(lambda text: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}, TEXTS),
    st.builds(
        lambda name: {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"},
        st.sampled_from("fgh"),
    ),
)
RESULTS: Final = st.builds(lambda text: {"type": "function_call_output", "call_id": "f", "output": text}, TEXTS)
TURNS: Final = st.lists(
    st.tuples(
        st.lists(MESSAGES | RESULTS | OUTPUTS, max_size=3), st.lists(OUTPUTS, min_size=1, max_size=3), st.booleans()
    ),
    min_size=1,
    max_size=4,
)


def chat_of(kept: Mapping[str, KeptConversation], items: Any, previous: str | None = None) -> ResponseChat:
    body = {"model": "a", "input": items, "previous_response_id": previous}
    return response_chat(msgspec.convert(body, ResponsesRequest), kept)


items_of = msgspec.json.Decoder(list[InputItem]).decode


@given(TURNS)
def test_any_conversation_by_turns_is_that_of_its_items(turns: Any) -> None:
    """Whether a turn refers to the response before it or to each of its items, and whatever the items are."""
    kept, sent, previous = dict[str, KeptConversation](), [{"role": "user", "content": "a"}], None
    own: list[Any] = list(sent)
    for number, (more, output, refers_to_items) in enumerate(turns):
        chat = chat_of(kept, own, previous)
        assert chat.messages == chat_of(kept, sent).messages
        assert items_of(chat.items) == items_of(chat_of(kept, sent).items)
        response_id = f"resp_{number}"
        stored = b'{"input":%b,"response":%b}' % (chat.items, msgspec.json.encode({"output": output}))
        kept[response_id] = msgspec.json.decode(stored, type=KeptConversation)
        sent = [*sent, *output, *more]
        previous, own = response_id, more
        if refers_to_items:
            ids = [f"msg_{number}_i{index}" for index in range(len(kept[response_id].input))]
            ids += [f"fc_{number}_{index}" for index in range(len(output))]
            previous, own = None, [*({"type": "item_reference", "id": one} for one in ids), *more]


def test_all_that_is_referred_to_is_looked_for_at_once() -> None:
    items = [{"type": "item_reference", "id": "msg_b_0"}, {"type": "item_reference", "id": "fc_c_i1"}]
    with pytest.raises(NoSuchResponse) as missing:
        chat_of({}, items, "resp_a")
    assert missing.value.response_ids == ["resp_a", "resp_b", "resp_c"]
    assert missing.value.detail.param == "previous_response_id"
    with pytest.raises(ApiError) as unsupported:
        response_chat(ResponsesRequest(model="a", input=[InputItem(type="item_reference", id="msg_b_0")]))
    assert unsupported.value.detail.param == "input[0].type"
