"""Combinations over HTTP, on a real registry and store: whose they are, and what they are warned of."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.tenants_rig import TenantsRig

PATH = "/v1/adapter_combinations"


@pytest.fixture
async def rig(redis_client: Redis, tmp_path: Path) -> AsyncIterator[TenantsRig]:
    async with TenantsRig(redis_client, tmp_path) as rig:
        await rig.done("POST", "/v1/admin/tenants", json={"name": "acme"})
        yield rig


async def upload(
    rig: TenantsRig, key: str, name: str, seed: int, fields: Mapping[str, str] = MappingProxyType({}), **config: Any
) -> dict[str, Any]:
    """`fields`: of the form."""
    files = lora_files(seed=seed, **config)
    spool = rig.config.now.spool_path.parent
    parts = {
        "adapter_config.json": files.config_bytes,
        "adapter_model.safetensors": files.write(spool).read_bytes(),
    }
    answer: dict[str, Any] = await rig.done("POST", "/v1/adapters", key, data={"name": name, **fields}, files=parts)
    return answer


def body(*parts: str, **fields: Any) -> dict[str, Any]:
    return {"json": {"name": "mix", "adapters": [{"adapter": part} for part in parts], **fields}}


async def test_what_is_made_of_a_private_adapter_is_private(rig: TenantsRig) -> None:
    admin, tenants = await rig.make_key("acme", "upload", "admin"), await rig.make_key("acme", "upload")
    ann, bob = [await rig.make_key("acme", "upload", user=user) for user in ("ann", "bob")]
    await upload(rig, tenants, "shared", 1)
    await upload(rig, ann, "~ann/own", 2)
    for own in ("own", "~ann/own", "own@1"):
        assert (await rig.done("POST", PATH, ann, **body("shared", own)))["name"] == "~ann/mix"
        assert (await rig.done("POST", PATH, ann, **body(own, "shared", name="second")))["name"] == "~ann/second"
    for key in (bob, tenants):
        for own in ("own", "~ann/own", "~ann/own@1"):
            assert await rig.refused("POST", PATH, key, **body("shared", own)) == (404, "adapter_not_found")
    assert (await rig.done("POST", PATH, bob, **body("shared")))["name"] == "mix"
    # Administrators see it, and say whose the combination is.
    assert await rig.refused("POST", PATH, admin, **body("~ann/own")) == (400, "invalid_adapter")
    assert await rig.refused("POST", PATH, ann, **body("own", name="~/mix")) == (400, "invalid_adapter")
    assert (await rig.done("POST", PATH, admin, **body("~ann/own", name="~ann/third")))["name"] == "~ann/third"
    assert (await rig.done("POST", PATH, ann, **body("own", name="given", private=False)))["name"] == "given"
    listed = (await rig.done("GET", "/v1/adapters", tenants))["data"]
    assert [adapter["name"] for adapter in listed] == ["given", "mix", "shared"]


async def test_one_part_of_another_base_is_enough_for_a_warning(rig: TenantsRig) -> None:
    rig.config.now = replace(rig.config.now, adapter_base="warn", base_aliases="tiny-7b")
    key = await rig.make_key("acme", "upload")
    await upload(rig, key, "here", 1, base_model_name_or_path="tiny-7b")
    await upload(rig, key, "unnamed", 2)
    warnings = (await upload(rig, key, "foreign", 3, base_model_name_or_path="other/thing-7b"))["warnings"]
    assert len(warnings) == 1
    for parts in (("here", "foreign"), ("foreign", "here"), ("unnamed", "foreign"), ("foreign",)):
        assert (await rig.done("POST", PATH, key, **body(*parts)))["warnings"] == warnings
    for parts in (("here", "unnamed"), ("here",)):
        assert (await rig.done("POST", PATH, key, **body(*parts)))["warnings"] == []


async def test_a_part_that_the_store_has_lost_is_named_and_nothing_is_stored(rig: TenantsRig, tmp_path: Path) -> None:
    key = await rig.make_key("acme", "upload")
    made = {name: await upload(rig, key, name, seed) for seed, name in enumerate(("kept", "lost"))}
    digest = made["lost"]["digest"]
    shutil.rmtree(tmp_path / "store" / digest[:2] / digest)
    answer = await rig.ask("POST", PATH, key, **body("kept", "lost"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_adapter")
    assert f"adapter {digest} is not in the store: upload it again" in answer.json()["error"]["message"]
    assert [*rig.config.now.spool_path.iterdir()] == []
    assert (await rig.done("POST", PATH, key, **body("kept")))["version"] == 1


@pytest.mark.parametrize("fields", [{"chat_template": "{{ messages[0].content }}!"}, {"response_template": "hermes"}])
async def test_its_chats_are_in_the_form_of_its_parts(rig: TenantsRig, tmp_path: Path, fields: dict[str, str]) -> None:
    key = await rig.make_key("acme", "upload")
    for seed, name in enumerate(("one", "two")):
        made = await upload(rig, key, name, seed, fields)
    await upload(rig, key, "plain", 2)
    mix = await rig.done("POST", PATH, key, **body("one", "two"))
    assert (mix["own_text"], mix["response_template"]) == (made["own_text"], made["response_template"])
    answer = await rig.ask("POST", PATH, key, **body("one", "plain"))
    assert answer.status_code == 400
    assert "they have different response templates or chat templates" in answer.json()["error"]["message"]
    for path in (tmp_path / "store").glob("*/*/*.jinja"):
        path.unlink()
    answer = await rig.ask("POST", PATH, key, **body("one", name="other"))
    if "chat_template" in fields:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_adapter")
        assert "missing or damaged: upload it again" in answer.json()["error"]["message"]
