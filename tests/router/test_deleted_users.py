"""What is under way when its user is deleted leaves nothing that the next user of that name could see."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from motet.adapters.registry.administration.key_registry import KeyRegistry
from motet.router.text.text import TextService
from motet.tests.rigs.batch_client import BatchClient, line
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.real_front import ASKER, ASKER_KEY, OPERATOR_KEY, RealFront, real_front
from motet.tests.rigs.router_rig import BASE, text_service

CAROL: Final = "carol"
USER: Final = f"/v1/admin/tenants/{ASKER}/users/{CAROL}"
RESPONSE: Final[dict[str, Any]] = {"json": {"model": BASE, "input": "my secret"}}
REFUSED: Final = (401, "invalid_api_key")


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def front(redis_url: str, tmp_path: Path, text: TextService) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text) as front:
        yield front


async def key_of_carol(front: RealFront, **fields: Any) -> str:
    made = await BatchClient(front, ASKER_KEY).done("POST", "/v1/keys", json={"user": CAROL, **fields})
    return str(made["key"])


async def replace_carol(front: RealFront) -> str:
    """Deletes the user, and returns the key of the next one of this name."""
    await BatchClient(front, OPERATOR_KEY).done("DELETE", USER)
    return await key_of_carol(front)


def adapter_form(folder: Path, name: str, **fields: str) -> dict[str, Any]:
    files = lora_files(seed=7)
    tensors = files.write(folder).read_bytes()
    form = {"adapter_config.json": files.config_bytes, "adapter_model.safetensors": tensors}
    return {"data": {"name": name, **fields}, "files": form}


async def ask_late(
    front: RealFront, key: str, path: str, meanwhile: Callable[[], Awaitable[object]], **options: Any
) -> tuple[int, str]:
    """Status, and code of the error, of a POST. `meanwhile` runs when it is admitted and half of its body is sent."""
    async with front.client() as client:
        whole = client.build_request("POST", path, headers={"Authorization": f"Bearer {key}"}, **options)
        body = await whole.aread()

        async def halves() -> AsyncIterator[bytes]:
            yield body[: len(body) // 2]
            await meanwhile()
            yield body[len(body) // 2 :]

        answer = await client.send(httpx.Request("POST", whole.url, headers=whole.headers, content=halves()))
    return answer.status_code, (answer.json().get("error") or {}).get("code", "")


def on_disk(front: RealFront) -> list[Path]:
    return [path for name in ("files", "responses") for path in (front.folder / name).rglob("*") if path.is_file()]


async def left_of_carol(front: RealFront, key: str) -> list[str]:
    """What the user sees, is charged for, or has on the disk."""
    carol, left = BatchClient(front, key), [str(path) for path in on_disk(front)]
    for path in ("/v1/files", "/v1/batches", "/v1/adapters"):
        left += [str(one) for one in (await carol.done("GET", path))["data"] if one.get("name") != "moles-adapter"]
    left += [one async for one in front.redis.scan_iter("motet:{registry}:responses:*")]
    use = (await front.registry.stored.of(ASKER, f"~{CAROL}"))[1]
    return [*left, *([str(use)] if use.stored_bytes else [])]


@pytest.mark.parametrize("work", ["response", "file", "private adapter", "adapter of the tenant"])
async def test_what_is_under_way_is_refused(front: RealFront, tmp_path: Path, work: str) -> None:
    path, options = {
        "response": ("/v1/responses", RESPONSE),
        "file": ("/v1/files", {"data": {"purpose": "batch"}, "files": {"file": ("f", b"my secret" * 1000)}}),
        "private adapter": ("/v1/adapters", adapter_form(tmp_path, "poet", private="true")),
        "adapter of the tenant": ("/v1/adapters", adapter_form(tmp_path, "poet")),
    }[work]
    key, next_key = await key_of_carol(front), ""

    async def meanwhile() -> None:
        nonlocal next_key
        next_key = await replace_carol(front)

    assert await ask_late(front, key, path, meanwhile, **options) == REFUSED
    assert not await left_of_carol(front, next_key)
    async with front.client() as client:
        own = await client.post(path, headers={"Authorization": f"Bearer {next_key}"}, **options)
    assert own.is_success and await left_of_carol(front, next_key), own.text


async def test_a_batch_under_way_is_refused(front: RealFront) -> None:
    """Its file is another's, as an administrator may name it."""
    file_id = await BatchClient(front, ASKER_KEY).upload([line("a")])
    key, next_key = await key_of_carol(front, scopes=["infer", "admin"]), ""

    async def meanwhile() -> None:
        nonlocal next_key
        next_key = await replace_carol(front)

    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert await ask_late(front, key, "/v1/batches", meanwhile, json=body) == REFUSED
    assert (await BatchClient(front, next_key).done("GET", "/v1/batches"))["data"] == []


async def test_an_administrators_upload_for_a_deleted_user_is_refused(front: RealFront, tmp_path: Path) -> None:
    await key_of_carol(front)
    form = adapter_form(tmp_path, f"~{CAROL}/poet")
    status, code = await ask_late(front, ASKER_KEY, "/v1/adapters", lambda: replace_carol(front), **form)
    assert (status, code) == (400, "invalid_adapter")
    again = await BatchClient(front, ASKER_KEY).ask("POST", "/v1/adapters", **form)
    assert again.status_code == 201, again.text


async def test_a_router_without_news_of_the_deletion_stores_nothing(
    front: RealFront, redis_url: str, tmp_path: Path, text: TextService
) -> None:
    key = await key_of_carol(front)
    async with real_front(redis_url, tmp_path, text, is_first=False) as other:
        assert (await BatchClient(other, key).ask("POST", "/v1/responses", **RESPONSE)).is_success
        await other.view.stop()
        next_key = await replace_carol(front)
        late = await BatchClient(other, key).ask("POST", "/v1/responses", **RESPONSE)
    assert (late.status_code, late.json()["error"]["code"]) == REFUSED
    assert not await left_of_carol(front, next_key)


async def test_a_user_of_whom_nothing_is_known_yet(front: RealFront) -> None:
    """As one with tokens alone, whose first response is under way."""
    made = await BatchClient(front, ASKER_KEY).done("POST", "/v1/keys", json={"user": CAROL})

    async def meanwhile() -> None:
        await BatchClient(front, ASKER_KEY).done("DELETE", f"/v1/keys/{made['id']}")
        absent = await BatchClient(front, OPERATOR_KEY).ask("DELETE", USER)
        assert absent.status_code == 404

    assert await ask_late(front, made["key"], "/v1/responses", meanwhile, **RESPONSE) == REFUSED
    assert not await left_of_carol(front, await key_of_carol(front))
    found = (await BatchClient(front, OPERATOR_KEY).done("GET", "/v1/admin/audit"))["data"]
    assert "user.delete" not in [one["action"] for one in found], json.dumps(found)


async def test_others_work_goes_on(front: RealFront) -> None:
    key = await key_of_carol(front)
    others = await BatchClient(front, ASKER_KEY).done("POST", "/v1/keys", json={"user": "carola"})
    assert (await ask_late(front, others["key"], "/v1/responses", lambda: replace_carol(front), **RESPONSE))[0] == 200
    assert (await ask_late(front, ASKER_KEY, "/v1/responses", lambda: replace_carol(front), **RESPONSE))[0] == 200
    assert len(on_disk(front)) == 2 and key


async def test_few_deletions_are_kept_and_older_ones_count_for_all(front: RealFront) -> None:
    """Of 10,000 users. Requests that were admitted before the oldest of these are refused, and no others."""
    key, kept = await key_of_carol(front), f"motet:{{registry}}:ended_users:{ASKER}"
    first = await front.registry.num_events() + 1

    async def meanwhile() -> None:
        await front.redis.zadd(kept, {f"user{number}": first + number for number in range(10_000)})
        await front.redis.set("motet:{registry}:event_number", first + 10_000)
        await BatchClient(front, OPERATOR_KEY).ask("DELETE", USER.replace(CAROL, "another"))

    assert await ask_late(front, key, "/v1/responses", meanwhile, **RESPONSE) == REFUSED
    assert await front.redis.zcard(kept) == 10_000 and await front.redis.zscore(kept, "") == first + 1
    assert (await BatchClient(front, key).ask("POST", "/v1/responses", **RESPONSE)).is_success


async def test_one_users_batches_end_without_the_user(front: RealFront) -> None:
    keys = [await key_of_carol(front), ASKER_KEY]
    carol, admin = (BatchClient(front, key) for key in keys)
    for client in (carol, carol, admin):
        await client.create(await client.upload([line("a")]))
    operators, path = BatchClient(front, OPERATOR_KEY), f"/v1/users/{CAROL}/batches/cancel"
    assert (await carol.ask("POST", path)).status_code == 403
    first, second = await admin.done("POST", path), await operators.done("POST", f"{USER}/batches/cancel")
    assert first == second == {"user": CAROL, "object": "batches", "num_batches": 2}
    shown = (await admin.done("GET", "/v1/batches"))["data"]
    assert [one["status"] for one in shown] == ["validating", "cancelling", "cancelling"]
    front.batches.start()
    try:
        for one in shown:
            await admin.ended(one["id"])
    finally:
        await front.batches.stop()
    assert [one["status"] for one in (await carol.done("GET", "/v1/batches"))["data"]] == ["cancelled"] * 2
    again = await admin.ask("POST", path)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "batch_not_found")


@pytest.mark.parametrize("work", ["/v1/keys", "/v1/keys/{key}/rotate"])
@pytest.mark.parametrize("deleted", [USER, f"/v1/admin/tenants/{ASKER}"])
async def test_an_administrator_that_is_deleted_leaves_no_key(front: RealFront, work: str, deleted: str) -> None:
    """Nor does one of a tenant that was deleted, and of whose name there is another one."""
    operators, keys = BatchClient(front, OPERATOR_KEY), f"/v1/admin/tenants/{ASKER}/keys"
    await operators.done("PATCH", f"/v1/admin/tenants/{ASKER}", json={"label": "moles"})
    key = await key_of_carol(front, scopes=["infer", "admin"])
    kept = await operators.done("POST", keys, json={"scopes": ["infer"]})
    before = {one["id"] for one in (await operators.done("GET", keys))["data"]}
    body = {"overlap_s": 3600} if "rotate" in work else {"label": "a way back in", "expires_in_s": 3600}

    async def meanwhile() -> None:
        await operators.done("DELETE", deleted)
        if deleted != USER:
            await operators.done("POST", "/v1/admin/tenants", json={"name": ASKER})

    path = work.replace("{key}", kept["id"])
    assert (await ask_late(front, key, path, meanwhile, json=body))[0] in ((401,) if deleted == USER else (401, 404))
    assert {one["id"] for one in (await operators.done("GET", keys))["data"]} <= before


@pytest.mark.parametrize("work", ["rotate", "create"])
async def test_a_key_that_comes_while_its_user_is_deleted_goes_too(
    front: RealFront, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """The user makes it with its own key after the deletion has listed its keys."""
    key, late = await key_of_carol(front, scopes=["infer", "admin"]), list[str]()
    (listed,) = (await BatchClient(front, ASKER_KEY).done("GET", f"/v1/keys?user={CAROL}"))["data"]
    path, body = {
        "rotate": (f"/v1/keys/{listed['id']}/rotate", {"overlap_s": 3600}),
        "create": ("/v1/keys", {"user": CAROL, "expires_in_s": 3600}),
    }[work]
    delete_of_user = KeyRegistry.delete_of_user

    async def late_key_first(self: KeyRegistry, *arguments: Any) -> int:
        if not late:
            late.append(str((await BatchClient(front, key).done("POST", path, json=body))["key"]))
        return await delete_of_user(self, *arguments)

    monkeypatch.setattr(KeyRegistry, "delete_of_user", late_key_first)
    done = await BatchClient(front, OPERATOR_KEY).done("DELETE", USER)
    assert done["num_keys"] == 2
    for one in (key, *late):
        assert (await BatchClient(front, one).ask("GET", "/v1/models")).status_code == 401


@pytest.mark.parametrize("work", ["note", "alias", "pin", "delete"])
async def test_a_router_without_news_of_the_deletion_changes_nothing(
    front: RealFront, redis_url: str, tmp_path: Path, text: TextService, work: str
) -> None:
    """Neither the tenant's adapter nor the private one of the next user of that name."""
    changes: dict[str, tuple[str, str, dict[str, Any]]] = {
        "note": ("PATCH", "/versions/1", {"json": {"note": "mine"}}),
        "alias": ("PUT", "/aliases/prod", {"json": {"version": 1}}),
        "pin": ("PUT", "/pin", {"json": {}}),
        "delete": ("DELETE", "", {}),
    }
    method, path, fields = changes[work]
    key, admin = await key_of_carol(front), BatchClient(front, ASKER_KEY)
    await admin.done("POST", "/v1/adapters", **adapter_form(tmp_path, "shared"))
    async with real_front(redis_url, tmp_path, text, is_first=False) as other:
        await other.view.stop()
        await replace_carol(front)
        await admin.done("POST", "/v1/adapters", **adapter_form(tmp_path, f"~{CAROL}/poet"))
        before = await front.stored()
        for name in ("shared", "poet"):
            late = await BatchClient(other, key).ask(method, f"/v1/adapters/{name}{path}", **fields)
            assert (late.status_code, late.json()["error"]["code"]) == REFUSED
    assert await front.stored() == before


async def test_an_administrator_that_is_deleted_deletes_no_key(
    front: RealFront, redis_url: str, tmp_path: Path, text: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await key_of_carol(front, scopes=["infer", "admin"])
    other = await BatchClient(front, ASKER_KEY).done("POST", "/v1/keys", json={"user": "dave"})
    delete = KeyRegistry.delete

    async def user_first(self: KeyRegistry, *arguments: Any) -> None:
        await BatchClient(front, OPERATOR_KEY).done("DELETE", USER)
        await delete(self, *arguments)

    monkeypatch.setattr(KeyRegistry, "delete", user_first)
    late = await BatchClient(front, key).ask("DELETE", f"/v1/keys/{other['id']}")
    assert (late.status_code, late.json()["error"]["code"]) == REFUSED
    assert (await BatchClient(front, other["key"]).ask("GET", "/v1/models")).is_success


async def test_cancelled_batches_are_in_the_audit_log_once(front: RealFront) -> None:
    carol, admin = BatchClient(front, await key_of_carol(front)), BatchClient(front, ASKER_KEY)
    operators = BatchClient(front, OPERATOR_KEY)
    first = await carol.create(await carol.upload([line("a")]))
    await operators.done("POST", f"{USER}/batches/cancel")
    second = await carol.create(await carol.upload([line("a")]))
    await admin.done("POST", f"/v1/users/{CAROL}/batches/cancel")
    shown = (await operators.done("GET", "/v1/admin/audit"))["data"]
    entries = [one for one in shown if one["action"] == "batch.cancel"]
    assert [(one["target"], one["actor"]["kind"], one["changed"]) for one in entries] == [
        (second, "key", {"user": CAROL}),
        (first, "operator", {"user": CAROL}),
    ]
