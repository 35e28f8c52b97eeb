"""Files by HTTP on a real registry: what is accepted, visibility, quotas, and that deletion leaves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet.adapters.registry.batches import file_registry
from motet.router.text.text import TextService
from motet.tests.rigs.batch_client import BatchClient, line
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.real_front import (
    ASKER_KEY,
    BADGER_KEY,
    OPERATOR_KEY,
    OWNER,
    WOMBAT_KEY,
    RealFront,
    key_without,
    real_front,
)
from motet.tests.rigs.router_rig import text_service

CONTENT = b'{"custom_id": "\xc3\xa9"}\n' * 1000


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def front(redis_url: str, tmp_path: Path, text: TextService) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text) as front:
        yield front


@pytest.fixture
def owner(front: RealFront) -> BatchClient:
    return BatchClient(front)


def on_disk(front: RealFront) -> list[Path]:
    return [path for path in (front.folder / "files").rglob("*") if path.is_file()]


async def stored_bytes(front: RealFront, owner: str = "") -> int:
    return (await front.registry.stored.of(OWNER, owner))[1].stored_bytes


async def test_a_file_is_kept_shown_and_deleted(front: RealFront, owner: BatchClient) -> None:
    before = await stored_bytes(front)
    made = (await owner.send(CONTENT)).json()
    assert made | {"id": 0, "created_at": 0, "expires_at": 0} == {
        "id": 0,
        "object": "file",
        "bytes": len(CONTENT),
        "created_at": 0,
        "expires_at": 0,
        "filename": "work.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert made["expires_at"] - made["created_at"] == 30 * 86_400
    one = f"/v1/files/{made['id']}"
    assert await owner.done("GET", one) == made
    content = await owner.ask("GET", f"{one}/content")
    assert content.content == CONTENT and content.headers["content-length"] == str(len(CONTENT))
    assert await stored_bytes(front) == before + len(CONTENT)
    assert await owner.done("DELETE", one) == {"id": made["id"], "object": "file", "deleted": True}
    assert await stored_bytes(front) == before
    assert not on_disk(front)
    for method, path in (("GET", one), ("GET", f"{one}/content"), ("DELETE", one)):
        assert (await owner.ask(method, path)).json()["error"]["code"] == "file_not_found"


async def test_lists_have_pages_in_either_order(owner: BatchClient) -> None:
    ids = [(await owner.send(b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})).json()]
    assert ids[0]["expires_at"] - ids[0]["created_at"] == 3600
    names = [ids[0]["id"], *[(await owner.send(b"x")).json()["id"] for _ in range(4)]]
    found = await owner.done("GET", "/v1/files", params={"limit": 2})
    assert ([one["id"] for one in found["data"]], found["has_more"]) == (names[:2:-1], True)
    found = await owner.done("GET", "/v1/files", params={"limit": 9, "after": names[3]})
    assert ([one["id"] for one in found["data"]], found["has_more"]) == (names[2::-1], False)
    found = await owner.done("GET", "/v1/files", params={"order": "asc", "after": names[1], "purpose": "batch"})
    assert [one["id"] for one in found["data"]] == names[2:]
    assert (await owner.done("GET", "/v1/files", params={"purpose": "batch_output"}))["data"] == []
    assert (await owner.ask("GET", "/v1/files", params={"order": "up"})).status_code == 400


@pytest.mark.parametrize(
    ("data", "files", "status", "code"),
    [
        ({"purpose": "fine-tune"}, {"file": b"x"}, 400, "invalid_value"),
        ({"purpose": "batch"}, {}, 400, "invalid_form"),
        ({"purpose": "batch"}, {"other": b"x"}, 400, "invalid_form"),
        ({}, {"file": b"x"}, 400, "missing_required_parameter"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, {"file": b"x"}, 400, "invalid_value"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7"},
            {"file": b"x"},
            400,
            "invalid_value",
        ),
        ({"purpose": "batch"}, {"file": b"x" * 2000}, 413, "too_large"),
    ],
)
async def test_wrong_uploads_leave_nothing(
    redis_url: str, tmp_path: Path, text: TextService, data: Any, files: Any, status: int, code: str
) -> None:
    async with real_front(redis_url, tmp_path, text) as front:
        front.config.now = replace(front.config.now, max_file_bytes=1000)
        answer = await BatchClient(front).ask("POST", "/v1/files", data=data, files=files)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert not on_disk(front)


async def test_stored_bytes_bound_files_and_adapters_together(front: RealFront, owner: BatchClient) -> None:
    async def bound(num_bytes: int | None) -> None:
        await BatchClient(front, OPERATOR_KEY).done(
            "PATCH", f"/v1/admin/tenants/{OWNER}", json={"quota": {"stored_bytes": num_bytes}}
        )
        await front.view.catch_up()

    used = await stored_bytes(front)
    await bound(used + 2000)
    assert (await owner.send(b"x" * 1500)).is_success
    refused = await owner.send(b"x" * 501)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert len(on_disk(front)) == 1
    limits = await owner.done("GET", "/v1/limits")
    assert limits["tenant"]["stored_bytes"] == {"limit": used + 2000, "remaining": 500, "reset_s": None}
    files = lora_files(seed=9)
    tensors = await asyncio.to_thread(lambda: files.write(front.folder).read_bytes())
    form = {"adapter_config.json": files.config_bytes, "adapter_model.safetensors": tensors}
    refused = await owner.ask("POST", "/v1/adapters", data={"name": "more"}, files=form)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert f"{used + 1500} bytes are stored" in refused.text


async def test_a_tenant_has_a_bounded_number(
    front: RealFront, owner: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_registry, "MAX_FILES", 2)
    assert [(await owner.send(b"x")).status_code for _ in range(3)] == [200, 200, 429]
    assert len(on_disk(front)) == 2


async def test_no_other_tenant_sees_it(front: RealFront, owner: BatchClient) -> None:
    mine = (await owner.send(CONTENT)).json()["id"]
    badger, wombat = BatchClient(front, BADGER_KEY), BatchClient(front, WOMBAT_KEY)
    plain, admin = BatchClient(front, key_without("admin")), BatchClient(front, ASKER_KEY)
    of_badger = (await badger.send(b"x")).json()["id"]
    of_tenant = (await plain.send(b"x")).json()["id"]
    seen = {badger: {of_badger}, wombat: set(), plain: {of_tenant}, admin: {of_badger, of_tenant}, owner: {mine}}
    for client, ids in seen.items():
        assert {one["id"] for one in (await client.done("GET", "/v1/files"))["data"]} == ids
        for file_id in {mine, of_badger, of_tenant} - ids:
            unowned = "file-" + "0" * (len(file_id) - 5)
            for method, end in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                there = await client.ask(method, f"/v1/files/{file_id}{end}")
                nowhere = await client.ask(method, f"/v1/files/{unowned}{end}")
                assert (there.status_code, there.content) == (nowhere.status_code, nowhere.content)
                assert there.status_code == 404


async def test_expired_and_forgotten_files_are_swept(front: RealFront, owner: BatchClient) -> None:
    kept = (await owner.send(b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})).json()
    gone = (await owner.send(b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})).json()
    place = f"{OWNER}/{gone['id']}"
    await front.redis.zadd("motet:{registry}:file_ends", {place: 1})
    before = await stored_bytes(front)
    orphan = front.batches.store.path(OWNER, "file-unknown")
    orphan.write_bytes(b"x")
    assert await front.batches.sweep.sweep(orphan_s=-60)
    assert [path.name for path in on_disk(front)] == [kept["id"]]
    assert await stored_bytes(front) == before - 1
    assert (await owner.ask("GET", f"/v1/files/{gone['id']}")).status_code == 404
    assert await front.redis.zrange("motet:{registry}:file_ends", 0, -1) == [f"{OWNER}/{kept['id']}"]


async def test_what_has_expired_is_not_there_though_it_is_not_swept_yet(
    front: RealFront, owner: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    gone, kept = (await owner.send(b"x", **short)).json()["id"], (await owner.send(b"x")).json()["id"]
    monkeypatch.setattr(front.batches._files_api, "_clock", lambda: time.time() + 3601)
    assert [file["id"] for file in (await owner.done("GET", "/v1/files"))["data"]] == [kept]
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert (await owner.ask(method, f"/v1/files/{gone}{path}")).status_code == 404
    body = {"input_file_id": gone, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await owner.ask("POST", "/v1/batches", json=body)).status_code == 404


async def test_results_of_a_batch_that_ends_while_files_are_swept_stay(
    front: RealFront, owner: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers may be older than a day by then: it has waited for gangs since."""
    batch_id = await owner.create(await owner.upload([line("a")]))
    read = front.batches.batches.pages_of

    async def pages_of(tenant_id: str) -> AsyncIterator[Any]:
        front.batches._worker.start()  # alone: what `start` begins beside it would sweep, too, and come here again
        try:
            await owner.ended(batch_id)
        finally:
            await front.batches._worker.stop()
        async for page in read(tenant_id):
            yield page

    orphan = front.batches.store.path(OWNER, "file-unknown")
    orphan.write_bytes(b"x")
    monkeypatch.setattr(front.batches.sweep, "_batches", SimpleNamespace(pages_of=pages_of))
    monkeypatch.setattr(front.batches.store, "old_files", lambda older_than_s: iter(all_files(front, batch_id)))
    assert await front.batches.sweep.sweep()
    batch = await owner.batch(batch_id)
    assert len(await owner.lines(batch["output_file_id"])) == 1
    assert not orphan.exists()


def all_files(front: RealFront, batch_id: str) -> list[tuple[str, list[str]]]:
    """As `old_files` finds them, with that of a batch's answers, as if it were there already."""
    return [(OWNER, [*(path.name for path in on_disk(front)), f"file-{batch_id.removeprefix('batch_')}o"])]


async def test_files_go_with_their_user_and_their_tenant(front: RealFront) -> None:
    badger, admin = BatchClient(front, BADGER_KEY), BatchClient(front, ASKER_KEY)
    await badger.send(b"x")
    await admin.send(b"y")
    await admin.done("DELETE", "/v1/users/badger")
    assert [path.read_bytes() for path in on_disk(front)] == [b"y"]
    await BatchClient(front, OPERATOR_KEY).done("DELETE", "/v1/admin/tenants/tenant-of-moles")
    assert not on_disk(front)
    left = [key async for key in front.redis.scan_iter("motet:{registry}:*file*")]
    assert not left
