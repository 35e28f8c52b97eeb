"""Batches by HTTP on a real registry and store: each line gets one result, whatever becomes of routers and keys."""

from __future__ import annotations

import asyncio
import cProfile
import errno
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from pstats import Stats
from typing import Any

import msgspec
import numpy as np
import pytest

from motet.adapters import ended_tasks
from motet.adapters.ended_tasks import end_tasks
from motet.adapters.errors import RegistryUnavailable
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.score_head import ScoreHead
from motet.adapters.registry.batches import batch_registry
from motet.adapters.registry.batches.batch_registry import BatchRegistry
from motet.adapters.registry.batches.records import BatchRecord
from motet.adapters.registry.registry import hash_key
from motet.adapters.registry.registry_keys import FILE_ENDS
from motet.adapters.registry.tenants.records import KeyRecord
from motet.adapters.store.store import AdapterStore
from motet.router.batches import batch_files, batch_runner
from motet.router.batches.batch_files import BatchResults, FileStore, InputCheck, LineReader, Result
from motet.router.batches.batches import Batches
from motet.router.batches.line_call import LineCaller
from motet.router.http.errors import unavailable
from motet.router.tenancy.account import AnswerRequest, Ending
from motet.router.text.text import TextService
from motet.tests.rigs.batch_client import BatchClient, line, lines_of
from motet.tests.rigs.engine_dispatcher import EngineDispatcher
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.quota_rig import until
from motet.tests.rigs.real_front import (
    ASKER_KEY,
    OPERATOR_KEY,
    OWNER,
    OWNER_KEY,
    OWNERS_ADAPTER,
    QUICK,
    RealFront,
    real_front,
)
from motet.tests.rigs.router_rig import BASE, failing, text_service


class Charges:
    """An accountant that knows by `user`, which lines have as their ids, what was computed to its end."""

    def __init__(self) -> None:
        self.complete: Counter[str] = Counter()
        self.num_open = 0
        self.most_open = 0
        self.opening: asyncio.Event | None = None  # lines wait for it before they are computed
        self.wait_s = 0.0
        self.has_background: set[bool] = set()
        self.refusals: dict[str, Sequence[Exception]] = {}  # by line: of its first tries

    async def open(self, request: AnswerRequest) -> _Charge:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if self.opening is not None:
                await self.opening.wait()
            await asyncio.sleep(random.uniform(0, self.wait_s))
            if first := self.refusals.get(request.user):
                self.refusals[request.user] = first[1:]
                raise first[0]
        except BaseException:
            self.num_open -= 1
            raise
        self.has_background.add(request.identity.tenant.is_background)
        return _Charge(self, request.user)


class _Charge:
    headers = ()

    def __init__(self, charges: Charges, custom_id: str) -> None:
        self._charges, self._custom_id = charges, custom_id

    def settle(self, ending: Ending) -> None:
        self._charges.num_open -= 1
        if not (ending.error or ending.is_cancelled):
            self._charges.complete[self._custom_id] += 1


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def charges() -> Charges:
    return Charges()


@pytest.fixture
async def front(redis_url: str, tmp_path: Path, text: TextService, charges: Charges) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text, accountants=[charges]) as front:
        yield front


@pytest.fixture
async def running(front: RealFront) -> AsyncIterator[RealFront]:
    async with started(front.batches):
        yield front


@asynccontextmanager
async def started(batches: Batches) -> AsyncIterator[Batches]:
    batches.start()
    try:
        yield batches
    finally:
        await batches.stop()


def another_router(front: RealFront) -> Batches:
    """On the same Redis and disk."""
    batches = Batches(
        front.redis, front.folder / "files", front.view, front.config, front.metrics, pace=QUICK, timeout_s=PATIENCE_S
    )
    assert front.batches._caller is not None
    batches.answer_with(front.batches._caller._routes, lambda: True)
    return batches


async def kill(front: RealFront, batches: Batches) -> None:
    """As its process' death: nothing is written or noted any more, and its lease stays until it expires."""
    batches._worker._holder = "a dead router"
    running = [*batches._worker._running.values()]
    await end_tasks(batches._worker._working, batches._sweeping, *(one.task for one in running))
    for one in running:
        await front.expire_lease(one.runner.batch_id)


async def forgotten_at(front: RealFront, one: str) -> float:
    """When a file or a batch of the owner's expires."""
    found = await front.redis.zscore(FILE_ENDS, f"{OWNER}/{one}")
    assert found is not None
    return float(found)


def work(num_lines: int, **body: Any) -> list[dict[str, Any]]:
    return [line(f"id-{number}", user=f"id-{number}", **body) for number in range(num_lines)]


def usage_of(output: Iterable[Any]) -> dict[str, Any]:
    """The sum of what answers say, in either shape."""
    counts = dict.fromkeys(("input", "output", "cached", "reasoning"), 0)
    for usage in (one["response"]["body"]["usage"] for one in output):
        for name, other in (("input", "prompt"), ("output", "completion")):
            counts[name] += usage.get(f"{name}_tokens", usage.get(f"{other}_tokens", 0))
            details = usage.get(f"{name}_tokens_details", usage.get(f"{other}_tokens_details", {}))
            for detail in ("cached", "reasoning"):
                counts[detail] += details.get(f"{detail}_tokens", 0)
    return {
        "input_tokens": counts["input"],
        "input_tokens_details": {"cached_tokens": counts["cached"]},
        "output_tokens": counts["output"],
        "output_tokens_details": {"reasoning_tokens": counts["reasoning"]},
        "total_tokens": counts["input"] + counts["output"],
    }


async def test_lines_are_answered_as_requests_are(running: RealFront, charges: Charges) -> None:
    owner = BatchClient(running)
    lines = [*work(20), line("bad", max_tokens=-1), line("fine", prompt=["a", "b"], n=2, user="fine")]
    file_id = await owner.upload(lines)
    batch_id = await owner.create(file_id, metadata={"night": "first"})
    batch = await owner.ended(batch_id)
    assert (batch["status"], batch["errors"], batch["model"]) == ("completed", None, OWNERS_ADAPTER)
    assert charges.has_background == {True}
    assert batch["request_counts"] == {"total": 22, "completed": 21, "failed": 1}
    assert (batch["metadata"], batch["input_file_id"]) == ({"night": "first"}, file_id)
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    output = {one["custom_id"]: one for one in await owner.lines(batch["output_file_id"])}
    assert set(output) == {*(f"id-{number}" for number in range(20)), "fine"}
    async with running.client() as client:
        requested = {"headers": {"Authorization": f"Bearer {OWNER_KEY}"}, "json": lines[0]["body"]}
        direct = (await client.post("/v1/completions", **requested)).json()
    response = output["id-3"]["response"]
    assert output["id-3"]["error"] is None and response["status_code"] == 200 and response["request_id"]
    for field in ("choices", "usage", "model", "object"):
        assert response["body"][field] == direct[field]
    assert len(output["fine"]["response"]["body"]["choices"]) == 4
    assert batch["usage"] == usage_of(output.values()) and batch["usage"]["output_tokens"] > 0
    (failed,) = await owner.lines(batch["error_file_id"])
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"
    assert set(charges.complete.values()) == {1, 2}  # id-0 was sent once more, directly
    sizes = {one["id"]: one["bytes"] for one in (await owner.done("GET", "/v1/files"))["data"]}
    content = await owner.ask("GET", f"/v1/files/{batch['output_file_id']}/content")
    assert sizes[batch["output_file_id"]] == len(content.content)
    use = (await running.registry.stored.of(OWNER, hash_key(OWNER_KEY)[:16]))[1]
    assert use.stored_bytes == sum(sizes.values())
    for name in sizes:
        await owner.done("DELETE", f"/v1/files/{name}")
    assert (await running.registry.stored.of(OWNER, hash_key(OWNER_KEY)[:16]))[1].stored_bytes == 0
    assert running.metrics.batch_lines == {"completed": 21, "failed": 1}
    assert running.metrics.requests["BATCH /v1/completions", 200] == 21


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "prompt": None}),
        ("/v1/embeddings", {"input": "hi", "prompt": None, "max_tokens": None}),
        ("/v1/responses", {"input": "hi", "prompt": None, "max_tokens": None}),
    ],
)
async def test_the_other_endpoints(running: RealFront, endpoint: str, body: dict[str, Any]) -> None:
    one = line("a", url=endpoint, **body)
    one["body"] = {name: value for name, value in one["body"].items() if value is not None}
    owner = BatchClient(running)
    batch = await owner.ended(await owner.create(await owner.upload([one]), endpoint))
    errors = await owner.lines(batch["error_file_id"])
    assert (batch["status"], batch["error_file_id"]) == ("completed", None), errors
    ((found,)) = await owner.lines(batch["output_file_id"])
    assert found["response"]["body"]["object"] in ("chat.completion", "list", "response")
    assert batch["usage"] == usage_of([found]) and batch["usage"]["input_tokens"] > 0


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/classify", {"input": "hi"}),
        ("/v1/score", {"text_1": "hi", "text_2": "there"}),
        ("/v1/rerank", {"query": "hi", "documents": ["there"]}),
    ],
)
async def test_lines_of_classifiers(running: RealFront, endpoint: str, body: dict[str, Any]) -> None:
    content = AdapterContent({}, head=ScoreHead(np.eye(1, 8, dtype=np.float32)))
    AdapterStore(running.folder / "store").put(content, [])
    facts: dict[str, Any] = {"module_ranks": {"q_proj": 4}, "num_bytes": 1, "num_labels": 1}
    await running.registry.names.register(OWNER, "reward", digest=content.digest, **facts)
    await running.view.catch_up()
    owner, request = BatchClient(running), {"custom_id": "a", "method": "POST", "url": endpoint}
    lines = [{**request, "body": {"model": "reward", **body}}]
    batch = await owner.ended(await owner.create(await owner.upload(lines), endpoint))
    assert (batch["status"], batch["error_file_id"]) == ("completed", None), await owner.lines(batch["error_file_id"])
    ((answer,)) = await owner.lines(batch["output_file_id"])
    assert (answer["response"]["body"].get("data") or answer["response"]["body"]["results"])[0]["index"] == 0
    assert batch["usage"] == usage_of([answer]) and batch["usage"]["input_tokens"] > 0


GOOD = line("x")
WRONG = [
    ("duplicate_custom_id", "custom_id", [GOOD, GOOD], 2),
    ("invalid_json_line", None, [GOOD, [1]][:1], 2),
    ("invalid_line", None, [{"custom_id": "a", "method": "POST", "url": "/v1/completions"}], 1),
    ("invalid_line", None, [GOOD | {"custom_id": 7}], 1),
    ("invalid_custom_id", "custom_id", [GOOD | {"custom_id": ""}], 1),
    ("invalid_method", "method", [GOOD | {"method": "GET"}], 1),
    ("mismatched_url", "url", [GOOD | {"url": "/v1/chat/completions"}], 1),
    ("invalid_body", "body", [GOOD | {"body": 3}], 1),
    ("invalid_body", "body", [GOOD | {"body": {}}], 1),
    ("invalid_body", "body.stream", [GOOD | {"body": GOOD["body"] | {"stream": True}}], 1),
    ("invalid_body", "body.model", [line("x", model="")], 1),
    ("invalid_body", "body.model", [line("x", model="m" * 513)], 1),
    ("mismatched_model", "body.model", [GOOD, line("y", model="other")], 2),
]


@pytest.mark.parametrize(("code", "param", "lines", "number"), WRONG)
def test_wrong_lines_are_named(code: str, param: str | None, lines: list[Any], number: int, tmp_path: Path) -> None:
    content = lines_of(lines) + (b'{"custom_id": \n' if code == "invalid_json_line" else b"")
    (error,) = errors_of(content, tmp_path)
    assert (error.code, error.param, error.line) == (code, param, number)


def errors_of(content: bytes, folder: Path) -> Sequence[Any]:
    path = folder / "input"
    path.write_bytes(content)
    check = InputCheck("/v1/completions")
    with path.open("rb") as file:
        reader = LineReader(file)
        while (lines := reader.piece()) is not None:
            check.take(lines, reader.num_read)
    check.end()
    return check.errors


def test_bounds_of_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINES", 100)
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 500)
    assert not errors_of(b"\n \r\n" + lines_of(work(100)), tmp_path)
    assert not errors_of(b"\xef\xbb\xbf" + lines_of(work(2)), tmp_path)  # a byte order mark
    assert [one.code for one in errors_of(lines_of(work(200)), tmp_path)] == ["too_many_lines"]
    assert [one.code for one in errors_of(lines_of([line("a", prompt="x" * 9999)]), tmp_path)] == ["line_too_large"]
    assert [one.code for one in errors_of(b"\n\n", tmp_path)] == ["empty_file"]
    assert len(errors_of(b"{}\n" * 90, tmp_path)) == batch_files.MAX_ERRORS
    assert [one.code for one in errors_of(b'{"a"' * 90, tmp_path)] == ["invalid_json_line"]
    monkeypatch.setattr(batch_files, "MAX_READ", 5000)
    assert [one.code for one in errors_of(b"\n" * 9000, tmp_path)] == ["too_many_lines"]


async def test_lines_are_run_while_their_tenant_has_paused_its_requests(running: RealFront) -> None:
    """They are background work, and would keep the room for lines from other tenants."""
    client = BatchClient(running)
    assert await client.done("POST", "/pause?mode=keep") == {"status": "paused"}
    batch = await client.ended(await client.create(await client.upload([line("a")])))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
    assert await client.done("GET", "/is_paused") == {"is_paused": True}
    assert await client.done("POST", "/resume") == {"status": "resumed"}


async def test_lines_behind_a_mebibyte_of_nothing_are_run(running: RealFront) -> None:
    owner = BatchClient(running)
    blank = (b" " * 300_000 + b"\n") * 8
    content = blank + lines_of(work(2)) + blank + lines_of([line("last", user="last")])
    batch = await owner.ended(await owner.create((await owner.send(content)).json()["id"]))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 3)


async def test_a_batch_whose_input_is_lost_fails_and_holds_up_no_other(front: RealFront, charges: Charges) -> None:
    """As on a volume that was restored from an old copy: what has a result keeps it."""
    owner = BatchClient(front)
    front.config.now = replace(front.config.now, max_batch_lines=1)
    charges.refusals["id-1"] = [unavailable("not now", "ledger_full")] * 1000
    first, second = [await owner.create(await owner.upload(work(3))) for _ in range(2)]
    one, other = another_router(front), another_router(front)
    async with started(one):
        await until(condition(lambda: charges.complete["id-0"] == 1 and len(charges.refusals["id-1"]) < 1000))
    front.batches.store.delete(OWNER, (await owner.batch(first))["input_file_id"])
    charges.refusals.clear()
    async with started(other):
        lost, whole = await owner.ended(first), await owner.ended(second)
    assert lost["status"] == "failed" and lost["failed_at"]
    assert [error["code"] for error in lost["errors"]["data"]] == ["file_not_found"]
    assert [line["custom_id"] for line in await owner.lines(lost["output_file_id"])] == ["id-0"]
    assert (whole["status"], whole["request_counts"]["completed"]) == ("completed", 3)


async def test_results_expire_when_the_batch_says(running: RealFront) -> None:
    owner = BatchClient(running)
    file_id = await owner.upload(work(1))
    wanted = {"anchor": "created_at", "seconds": 7200}
    batch = await owner.ended(await owner.create(file_id, output_expires_after=wanted))
    file = await owner.done("GET", f"/v1/files/{batch['output_file_id']}")
    assert file["expires_at"] - file["created_at"] == 7200
    assert await forgotten_at(running, batch["output_file_id"]) == file["expires_at"]
    assert await forgotten_at(running, batch["id"]) > file["expires_at"] + 86_400
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for wrong in ({**wanted, "seconds": 3599}, {**wanted, "anchor": "ended_at"}, {"seconds": 7200}, 7200):
        answer = await owner.ask("POST", "/v1/batches", json={**body, "output_expires_after": wrong})
        assert answer.status_code == 400, wrong


async def test_an_answer_that_is_no_json_fails_its_line_alone() -> None:
    async def route(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: {}\n\n"})

    record = BatchRecord(
        id="batch_1", tenant="a", endpoint="/x", input_file_id="f", completion_window="24h", created_at=1, expires_at=2
    )
    wanted = batch_files.Line(custom_id="x", method="POST", url="/x", body=msgspec.Raw(b"{}"))
    answer = await LineCaller({"/x": route}).call(record, wanted)
    assert answer.result.error is not None and answer.result.error.code == "internal_error"
    assert answer.retry_after_s is None


async def test_a_wrong_input_fails_with_its_lines(running: RealFront, charges: Charges) -> None:
    owner = BatchClient(running)
    batch = await owner.ended(await owner.create(await owner.upload([*work(3), line("id-1"), line("z", model="q")])))
    assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("failed", None, None)
    assert [(one["code"], one["line"]) for one in batch["errors"]["data"]] == [
        ("duplicate_custom_id", 4),
        ("mismatched_model", 5),
    ]
    assert not charges.complete
    assert await forgotten_at(running, batch["id"]) > time.time() + 86_400
    await owner.done("DELETE", f"/v1/files/{batch['input_file_id']}")  # nothing reads it any more


@pytest.mark.parametrize(
    "change", [{"endpoint": "/v1/models"}, {"completion_window": "1h"}, {"metadata": {"a": 1}}, {"output": 1}]
)
async def test_wrong_batches_are_refused(front: RealFront, change: dict[str, Any]) -> None:
    owner = BatchClient(front)
    body = {"input_file_id": await owner.upload([GOOD]), "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await owner.ask("POST", "/v1/batches", json=body | change)).status_code == 400


async def test_no_other_sees_a_batch_or_uses_a_file(front: RealFront) -> None:
    owner, asker = BatchClient(front), BatchClient(front, ASKER_KEY)
    file_id = await owner.upload([GOOD])
    batch_id = await owner.create(file_id)
    assert [one["id"] for one in (await owner.done("GET", "/v1/batches"))["data"]] == [batch_id]
    assert (await asker.done("GET", "/v1/batches"))["data"] == []
    for method, path in (("GET", "/v1/batches/{}"), ("POST", "/v1/batches/{}/cancel")):
        there, nowhere = [await asker.ask(method, path.format(one)) for one in (batch_id, "batch_" + "0" * 32)]
        assert (there.status_code, there.content) == (nowhere.status_code, nowhere.content)
        assert there.json()["error"]["code"] == "batch_not_found"
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    refused = await asker.ask("POST", "/v1/batches", json=body)
    assert refused.json()["error"]["code"] == "file_not_found"
    refused = await owner.ask("DELETE", f"/v1/files/{file_id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")


async def test_a_tenant_has_a_bounded_number(front: RealFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_registry, "MAX_WAITING", 2)
    monkeypatch.setattr(batch_registry, "MAX_BATCHES", 3)
    owner = BatchClient(front)
    file_id = await owner.upload([GOOD])
    first = [await owner.create(file_id) for _ in range(2)]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    refused = await owner.ask("POST", "/v1/batches", json=body)
    assert refused.json()["error"]["code"] == "insufficient_quota"
    async with started(front.batches):
        for batch_id in first:
            await owner.ended(batch_id)
    later = [await owner.create(file_id) for _ in range(2)]
    found = await owner.done("GET", "/v1/batches", params={"limit": 2})
    # Ids begin with the millisecond of their batch; two of the same one may come in any order.
    assert ([one["id"] for one in found["data"]], found["has_more"]) == (sorted(later, reverse=True), True)
    found = await owner.done("GET", "/v1/batches", params={"after": found["last_id"]})
    assert ([one["id"] for one in found["data"]], found["has_more"]) == (sorted(first)[1:], False)


async def test_a_refusal_for_now_is_tried_again(running: RealFront, charges: Charges) -> None:
    charges.refusals = {f"id-{number}": [unavailable("not now", "ledger_full")] * 3 for number in range(3)}
    owner = BatchClient(running)
    batch = await owner.ended(await owner.create(await owner.upload(work(5))))
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert all(not left for left in charges.refusals.values())


async def test_a_line_that_loses_gangs_is_given_up(running: RealFront) -> None:
    running.dispatcher.script = failing("gang_lost", "it died")
    owner = BatchClient(running)
    batch = await owner.ended(await owner.create(await owner.upload(work(1))))
    (failed,) = await owner.lines(batch["error_file_id"])
    assert failed["response"]["body"]["error"]["code"] == "gang_lost"
    assert len(running.dispatcher.submitted) == batch_runner._MOST_LOST


async def test_a_line_costs_the_same_however_many_are_under_way(running: RealFront, charges: Charges) -> None:
    """They end one by one, which is noticed without a look at all that have not ended."""
    num_lines = 300
    running.config.now = replace(running.config.now, max_batch_lines=num_lines)
    charges.opening, charges.wait_s = asyncio.Event(), 0.5
    owner = BatchClient(running)
    batch_id = await owner.create(await owner.upload(work(num_lines)))
    await until(condition(lambda: charges.num_open == num_lines))
    with cProfile.Profile() as profile:
        charges.opening.set()
        batch = await owner.ended(batch_id)
    assert batch["request_counts"]["completed"] == num_lines
    calls = {name: numbers[0] for (_, _, name), numbers in Stats(profile).stats.items()}  # type: ignore[attr-defined]
    num_waited = sum(calls[name] for name in calls if "add_done_callback" in name)
    assert num_lines <= num_waited < 30 * num_lines


async def test_no_gang_pauses_a_batch(running: RealFront) -> None:
    running.dispatcher.is_connected = False
    owner = BatchClient(running)
    batch_id = await owner.create(await owner.upload(work(3)))
    await until(condition(lambda: running.metrics.paused_batches["gang"] == 1))
    running.dispatcher.is_connected = True
    assert (await owner.ended(batch_id))["request_counts"]["completed"] == 3
    assert running.metrics.paused_batches["gang"] == 0


def condition(check: Any) -> Any:
    async def requested() -> bool:
        return bool(check())

    return requested


async def test_cancelled_lines_that_have_begun_are_answered(running: RealFront, charges: Charges) -> None:
    charges.opening = asyncio.Event()
    running.config.now = replace(running.config.now, max_batch_lines=4)
    owner = BatchClient(running)
    batch_id = await owner.create(await owner.upload(work(30)))
    await until(condition(lambda: charges.num_open == 4))
    reported = await owner.done("POST", f"/v1/batches/{batch_id}/cancel")
    assert (reported["status"], reported["cancelling_at"] is not None) == ("cancelling", True)
    await asyncio.sleep(2 * QUICK.look_s)
    charges.opening.set()
    batch = await owner.ended(batch_id)
    assert (batch["status"], charges.most_open) == ("cancelled", 4)
    assert len(await owner.lines(batch["output_file_id"])) == len(charges.complete) >= 4
    errors = await owner.lines(batch["error_file_id"])
    assert {one["error"]["code"] for one in errors} <= {"batch_cancelled"}
    assert (
        len(errors) + len(charges.complete)
        == 30
        == sum(batch["request_counts"][one] for one in ("completed", "failed"))
    )
    refused = await owner.ask("POST", f"/v1/batches/{batch_id}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "batch_ended")


async def test_a_window_that_is_over_expires_what_was_not_run(front: RealFront, charges: Charges) -> None:
    charges.opening = asyncio.Event()
    front.config.now = replace(front.config.now, max_batch_lines=2)
    owner = BatchClient(front)
    batch_id = await owner.create(await owner.upload(work(10)))
    async with started(front.batches):
        await until(condition(lambda: charges.num_open == 2))
        front.batches.batches.clock = lambda: time.time() + 90_000
        charges.opening.set()
        batch = await owner.ended(batch_id)
    assert (batch["status"], batch["expired_at"] is not None) == ("expired", True)
    assert len(await owner.lines(batch["output_file_id"])) == 2
    (error,) = {json.dumps(one["error"]) for one in await owner.lines(batch["error_file_id"])}
    assert json.loads(error) == {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }


async def test_keys_that_end_fail_lines_and_no_batch(running: RealFront, charges: Charges) -> None:
    charges.opening = asyncio.Event()
    running.config.now = replace(running.config.now, max_batch_lines=2)
    owner = BatchClient(running)
    batch_id = await owner.create(await owner.upload(work(6)))
    await until(condition(lambda: charges.num_open == 2))
    await owner.done("DELETE", f"/v1/keys/{hash_key(OWNER_KEY)[:16]}")
    await running.view.catch_up()
    charges.opening.set()
    batch = await owner.ended(batch_id)
    assert batch["request_counts"] == {"total": 6, "completed": 2, "failed": 4}
    errors = await owner.lines(batch["error_file_id"])
    assert {one["response"]["body"]["error"]["code"] for one in errors} == {"invalid_api_key"}


async def test_a_token_counts_as_long_as_its_batch(running: RealFront) -> None:
    owner = BatchClient(running)
    file_id = await owner.upload(work(3))
    record = BatchRecord(
        id="batch_token",
        tenant=OWNER,
        key_id="t1",
        subject="leo@id.example",
        token=KeyRecord(key_id="t1", tenant=OWNER, expires_at=1.0),
        endpoint="/v1/completions",
        input_file_id=file_id,
        completion_window="24h",
        created_at=1,
        expires_at=int(time.time()) + 60,
    )
    await running.batches.batches.add(record, time.time() + 60, last_event=0)
    batch = await owner.ended(record.id)
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


async def test_a_deleted_adapter_fails_lines_and_no_batch(running: RealFront, charges: Charges) -> None:
    owner = BatchClient(running)
    file_id = await owner.upload(work(3))
    await owner.done("DELETE", f"/v1/adapters/{OWNERS_ADAPTER}")
    batch = await owner.ended(await owner.create(file_id))
    errors = await owner.lines(batch["error_file_id"])
    assert [one["response"]["body"]["error"]["code"] for one in errors] == ["model_not_found"] * 3


async def test_a_deleted_tenant_leaves_nothing(running: RealFront, charges: Charges) -> None:
    charges.opening = asyncio.Event()
    await BatchClient(running).create(await BatchClient(running).upload(work(6)))
    await until(condition(lambda: charges.num_open > 0))
    await BatchClient(running, OPERATOR_KEY).done("DELETE", f"/v1/admin/tenants/{OWNER}")
    charges.opening.set()
    await until(condition(lambda: not running.batches._worker.num_running))
    assert not [path for path in (running.folder / "files").rglob("*") if path.is_file()]

    async def nothing_is_left() -> bool:  # a lease that was taken meanwhile is given back a moment later
        return not [key async for key in running.redis.scan_iter("motet:{registry}:*batch*")]

    await until(nothing_is_left)


async def test_results_over_the_quota_end_the_rest(running: RealFront) -> None:
    owner, operator = BatchClient(running), BatchClient(running, OPERATOR_KEY)
    running.config.now = replace(running.config.now, max_batch_lines=2)
    file_id = await owner.upload(work(40))
    used = (await running.registry.stored.of(OWNER, ""))[0].stored_bytes
    await operator.done("PATCH", f"/v1/admin/tenants/{OWNER}", json={"quota": {"stored_bytes": used + 2000}})
    await running.view.catch_up()
    batch = await owner.ended(await owner.create(file_id))
    counts = batch["request_counts"]
    assert 0 < counts["completed"] < 20 and counts["completed"] + counts["failed"] == 40
    errors = await owner.lines(batch["error_file_id"])
    assert {one["error"]["code"] for one in errors} == {"insufficient_quota"}


async def test_a_full_disk_pauses(running: RealFront, charges: Charges, monkeypatch: pytest.MonkeyPatch) -> None:
    append, is_full = BatchResults.append, True

    def refusing(self: BatchResults, results: Sequence[Result]) -> None:
        if is_full:
            append(self, results[:1])
            raise OSError(errno.ENOSPC, "full")
        append(self, results)

    monkeypatch.setattr(BatchResults, "append", refusing)
    owner = BatchClient(running)
    batch_id = await owner.create(await owner.upload(work(50)))
    await until(condition(lambda: running.metrics.paused_batches["disk"] == 1))
    is_full = False
    batch = await owner.ended(batch_id)
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert sorted(one["custom_id"] for one in await owner.lines(batch["output_file_id"])) == sorted(charges.complete)
    assert set(charges.complete.values()) == {1}


async def test_results_leave_room_on_the_disk_to_others(running: RealFront) -> None:
    owner = BatchClient(running)
    file_id = await owner.upload(work(3))
    config = running.config.now
    running.config.now = replace(config, min_free_bytes=1 << 60)
    batch_id = await owner.create(file_id)
    await until(condition(lambda: running.metrics.paused_batches["disk"] == 1))
    running.config.now = config
    assert (await owner.ended(batch_id))["request_counts"]["completed"] == 3


async def test_gangs_that_go_while_lines_are_under_way_pause_a_batch(running: RealFront, charges: Charges) -> None:
    charges.opening = asyncio.Event()
    owner = BatchClient(running)
    batch_id = await owner.create(await owner.upload(work(3)))
    await until(condition(lambda: charges.num_open > 0))
    running.dispatcher.is_connected = False
    charges.refusals = {f"id-{number}": [unavailable("not now", "no_gang")] for number in range(3)}
    charges.opening.set()
    await until(condition(lambda: running.metrics.paused_batches["gang"] == 1))
    running.dispatcher.is_connected = True
    assert (await owner.ended(batch_id))["request_counts"]["completed"] == 3
    assert running.metrics.paused_batches["gang"] == 0


async def test_a_volume_that_is_away_fails_no_batch(front: RealFront, charges: Charges) -> None:
    """Half of the lines have results; the folder of all files is gone for a while, as an unmounted volume's is."""
    charges.refusals["id-1"] = [unavailable("not now", "ledger_full")] * 1000
    front.config.now = replace(front.config.now, max_batch_lines=1)
    owner = BatchClient(front)
    one, other = another_router(front), another_router(front)
    batch_id = await owner.create(await owner.upload(work(2)))
    async with started(one):
        await until(condition(lambda: charges.complete["id-0"] == 1 and len(charges.refusals["id-1"]) < 1000))
    files, aside = front.folder / "files", front.folder / "aside"
    files.rename(aside)
    files.mkdir()
    charges.refusals.clear()
    async with started(other):
        await until(condition(lambda: other._worker.num_running > 0))
        await until(condition(lambda: other._worker.num_running == 0))
        assert (await owner.batch(batch_id))["status"] == "in_progress" and not [*files.iterdir()]
        files.rmdir()
        aside.rename(files)
        batch = await owner.ended(batch_id)
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_redis_away_pauses(running: RealFront, charges: Charges, monkeypatch: pytest.MonkeyPatch) -> None:
    is_away = False

    def unless_away(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def checked(*args: Any, **options: Any) -> Any:
            if is_away:
                raise RegistryUnavailable("away")
            return await call(*args, **options)

        return checked

    for name in ("get", "change", "delete"):
        monkeypatch.setattr(BatchRegistry, name, unless_away(getattr(BatchRegistry, name)))
    charges.opening = asyncio.Event()
    owner = BatchClient(running)
    batch_id = await owner.create(await owner.upload(work(50)))
    await until(condition(lambda: charges.num_open > 0))
    is_away = True
    charges.opening.set()
    await until(condition(lambda: running.metrics.paused_batches["registry"] == 1))
    assert len(charges.complete) <= running.config.now.max_batch_lines
    is_away = False
    batch = await owner.ended(batch_id)
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert set(charges.complete.values()) == {1}


async def test_tenants_share_a_router(front: RealFront, charges: Charges) -> None:
    """The second tenant's lines begin beside the first one's, which has many."""
    charges.opening = asyncio.Event()
    front.config.now = replace(front.config.now, max_batch_lines=8)
    owner, asker = BatchClient(front), BatchClient(front, ASKER_KEY)
    batches = [await owner.create(await owner.upload(work(20))) for _ in range(2)]
    other = await asker.create(await asker.upload([line(f"b-{n}", model="moles-adapter", user="b") for n in range(20)]))
    async with started(front.batches):
        # One of each tenant.
        await until(condition(lambda: charges.num_open >= 8 and front.batches._worker.num_running == 2))
        charges.opening.set()
        for client, batch_id in ((asker, other), *((owner, one) for one in batches)):
            assert (await client.ended(batch_id))["request_counts"]["completed"] == 20


async def test_a_batch_gives_its_turn_to_others(front: RealFront, charges: Charges, monkeypatch: Any) -> None:
    monkeypatch.setattr("motet.router.batches.batches.MOST_BATCHES", 1)
    charges.wait_s = 0.02
    front.config.now = replace(front.config.now, max_batch_lines=1)
    owner, asker = BatchClient(front), BatchClient(front, ASKER_KEY)
    long_one = await owner.create(await owner.upload(work(60)))
    async with started(front.batches):
        await until(condition(lambda: len(charges.complete) > 2))
        short = await asker.create(await asker.upload([line("b", model="moles-adapter")]))
        await asker.ended(short)
        assert (await owner.batch(long_one))["status"] == "in_progress"
        assert (await owner.ended(long_one))["request_counts"]["completed"] == 60
    assert all(charges.complete[f"id-{number}"] == 1 for number in range(60))


async def test_another_router_waits_for_the_lease_and_for_the_files(front: RealFront, charges: Charges) -> None:
    owner = BatchClient(front)
    batch_id = await owner.create(await owner.upload(work(3)))
    record = await front.batches.batches.get(OWNER, batch_id)
    assert isinstance(record, BatchRecord)
    assert await front.batches.batches.lease(batch_id).hold("another router", 60)
    held = BatchResults(front.batches.store, record)  # that one has lost its lease, and does not know it yet
    async with started(front.batches):
        await asyncio.sleep(3 * QUICK.look_s)
        assert not charges.complete
        await front.batches.batches.lease(batch_id).hold("another router", 0)
        await asyncio.sleep(3 * QUICK.look_s)
        assert not charges.complete
        held.close()
        assert (await owner.ended(batch_id))["request_counts"]["completed"] == 3


async def test_a_router_that_stops_gives_its_lease_back_however_long_a_line_takes_to_end(
    front: RealFront, charges: Charges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled again and again meanwhile."""
    monkeypatch.setattr(ended_tasks, "_AGAIN_S", 0.01)
    num_cancelled = 0

    async def open_slowly(request: AnswerRequest) -> None:
        nonlocal num_cancelled
        charges.num_open += 1
        while num_cancelled < 5:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                num_cancelled += 1
        raise asyncio.CancelledError

    monkeypatch.setattr(charges, "open", open_slowly)
    owner, router = BatchClient(front), another_router(front)
    router._worker._pace = replace(QUICK, stop_s=0.0)
    batch_id = await owner.create(await owner.upload(work(1)))
    async with started(router):
        await until(condition(lambda: charges.num_open == 1))
    assert (num_cancelled, router._worker.num_running) == (5, 0)
    assert await front.batches.batches.lease(batch_id).hold("another router", 60)


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    record = BatchRecord(
        id="batch_1",
        tenant="a",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=2,
    )
    store.make_folder_of(record.tenant_id)
    results = BatchResults(store, record)
    results.append([Result(custom_id="x"), Result(custom_id="y")])
    written = results.written
    with pytest.raises(BlockingIOError):
        BatchResults(store, record)
    results.close()
    path = store.path("a", record.error_file_id)
    with path.open("ab") as file:
        file.write(b'{"id":"batch_req_1","custom_id":"z","respo')
    again = BatchResults(store, record)
    assert (again.written, again.answered) == (written, results.answered)
    again.append([Result(custom_id="z")])
    again.close()
    assert [json.loads(one)["custom_id"] for one in path.read_bytes().splitlines()] == ["x", "y", "z"]
    assert os.stat(path).st_mode & 0o077 == 0


@pytest.mark.parametrize("number", range(4))
async def test_every_line_has_one_result_whatever_happens(
    front: RealFront, charges: Charges, number: int, request: pytest.FixtureRequest
) -> None:
    """Routers die, leave and come, and lines are refused, in random order: what is charged is in a result."""
    rng = random.Random(request.config.option.first_seed + number)
    charges.wait_s, num_lines, most_lines = 0.005, rng.randrange(20, 120), rng.choice([1, 3, 8])
    front.config.now = replace(front.config.now, max_batch_lines=most_lines)
    for one in rng.sample(range(num_lines), num_lines // 4):
        charges.refusals[f"id-{one}"] = [unavailable("not now", "ledger_full")] * rng.randrange(1, 3)
    bad = {f"id-{one}" for one in rng.sample(range(num_lines), num_lines // 5)}
    lines = [one | {"body": one["body"] | {"n": 0}} if one["custom_id"] in bad else one for one in work(num_lines)]
    owner = BatchClient(front)
    batch_id = await owner.create(await owner.upload(lines))
    routers: list[Batches] = []
    num_killed, cancels = 0, rng.random() < 0.5
    try:
        for _ in range(rng.randrange(2, 8)):
            await asyncio.sleep(rng.uniform(0, 0.08))
            match rng.choice(["start", "start", "kill", "stop", "cancel"]):
                case "kill" if routers:
                    num_killed += 1
                    await kill(front, routers.pop(rng.randrange(len(routers))))
                case "stop" if routers:
                    await routers.pop(rng.randrange(len(routers))).stop()
                case "cancel" if cancels:
                    await owner.ask("POST", f"/v1/batches/{batch_id}/cancel")
                case _:
                    routers.append(another_router(front))
                    routers[-1].start()
        if not routers:
            routers.append(another_router(front))
            routers[-1].start()
        batch = await owner.ended(batch_id)
    finally:
        for router in routers:
            await router.stop()
    output, errors = [await owner.lines(batch[f"{one}_file_id"]) for one in ("output", "error")]
    if batch["in_progress_at"] is None:  # it was cancelled before it was looked at
        assert (batch["status"], output, errors, charges.complete) == ("cancelled", [], [], Counter())
        return
    results = Counter(one["custom_id"] for one in [*output, *errors])
    assert results == Counter(f"id-{one}" for one in range(num_lines))
    answered = {one["custom_id"] for one in output}
    assert batch["usage"] == usage_of(output)
    assert answered <= set(charges.complete) and not answered & bad
    more = sum(charges.complete.values()) - len(answered)
    assert 0 <= more <= num_killed * most_lines
    if batch["status"] == "completed":
        assert answered == {f"id-{one}" for one in range(num_lines)} - bad
    use = (await front.registry.stored.of(OWNER, hash_key(OWNER_KEY)[:16]))[1].stored_bytes
    files = (await owner.done("GET", "/v1/files"))["data"]
    assert use == sum(one["bytes"] for one in files)


async def test_an_engine_answers_a_batch_as_it_answers_requests(
    redis_url: str, tmp_path: Path, text: TextService, charges: Charges
) -> None:
    """Greedy answers, all tokens of which are in the ledger."""
    model = write_model("llama", tmp_path / "model")
    stock = Stock.make(model, write_adapters(model, tmp_path / "adapters"), tmp_path / "store")
    lines = [
        line(f"id-{n}", model=BASE, prompt=list(range(9, 12 + n)), user=f"id-{n}", temperature=0) for n in range(9)
    ]
    with stock.engine(num_pages=200) as rig:
        dispatcher = EngineDispatcher(rig)
        async with (
            real_front(redis_url, tmp_path, text, accountants=[charges], dispatcher=dispatcher) as front,
            started(front.batches),
        ):
            owner = BatchClient(front)
            batch = await owner.ended(await owner.create(await owner.upload(lines)))
            assert all(request.is_background for request in dispatcher.requests)
            output = {one["custom_id"]: one["response"]["body"] for one in await owner.lines(batch["output_file_id"])}
            for one in lines:
                direct = await owner.done("POST", "/v1/completions", json=one["body"])
                assert output[one["custom_id"]]["choices"] == direct["choices"]
            assert len(output) == 9 and set(charges.complete.values()) == {2}
