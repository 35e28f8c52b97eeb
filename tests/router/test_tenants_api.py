"""Tenants and keys by HTTP, on a real registry: permissions and effects."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters import names
from motet.adapters.registry.administration import tenant_registry
from motet.adapters.registry.registry import hash_key
from motet.adapters.registry.tenants.records import LOGGER
from motet.cluster.client_commands.tenant_commands import path_of
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.patience import eventually_in_loop
from motet.tests.rigs.router_rig import BASE
from motet.tests.rigs.tenants_rig import TenantsRig

TENANTS, KEYS, OWN, AUDIT = "/v1/admin/tenants", "/v1/admin/keys", "/v1/keys", "/v1/admin/audit"
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture
async def rig(redis_client: Redis, tmp_path: Path) -> AsyncIterator[TenantsRig]:
    async with TenantsRig(redis_client, tmp_path) as rig:
        await rig.done("POST", TENANTS, json={"name": "acme"})
        await rig.done("POST", TENANTS, json={"name": "zoo"})
        yield rig


async def test_a_tenants_life(rig: TenantsRig) -> None:
    made = await rig.done("POST", TENANTS, json={"name": "new", "weight": 2, "quota": {"adapters": 3}, "label": "L"})
    assert (made["weight"], made["state"], made["num_keys"], made["background"]) == (2.0, "active", 0, False)
    assert made["quota"]["adapters"] == 3 and made["quota"]["stored_bytes"] is None
    key = await rig.make_key("new")
    assert (await rig.ask("POST", "/v1/chat/completions", key, json=CHAT)).status_code == 200
    changed = await rig.done("PATCH", f"{TENANTS}/new", json={"background": True, "quota": {"stored_bytes": 5}})
    assert changed["quota"]["adapters"] == 3 and changed["quota"]["stored_bytes"] == 5 and changed["background"]
    assert (await rig.done("POST", f"{TENANTS}/new/suspend"))["state"] == "suspended"
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/adapters")):
        assert await rig.refused(method, path, key, json=CHAT) == (403, "tenant_suspended")
    assert (await rig.done("POST", f"{TENANTS}/new/resume"))["state"] == "active"
    assert (await rig.ask("GET", "/v1/models", key)).status_code == 200
    assert (await rig.done("DELETE", f"{TENANTS}/new"))["deleted"]
    assert await rig.refused("GET", "/v1/models", key) == (401, "invalid_api_key")
    assert await rig.refused("GET", f"{TENANTS}/new") == (404, "tenant_not_found")
    assert await rig.refused("DELETE", f"{TENANTS}/new") == (404, "tenant_not_found")


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_tenant_whose_name_is_no_longer_accepted_can_be_deleted(
    rig: TenantsRig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a URL these names are steps to other paths."""
    assert await rig.refused("POST", TENANTS, json={"name": name}) == (400, "invalid_value")
    with monkeypatch.context() as before:
        before.setattr(names, "_TENANT", re.compile(r"[A-Za-z0-9._-]{1,64}"))
        await rig.done("POST", TENANTS, json={"name": name})
    assert (await rig.done("GET", path_of(name)))["name"] == name
    assert (await rig.done("DELETE", path_of(name)))["deleted"]


async def test_what_is_refused(rig: TenantsRig) -> None:
    assert await rig.refused("POST", TENANTS, json={"name": "acme"}) == (409, "tenant_exists")
    bodies: list[Any] = [
        {"name": "a/b"},
        {"name": "x", "weight": 0},
        {"name": "x", "weight": -1},
        {"name": "x", "quota": {"adapters": -1}},
        {"name": "x", "quota": {"adapter": 1}},
        {"name": "x", "wieght": 1},
        {"name": "x", "background": "yes"},
        {"name": "x" * 65},
        [],
    ]
    for body in bodies:
        status, code = await rig.refused("POST", TENANTS, json=body)
        assert (status, code) in [(400, "invalid_value")], body
    assert await rig.refused("POST", TENANTS, json={}) == (400, "missing_required_parameter")
    assert await rig.refused("POST", TENANTS, content=b"x" * 20_000) == (413, "request_too_large")
    assert await rig.refused("POST", f"{TENANTS}/acme/keys", json={"scopes": ["root"]}) == (400, "invalid_value")
    assert await rig.refused("POST", f"{TENANTS}/acme/keys", json={"expires_in_s": 0}) == (400, "invalid_value")
    assert await rig.refused("POST", f"{TENANTS}/none/keys", json={}) == (404, "tenant_not_found")
    assert await rig.refused("GET", f"{KEYS}/0123456789abcdef") == (404, "key_not_found")
    assert await rig.refused("GET", f"{KEYS}/zz") == (404, "key_not_found")
    for unowned in ("x", "0-0", "99999999999999999999-0", "1-18446744073709551616"):
        assert await rig.refused("GET", f"{AUDIT}?after={unowned}") == (400, "invalid_value"), unowned
    assert (await rig.done("GET", f"{AUDIT}?after=0-1"))["data"] == []


async def test_only_operators_administer(rig: TenantsRig) -> None:
    everything = await rig.make_key("acme", "infer", "upload", "metrics", "admin")
    for method, path in (
        ("GET", TENANTS),
        ("POST", TENANTS),
        ("GET", f"{TENANTS}/acme"),
        ("PATCH", f"{TENANTS}/acme"),
        ("DELETE", f"{TENANTS}/acme"),
        ("POST", f"{TENANTS}/acme/suspend"),
        ("POST", f"{TENANTS}/acme/resume"),
        ("GET", f"{TENANTS}/acme/keys"),
        ("POST", f"{TENANTS}/acme/keys"),
        ("GET", f"{KEYS}/{hash_key(everything)[:16]}"),
        ("PATCH", f"{KEYS}/{hash_key(everything)[:16]}"),
        ("DELETE", f"{KEYS}/{hash_key(everything)[:16]}"),
        ("POST", f"{KEYS}/{hash_key(everything)[:16]}/rotate"),
        ("GET", AUDIT),
    ):
        for key in (everything, "", "no key"):
            assert await rig.refused(method, path, key) == (401, "invalid_api_key"), (method, path, key)


async def test_keys_may_do_what_their_scopes_say(rig: TenantsRig) -> None:
    requested = {
        "infer": [("POST", "/v1/chat/completions"), ("GET", "/v1/models")],
        "upload": [("GET", "/v1/adapters"), ("DELETE", "/v1/adapters/x")],
        "admin": [("GET", OWN)],
    }
    for scope in requested:
        key = await rig.make_key("acme", scope)
        for needed, routes in requested.items():
            for method, path in routes:
                response = await rig.ask(method, path, key, json=CHAT)
                lacks = response.status_code == 403 and response.json()["error"]["code"] == "missing_scope"
                assert lacks == (scope != needed), (scope, method, path, response.text)
    default = await rig.make_key("acme")
    assert await rig.refused("GET", OWN, default) == (403, "missing_scope")


async def test_a_key_expires_by_the_clock(rig: TenantsRig) -> None:
    key = await rig.make_key("acme", "infer", expires_in_s=1.0)
    unknown = await rig.ask("GET", "/v1/models", "no key")
    known = rig.view.key(key)
    assert known is not None and known.expires_at is not None
    await asyncio.sleep(max(0.0, known.expires_at - time.time()))
    answer = await rig.ask("GET", "/v1/models", key)
    assert answer.content == unknown.content  # which says nothing of why


async def test_a_rotated_key_is_good_during_the_overlap(rig: TenantsRig) -> None:
    old = await rig.make_key("acme", "infer", label="ci")
    turned = await rig.done("POST", f"{KEYS}/{hash_key(old)[:16]}/rotate", json={"overlap_s": 600})
    assert turned["label"] == "ci" and turned["scopes"] == ["infer"] and turned["replaces"]["expires_at"] is not None
    await rig.view.catch_up()
    for key in (old, turned["key"]):
        assert (await rig.ask("GET", "/v1/models", key)).status_code == 200
    last = await rig.done("POST", f"{KEYS}/{turned['id']}/rotate", json={"overlap_s": 0})
    await rig.view.catch_up()
    assert await rig.refused("GET", "/v1/models", turned["key"]) == (401, "invalid_api_key")
    assert (await rig.ask("GET", "/v1/models", last["key"])).status_code == 200
    listed = (await rig.done("GET", f"{TENANTS}/acme/keys"))["data"]
    assert {key["id"] for key in listed} == {hash_key(one)[:16] for one in (old, turned["key"], last["key"])}
    assert "motet-" not in str(listed)


async def test_a_tenant_keeps_its_own_keys_and_gives_no_more_than_it_has(rig: TenantsRig) -> None:
    admin = await rig.make_key("acme", "admin", "infer", expires_in_s=1000.0)
    theirs = await rig.make_key("zoo", "infer")
    upload = await rig.make_key("acme", "upload")
    ids = {name: hash_key(key)[:16] for name, key in (("admin", admin), ("theirs", theirs), ("upload", upload))}
    made = await rig.done("POST", OWN, admin, json={"quota": {"requests_per_minute": 99}})
    mine = (await rig.done("GET", f"{OWN}/{ids['admin']}", admin))["expires_at"]
    assert made["scopes"] == ["infer"] and made["expires_at"] == mine
    assert made["quota"]["requests_per_minute"] == 99
    assert (await rig.ask("GET", "/v1/models", made["key"])).status_code == 200
    assert await rig.refused("POST", OWN, admin, json={"scopes": ["upload"]}) == (403, "missing_scope")
    assert await rig.refused("POST", f"{OWN}/{ids['upload']}/rotate", admin) == (403, "missing_scope")
    assert {key["id"] for key in (await rig.done("GET", OWN, admin))["data"]} == {
        ids["admin"],
        ids["upload"],
        made["id"],
    }
    unknown = await rig.ask("GET", f"{OWN}/{'0' * 16}", admin)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/rotate")):
        answer = await rig.ask(method, f"{OWN}/{ids['theirs']}{path}", admin)
        assert (answer.status_code, answer.content) == (404, unknown.content)
    assert (await rig.ask("GET", "/v1/models", theirs)).status_code == 200
    assert (await rig.done("DELETE", f"{OWN}/{ids['upload']}", admin))["deleted"]
    assert await rig.refused("GET", "/v1/adapters", upload) == (401, "invalid_api_key")
    endless = await rig.make_key("acme", "infer")
    assert await rig.refused("POST", f"{OWN}/{hash_key(endless)[:16]}/rotate", admin) == (403, "missing_scope")
    assert (await rig.done("POST", f"{OWN}/{ids['admin']}/rotate", admin))["expires_at"] == mine


@pytest.mark.parametrize("quota", [{"requests_per_minute": 10}, {"adapters": 0}])
async def test_a_key_with_a_quota_of_its_own_gets_no_other_one_by_a_new_key(
    rig: TenantsRig, quota: dict[str, int]
) -> None:
    bound = await rig.make_key("acme", "admin", "infer", quota=quota)
    free = await rig.make_key("acme", "infer")
    for path in ("", f"/{hash_key(bound)[:16]}/rotate", f"/{hash_key(free)[:16]}/rotate"):
        answer = await rig.ask("POST", f"{OWN}{path}", bound, json={})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "missing_scope")
        assert "has a quota, so it can neither" in error["message"]
    assert {key["id"] for key in (await rig.done("GET", OWN, bound))["data"]} == {
        hash_key(bound)[:16],
        hash_key(free)[:16],
    }
    assert (await rig.done("DELETE", f"{OWN}/{hash_key(free)[:16]}", bound))["deleted"]
    rotated = await rig.done("POST", f"{KEYS}/{hash_key(bound)[:16]}/rotate", json={})
    assert {name: rotated["quota"][name] for name in quota} == quota


async def test_rotation_is_no_way_past_the_bound(rig: TenantsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_registry, "MAX_KEYS", 3)
    admin = await rig.make_key("acme", "admin", "infer")
    for _ in range(2):
        last = await rig.done("POST", f"{OWN}/{hash_key(admin)[:16]}/rotate", admin, json={"overlap_s": 600})
    refused = (409, "too_many_keys")
    assert await rig.refused("POST", f"{OWN}/{last['id']}/rotate", last["key"], json={"overlap_s": 0}) == refused
    assert await rig.refused("POST", f"{KEYS}/{last['id']}/rotate", json={"overlap_s": 0}) == refused
    assert await rig.refused("POST", OWN, last["key"], json={}) == refused
    assert await rig.refused("POST", f"{TENANTS}/acme/keys", json={}) == refused
    assert len((await rig.done("GET", OWN, last["key"]))["data"]) == 3
    await rig.done("DELETE", f"{OWN}/{hash_key(admin)[:16]}", last["key"])
    await rig.done("POST", f"{OWN}/{last['id']}/rotate", last["key"], json={"overlap_s": 0})


async def test_lists_are_paged(rig: TenantsRig) -> None:
    for number in range(5):
        await rig.done("POST", TENANTS, json={"name": f"t{number}"})
    seen: list[str] = []
    page: dict[str, Any] = {"has_more": True, "last_id": ""}
    while page["has_more"]:
        page = await rig.done("GET", f"{TENANTS}?limit=3&after={page['last_id']}")
        seen += [tenant["name"] for tenant in page["data"]]
    assert seen == ["acme", "t0", "t1", "t2", "t3", "t4", "zoo"]


async def test_every_router_knows_within_a_second(rig: TenantsRig, redis_client: Redis, tmp_path: Path) -> None:
    async with TenantsRig(redis_client, tmp_path / "other") as other:
        key = await rig.make_key("acme", "infer")
        await eventually_in_loop(lambda: other.view.key(key) is not None)
        await rig.done("POST", f"{TENANTS}/acme/suspend")
        await eventually_in_loop(lambda: other.view.tenant("acme").is_suspended)
        assert await other.refused("GET", "/v1/models", key) == (403, "tenant_suspended")
        await rig.done("DELETE", f"{TENANTS}/acme")
        # Reads and changes of tenants see at once what another router has changed.
        assert await other.refused("GET", f"{TENANTS}/acme") == (404, "tenant_not_found")


async def test_the_audit_shows_who_did_what(rig: TenantsRig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    admin = await rig.make_key("acme", "admin", "upload", "infer")
    folder, files = tmp_path / "adapter", lora_files(seed=1)
    await asyncio.to_thread(folder.mkdir)
    tensors = await asyncio.to_thread((await asyncio.to_thread(files.write, folder)).read_bytes)
    form = {
        "adapter_config.json": ("adapter_config.json", files.config_bytes),
        "adapter_model.safetensors": ("adapter_model.safetensors", tensors),
    }
    await rig.done("POST", "/v1/adapters", admin, data={"name": "pirate"}, files=form)
    await rig.done("DELETE", "/v1/adapters/pirate", admin)
    made = await rig.done("POST", OWN, admin, json={})
    found = (await rig.done("GET", f"{AUDIT}?tenant=acme&limit=4"))["data"]
    own = {"kind": "key", "id": hash_key(admin)[:16], "tenant": "acme", "user": None}
    assert [(one["action"], one["target"], one["actor"], one["result"]) for one in found] == [
        ("key.create", made["id"], own, None),
        ("adapter.delete", "pirate", own, "1"),
        ("adapter.upload", "pirate", own, "1"),
        ("key.create", own["id"], {"kind": "operator", "id": None, "tenant": None, "user": None}, None),
    ]
    assert all(one["request_id"] and one["at"] > 1.7e9 for one in found)
    assert [one["action"] for one in (await rig.done("GET", f"{AUDIT}?tenant=zoo"))["data"]] == ["tenant.create"]
    first = await rig.done("GET", f"{AUDIT}?limit=2")
    then = await rig.done("GET", f"{AUDIT}?limit=10&after={first['last_id']}")
    everything = await rig.done("GET", AUDIT)
    assert first["has_more"] and not then["has_more"] and first["data"] + then["data"] == everything["data"]
    lines = [record for record in caplog.records if record.name == LOGGER]
    assert [record.fields["action"] for record in lines] == [  # type: ignore[attr-defined]
        one["action"] for one in reversed(found)
    ]
    reported = str(everything) + str([vars(record) for record in caplog.records])
    assert all(key not in reported for key in (admin, made["key"]))


async def test_a_request_says_whose_it_is_and_how_urgent(rig: TenantsRig) -> None:
    await rig.done("PATCH", f"{TENANTS}/acme", json={"weight": 4})
    key = await rig.make_key("acme")
    for more in ({}, {"priority": -7}, {"service_tier": "flex"}, {"service_tier": "auto", "priority": 100}):
        assert (await rig.ask("POST", "/v1/chat/completions", key, json=CHAT | more)).status_code == 200
    for priority in (-101, 101, "high", 1.5):
        status, code = await rig.refused("POST", "/v1/chat/completions", key, json=CHAT | {"priority": priority})
        assert (status, code) == (400, "invalid_value")
    await rig.done("PATCH", f"{TENANTS}/acme", json={"background": True})
    assert (await rig.ask("POST", "/v1/completions", key, json={"model": BASE, "prompt": "x"})).status_code == 200
    reported = [(one.weight, one.priority, one.is_background) for one in rig.dispatcher.submitted]
    assert reported == [(4.0, 0, False), (4.0, -7, False), (4.0, 0, True), (4.0, 100, False), (4.0, 0, True)]
