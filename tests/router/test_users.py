"""Users of a tenant by HTTP, on a real registry: their keys, their private adapters, and what others see of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from redis.asyncio import Redis
from safetensors.torch import save

from motet.adapters.registry.ledger.entry import Entry, Stage
from motet.cluster.client_commands.usage_commands import limit_lines
from motet.router.tenancy.quotas import Quotas
from motet.router.usage.usage import UsageService
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.quota_rig import A_WHILE_S
from motet.tests.rigs.router_rig import BASE, OPERATOR_KEY
from motet.tests.rigs.tenants_rig import TenantsRig

TENANTS, ADAPTERS, MODELS, KEYS, AUDIT = (
    "/v1/admin/tenants",
    "/v1/adapters",
    "/v1/models",
    "/v1/keys",
    "/v1/admin/audit",
)
EVE: Final = "eve@id.example"


class Users(TenantsRig):
    """With a tenant, and keys of an administrator, of two users and of none."""

    admin = ann = eve = plain = ""

    async def begin(self) -> None:
        await self.done("POST", "/v1/admin/tenants", json={"name": "acme"})
        self.admin = await self.make_key("acme", "admin", "infer", "upload", "metrics")
        self.ann, self.eve = [await self.make_key("acme", user=user) for user in ("ann", EVE)]
        self.plain = await self.make_key("acme")

    async def upload(self, key: str, name: str, seed: int = 1, **fields: Any) -> Any:
        return await self.done("POST", ADAPTERS, key, **upload_form(name, seed, **fields))

    async def names(self, key: str, path: str = ADAPTERS) -> list[str]:
        found = (await self.done("GET", path, key))["data"]
        return [one.get("name") or one["id"] for one in found if one.get("id") != BASE]

    async def answer(self, key: str, model: str) -> tuple[int, str]:
        """Status of a completion, and the version that answered, or the error."""
        answer = await self.ask("POST", "/v1/completions", key, json={"model": model, "prompt": "hi", "max_tokens": 1})
        shown = answer.headers.get("x-motet-version") or answer.json().get("error", {}).get("message", "")
        return answer.status_code, shown


def missing(model: str) -> tuple[int, str]:
    return 404, f"The model `{model}` does not exist or you do not have access to it."


def upload_form(name: str, seed: int, **fields: Any) -> dict[str, Any]:
    files = lora_files(seed=seed)
    form = {
        "adapter_config.json": ("c", files.config_bytes),
        "adapter_model.safetensors": ("t", save(files.tensors)),
    }
    return {"data": {"name": name, **fields}, "files": form}


@pytest.fixture
async def rig(redis_client: Redis, tmp_path: Path) -> AsyncIterator[Users]:
    async with Users(redis_client, tmp_path) as rig:
        await rig.begin()
        yield rig


async def test_a_key_is_a_users_for_good(rig: Users) -> None:
    made = await rig.done("POST", KEYS, rig.admin, json={"user": "ann", "label": "laptop"})
    assert made["user"] == "ann"
    turned = await rig.done("POST", f"{KEYS}/{made['id']}/rotate", rig.admin)
    assert turned["user"] == turned["replaces"]["user"] == "ann"
    assert await rig.refused("PATCH", f"/v1/admin/keys/{made['id']}", json={"user": "bob"}) == (400, "invalid_value")
    for path, key in ((KEYS, rig.admin), ("/v1/admin/tenants/acme/keys", None)):
        more = {} if key is None else {"key": key}
        of_ann = (await rig.done("GET", f"{path}?user=ann", **more))["data"]
        assert len(of_ann) == 3 and {one["user"] for one in of_ann} == {"ann"}
        assert len((await rig.done("GET", path, **more))["data"]) == 6
    for bad in ("", "a/b", "~a", "a b", "x" * 65):
        assert (await rig.ask("POST", KEYS, rig.admin, json={"user": bad})).status_code == 400


async def test_the_audit_log_says_which_user_did_it(rig: Users) -> None:
    await rig.upload(rig.ann, "mine", private="true")
    await rig.upload(rig.eve, "ours")
    await rig.done("DELETE", f"{ADAPTERS}/mine", rig.ann)
    found = (await rig.done("GET", f"{AUDIT}?tenant=acme&user=ann"))["data"]
    assert [(one["action"], one["target"], one["actor"]["user"]) for one in found] == [
        ("adapter.delete", "~ann/mine", "ann"),
        ("adapter.upload", "~ann/mine", "ann"),
    ]
    assert len((await rig.done("GET", f"{AUDIT}?tenant=acme&user=ann&limit=1"))["data"]) == 1
    (eves,) = (await rig.done("GET", f"{AUDIT}?tenant=acme&user={EVE}"))["data"]
    assert eves["target"] == "ours"
    assert await rig.refused("GET", f"{AUDIT}?user=ann") == (400, "invalid_value")
    keys = [one for one in (await rig.done("GET", AUDIT))["data"] if one["action"] == "key.create"]
    assert [one["changed"].get("user") for one in keys] == [None, EVE, "ann", None]


async def test_a_private_adapter_is_its_users_and_the_administrators(rig: Users) -> None:
    made = await rig.upload(rig.eve, "poet", private="true")
    assert made["name"] == f"~{EVE}/poet"
    await rig.upload(rig.ann, "shared", seed=2)
    for path in (ADAPTERS, MODELS):
        assert await rig.names(rig.eve, path) == await rig.names(rig.admin, path) == ["shared", f"~{EVE}/poet"]
        assert await rig.names(rig.ann, path) == await rig.names(rig.plain, path) == ["shared"]
    for key in (rig.eve, rig.admin):
        assert await rig.answer(key, f"~{EVE}/poet") == (200, f"~{EVE}/poet@1")
        assert await rig.answer(key, f"~{EVE}/poet@1") == (200, f"~{EVE}/poet@1")
    assert await rig.answer(rig.eve, "poet") == (200, f"~{EVE}/poet@1")
    for key in (rig.ann, rig.plain, rig.admin):
        assert await rig.answer(key, "poet") == (
            404,
            "The model `poet` does not exist or you do not have access to it.",
        )
    for key in (rig.ann, rig.plain):
        for name in (f"~{EVE}/poet", f"~{EVE}/none", "~absent/poet"):
            assert await rig.answer(key, name) == (
                404,
                f"The model `{name}` does not exist or you do not have access to it.",
            )
            assert await rig.refused("DELETE", f"{ADAPTERS}/{name}", key) == (404, "adapter_not_found")
    shown = await rig.done("GET", f"{ADAPTERS}/poet/versions/1", rig.eve)
    assert (shown["user"], shown["name"]) == (EVE, f"~{EVE}/poet")
    quoted = f"{ADAPTERS}/~eve%40id.example%2Fpoet/versions"
    assert len((await rig.done("GET", quoted, rig.admin))["data"]) == 1
    assert (await rig.done("DELETE", f"{ADAPTERS}/~{EVE}/poet", rig.admin))["name"] == f"~{EVE}/poet"
    assert await rig.names(rig.eve) == ["shared"]


async def test_ones_own_comes_before_the_tenants_of_the_same_name(rig: Users) -> None:
    await rig.upload(rig.ann, "poet")
    await rig.upload(rig.eve, "poet", seed=2, private="true")
    await rig.upload(rig.eve, "poet", seed=3, private="true")
    await rig.upload(rig.ann, "poet", seed=4, private="true")
    assert await rig.answer(rig.eve, "poet") == (200, f"~{EVE}/poet@2")
    assert await rig.answer(rig.eve, "~/poet") == (200, "poet@1")
    assert await rig.answer(rig.eve, "~/poet@2") == (
        404,
        "The model `~/poet@2` does not exist or you do not have access to it.",
    )
    assert await rig.answer(rig.ann, "poet") == (200, "~ann/poet@1")
    assert await rig.answer(rig.plain, "poet") == await rig.answer(rig.admin, "poet") == (200, "poet@1")
    await rig.done("POST", f"{ADAPTERS}/poet/rollback", rig.eve, json={})
    assert await rig.answer(rig.eve, "poet") == (200, f"~{EVE}/poet@1")
    await rig.done("PUT", f"{ADAPTERS}/~/poet/aliases/prod", rig.eve, json={"version": 1})
    assert await rig.answer(rig.ann, "~/poet@prod") == (200, "poet@1")
    await rig.done("DELETE", f"{ADAPTERS}/poet", rig.eve)
    assert await rig.answer(rig.eve, "poet") == (200, "poet@1")
    assert await rig.names(rig.eve) == ["poet"]


async def test_who_may_upload_what(rig: Users) -> None:
    refused: dict[str, list[tuple[str, dict[str, str]]]] = {
        rig.plain: [("x", {"private": "true"}), ("~ann/x", {}), ("~/x", {"private": "true"})],
        rig.ann: [(f"~{EVE}/x", {}), ("~/x", {"private": "true"}), ("x", {"private": "yes"})],
        rig.admin: [("~a b/x", {}), ("~ann/a/b/c", {})],
    }
    for key, forms in refused.items():
        for name, fields in forms:
            answer = await rig.ask("POST", ADAPTERS, key, **upload_form(name, 1, **fields))
            assert answer.status_code == 400, (name, answer.text)
    assert await rig.names(rig.admin) == []
    assert (await rig.upload(rig.ann, "~ann/x"))["name"] == "~ann/x"
    assert (await rig.upload(rig.ann, "~/x"))["name"] == "x"
    assert (await rig.upload(rig.admin, f"~{EVE}/x"))["name"] == f"~{EVE}/x"
    assert (await rig.done("GET", f"{ADAPTERS}/x/versions/1", rig.eve))["user"] == EVE


async def test_an_upload_shows_nothing_of_anothers_equal_content(rig: Users) -> None:
    """The answer is that of new content, and so is the KV's salt, and what may be learnt of the place."""
    first = await rig.ask("POST", ADAPTERS, rig.ann, **upload_form("poet", 1, private="true"))
    second = await rig.ask("POST", ADAPTERS, rig.eve, **upload_form("poet", 1, private="true"))
    assert first.status_code == second.status_code == 201
    assert first.json()["digest"] == second.json()["digest"]
    await rig.upload(rig.ann, "ours", seed=1)
    for key, model in ((rig.ann, "poet"), (rig.eve, "poet"), (rig.ann, "ours"), (rig.eve, "ours")):
        assert (await rig.answer(key, model))[0] == 200
    sent = rig.dispatcher.submitted
    assert len({one.adapter.digest for one in sent if one.adapter is not None}) == 1
    assert [one.owner for one in sent] == ["ann", EVE, "", ""]
    assert len({one.cache_salt for one in sent}) == 3
    assert [one.adapter_name for one in sent] == ["", "", "ours", "ours"]  # metrics have no label of a user


async def test_a_stream_of_anothers_private_adapter_is_not_resumed(rig: Users) -> None:
    """Not by one of equal name and content either, even with the event's id."""
    for key in (rig.ann, rig.eve):
        await rig.upload(key, "poet", private="true")
    ask = {"json": {"model": "poet", "prompt": "hi", "max_tokens": 2, "stream": True}}
    stream = await rig.ask("POST", "/v1/completions", rig.ann, **ask)
    position = next(line.removeprefix("id: ") for line in stream.text.splitlines() if line.startswith("id: "))
    for key, expected in ((rig.ann, 200), (rig.eve, 400), (rig.plain, 404)):
        answer = await rig.ask_from(position, "/v1/completions", key, **ask)
        assert answer.status_code == expected, answer.text


async def test_adapters_of_the_servers_folders_are_users_as_uploads_are(rig: Users, tmp_path: Path) -> None:
    folder = tmp_path / "allowed" / "poet"
    folder.mkdir(parents=True)
    lora_files(seed=9).write(folder).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(lora_files(seed=9).config_bytes)
    rig.config.now = replace(rig.config.now, adapter_folders=str(folder.parent))

    async def load(key: str, name: str) -> tuple[int, str]:
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = await rig.ask("POST", "/v1/load_lora_adapter", key, json=body)
        return answer.status_code, answer.text.replace(name, "*")

    await rig.upload(rig.eve, "poet", private="true")
    await rig.upload(rig.eve, "secret", private="true")
    assert (await load(rig.eve, "poet"))[0] == 200  # the tenant's, beside her own
    assert await rig.answer(rig.ann, "poet") == (200, "poet@1")
    assert await rig.answer(rig.eve, "poet") == (200, f"~{EVE}/poet@1")
    assert (await load(rig.ann, "poet"))[0] == 409
    theirs, unowned = await load(rig.ann, f"~{EVE}/secret"), await load(rig.ann, f"~{EVE}/absent")
    assert theirs == unowned and theirs[0] == 400
    assert (await load(rig.ann, "~ann/own"))[0] == 200 and (await rig.answer(rig.ann, "own"))[1] == "~ann/own@1"
    reported = []
    for name in (f"~{EVE}/secret", f"~{EVE}/absent"):
        answer = await rig.ask("POST", "/v1/unload_lora_adapter", rig.ann, json={"lora_name": name})
        reported.append((answer.status_code, answer.text.replace(name, "*")))
    assert reported[0] == reported[1] and reported[0][0] == 404


async def test_a_salt_that_a_client_chooses_reaches_no_private_kv(rig: Users) -> None:
    await rig.upload(rig.ann, "poet", private="true")
    await rig.upload(rig.ann, "poet")
    ask = {"prompt": "hi", "max_tokens": 1}
    await rig.done("POST", "/v1/completions", rig.ann, json={"model": "poet", "cache_salt": "s", **ask})
    private = rig.dispatcher.submitted[-1].cache_salt
    for salt in (private, private[1:], "~ann/0:s", "ann/0:s", "s"):
        await rig.done("POST", "/v1/completions", rig.eve, json={"model": "poet", "cache_salt": salt, **ask})
        assert rig.dispatcher.submitted[-1].cache_salt != private


SPAN = "from=2026-11-01&to=2026-12-01"


@pytest.fixture
async def metered(redis_client: Redis, tmp_path: Path) -> AsyncIterator[Users]:
    """Four answers: two of ann's, by her own adapter and by the base, one of eve's by hers, and one of no user's."""
    folder = tmp_path / "ledger"
    usage = UsageService(redis_client, folder, folder, kept_days=3, spool_bytes=1 << 30, min_free_bytes=0, prices=None)
    fixed: dict[str, Any] = {"tenant": "acme", "began_at": 1795168800, "stage": Stage.COMPLETE}
    fixed |= {"requests": 1, "output_tokens": 5}
    answers = [("ann", "~ann/poet", 1), ("ann", "tiny", 0), (EVE, f"~{EVE}/poet", 1), ("", "tiny", 0)]
    await usage.ledger.take(
        [
            Entry(id=f"cmpl-{number}", key_id=f"k{number}", user=user, adapter=adapter, version=version, **fixed)
            for number, (user, adapter, version) in enumerate(answers)
        ]
    )
    async with Users(redis_client, tmp_path, more_routes=usage.routes) as rig:
        await rig.begin()
        yield rig


async def test_usage_by_user(metered: Users) -> None:
    async def used(key: str, by: str) -> list[tuple[Any, ...]]:
        found = await metered.done("GET", f"/v1/usage?by={by}&{SPAN}", key)
        assert found["total"]["requests"] == sum(row["requests"] for row in found["data"])
        return [(*(row[field] for field in by.split(",")), row["requests"]) for row in found["data"]]

    by_users = [("", 1), ("ann", 2), (EVE, 1)]
    assert await used(metered.admin, "user") == by_users
    assert await used(metered.plain, "user") == [("", 1), ("(private)", 2), ("ann", 1)]
    assert await used(metered.ann, "user") == [("ann", 2)]
    assert await used(metered.eve, "user,adapter") == [(EVE, f"~{EVE}/poet", 1)]
    assert await used(metered.admin, "adapter") == [("tiny", 2), ("~ann/poet", 1), (f"~{EVE}/poet", 1)]
    assert await used(metered.plain, "adapter") == [("(private)", 2), ("tiny", 2)]  # without their owners
    csv = await metered.ask("GET", f"/v1/usage?by=adapter,key&format=csv&{SPAN}", metered.ann)
    assert "~ann/poet" in csv.text and EVE not in csv.text and "k2" not in csv.text
    (row,) = (await metered.done("GET", f"/v1/admin/usage?by=tenant&{SPAN}"))["data"]
    assert row["requests"] == 4
    operators = (await metered.done("GET", f"/v1/admin/usage?by=tenant,user&{SPAN}"))["data"]
    assert [(row["tenant"], row["user"], row["requests"]) for row in operators] == [("acme", *row) for row in by_users]


@pytest.fixture
async def bounded(redis_client: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Users]:
    """Where each user may have three requests a minute, two adapters, and as many bytes as two take."""
    quotas = Quotas(redis_client, lambda: 1, wait_s=A_WHILE_S)
    quotas.start()
    async with Users(redis_client, tmp_path, quotas=quotas) as rig:
        await rig.begin()
        bounds = {"requests_per_minute": 3, "adapters": 2, "stored_bytes": 30_000}
        changed = await rig.done("PATCH", f"{TENANTS}/acme", json={"user_quota": bounds})
        assert changed["user_quota"]["adapters"] == 2 and changed["quota"]["adapters"] is None
        yield rig
    await quotas.stop()


async def test_all_keys_of_a_user_have_one_quota(bounded: Users) -> None:
    """And another user has his own; a key that is no user's has none, and its own quota binds a key besides."""
    second = await bounded.make_key("acme", user="ann", quota={"requests_per_minute": 1})
    assert (await bounded.answer(second, BASE))[0] == 200
    assert (await bounded.answer(second, BASE))[0] == 429
    for _ in range(2):
        assert (await bounded.answer(bounded.ann, BASE))[0] == 200
    status, message = await bounded.answer(bounded.ann, BASE)
    assert status == 429 and "this user's requests a minute: limit 3" in message
    assert (await bounded.answer(bounded.eve, BASE))[0] == 200
    for _ in range(5):
        assert (await bounded.answer(bounded.plain, BASE))[0] == 200
    limits = await bounded.done("GET", "/v1/limits", bounded.ann)
    assert (
        limits["user"]["requests_per_minute"]["remaining"] == 0 and limits["user"]["requests_per_minute"]["limit"] == 3
    )
    assert limits["key"]["requests_per_minute"]["limit"] is None
    assert (await bounded.done("GET", "/v1/limits", bounded.plain))["user"] is None
    assert any("user" in line for line in limit_lines(limits))


async def test_what_a_user_stores_is_bounded(bounded: Users) -> None:
    """Over all keys: the private adapters, also those that an administrator uploads, and uploads for the tenant."""
    second = await bounded.make_key("acme", user="ann")
    await bounded.upload(bounded.ann, "a", seed=1, private="true")
    await bounded.upload(second, "b", seed=2)
    for key, name in ((bounded.ann, "c"), (second, "~ann/c"), (bounded.admin, "~ann/c")):
        refused = await bounded.ask("POST", ADAPTERS, key, **upload_form(name, 3))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert "this user's quota is 2" in refused.json()["error"]["message"]
    await bounded.upload(bounded.eve, "c", seed=3, private="true")
    await bounded.upload(bounded.plain, "c", seed=3)
    limits = (await bounded.done("GET", "/v1/limits", second))["user"]
    assert limits["adapters"] == {"limit": 2, "remaining": 0, "reset_s": None}
    assert limits["stored_bytes"]["remaining"] == 30_000 - 2 * 9216
    await bounded.upload(bounded.ann, "a", seed=4, private="true")
    refused = await bounded.ask("POST", ADAPTERS, second, **upload_form("b", 5))
    assert "over this user's quota of 30000" in refused.json()["error"]["message"]
    await bounded.done("DELETE", f"{ADAPTERS}/~ann/a", bounded.admin)
    assert (await bounded.done("GET", "/v1/limits", second))["user"]["adapters"]["remaining"] == 1


async def test_quotas_of_users_that_cannot_be(bounded: Users) -> None:
    for quota in ({"pinned_bytes": 1}, {"adapters": -1}, {"adapter": 1}):
        assert await bounded.refused("PATCH", f"{TENANTS}/acme", json={"user_quota": quota}) == (400, "invalid_value")
    kept = await bounded.done("PATCH", f"{TENANTS}/acme", json={"user_quota": {"adapters": None}})
    assert (kept["user_quota"]["adapters"], kept["user_quota"]["requests_per_minute"]) == (None, 3)


async def test_users_are_listed_by_pages(rig: Users) -> None:
    await rig.upload(rig.admin, "~a/x")
    await rig.upload(rig.admin, "~a-b/x", seed=2)
    await rig.upload(rig.ann, "y", seed=3)
    expected = [("a-b", 0, 1), ("a", 0, 1), ("ann", 1, 1), (EVE, 1, 0)]
    for path, key in (("/v1/users", rig.admin), (f"{TENANTS}/acme/users", OPERATOR_KEY)):
        for limit in (1, 2, 10):
            found: list[Any] = []
            more, after = True, ""
            while more:
                page = await rig.done("GET", f"{path}?limit={limit}&after={after}", key)
                found += page["data"]
                more, after = page["has_more"], page["last_id"]
            assert [(one["name"], one["num_keys"], one["adapters"]) for one in found] == expected
    assert found[0]["stored_bytes"] == 9216
    assert await rig.refused("GET", "/v1/users", rig.ann) == (403, "missing_scope")
    assert await rig.refused("GET", f"{TENANTS}/none/users") == (404, "tenant_not_found")


async def test_a_deleted_user_has_nothing_left_but_usage(rig: Users) -> None:
    second = await rig.make_key("acme", user="ann")
    for number in range(3):
        await rig.upload(rig.ann, f"n{number}", private="true")
    await rig.upload(rig.ann, "n1", seed=2)
    await rig.upload(rig.eve, "n1", seed=3, private="true")
    gone = await rig.done("DELETE", "/v1/users/ann", rig.admin)
    assert (gone["num_keys"], gone["num_adapters"]) == (2, 3)
    for key in (rig.ann, second):
        assert await rig.refused("GET", MODELS, key) == (401, "invalid_api_key")
    assert await rig.names(rig.admin) == ["n1", f"~{EVE}/n1"]  # the tenant's stays
    assert (await rig.answer(rig.eve, "n1"))[0] == 200
    assert await rig.refused("DELETE", "/v1/users/ann", rig.admin) == (404, "user_not_found")
    (entry,) = [one for one in (await rig.done("GET", AUDIT))["data"] if one["action"] == "user.delete"]
    assert (entry["target"], entry["tenant"], entry["actor"]["kind"]) == ("ann", "acme", "key")
    again = await rig.make_key("acme", user="ann")
    assert await rig.names(again) == ["n1"] and (await rig.answer(again, "~ann/n0"))[0] == 404
    assert (await rig.done("DELETE", f"{TENANTS}/acme/users/{EVE}"))["num_adapters"] == 1
    assert await rig.names(rig.admin) == ["n1"]
    for user in ("absent", "~", "%00", "a b"):
        assert await rig.refused("DELETE", f"/v1/users/{user}", rig.admin) == (404, "user_not_found")


async def test_a_deleted_tenants_private_adapters_are_not_the_next_ones(rig: Users) -> None:
    await rig.upload(rig.ann, "poet", private="true")
    await rig.done("DELETE", "/v1/admin/tenants/acme")
    await rig.begin()
    assert await rig.names(rig.ann) == await rig.names(rig.admin) == []
    assert (await rig.answer(rig.ann, "poet"))[0] == 404


async def test_names_may_have_a_slash_as_hub_ids_have(rig: Users) -> None:
    """In a path it is sent as %2F, so that no name is taken for a route."""
    for name in ("org/poet", "~ann/org/poet", "org/versions", "org"):
        await rig.upload(rig.admin, name)
    for name in ("a/b/c", "/a", "a/", "a//b", "-a/b", "a/-b", "a/.."):
        answer = await rig.ask("POST", ADAPTERS, rig.admin, **upload_form(name, 1))
        assert answer.status_code == 400, name
    assert (await rig.upload(rig.admin, "org/poet", seed=2))["version"] == 2
    for name in ("org/poet", "org/poet@2", "org/poet@1", "~ann/org/poet@1", "org/versions"):
        assert (await rig.answer(rig.admin, name))[0] == 200, name
    assert await rig.answer(rig.admin, "org/other") == missing("org/other")
    for path, name in (
        ("org%2Fpoet", "org/poet"),
        ("org%2fpoet/", "org/poet"),
        ("~ann%2Forg%2Fpoet", "~ann/org/poet"),
        ("~ann/org%2Fpoet", "~ann/org/poet"),
        ("org%2Fversions", "org/versions"),
    ):
        assert (await rig.done("GET", f"{ADAPTERS}/{path}", rig.admin))["name"] == name
    assert len((await rig.done("GET", f"{ADAPTERS}/org%2Fpoet/versions", rig.admin))["data"]) == 2
    assert (await rig.done("GET", f"{ADAPTERS}/org%2Fpoet/versions/1", rig.admin))["version"] == 1
    await rig.done("PUT", f"{ADAPTERS}/org%2Fpoet/aliases/prod", rig.admin, json={"version": 1})
    assert await rig.answer(rig.admin, "org/poet@prod") == (200, "org/poet@1")
    assert (await rig.done("GET", f"{ADAPTERS}/org/versions", rig.admin))["data"][0]["version"] == 1  # those of "org"
    assert await rig.refused("GET", f"{ADAPTERS}/org/poet", rig.admin) == (404, "not_found")
    assert (await rig.done("GET", f"{ADAPTERS}/~ann%2Forg%2Fpoet/versions", rig.admin))["data"][0]["version"] == 1
    assert (await rig.done("GET", f"{MODELS}/org/poet", rig.ann))["id"] == "org/poet"
    await rig.done("DELETE", f"{ADAPTERS}/org%2Fpoet", rig.admin)
    assert sorted(await rig.names(rig.admin)) == ["org", "org/versions", "~ann/org/poet"]
