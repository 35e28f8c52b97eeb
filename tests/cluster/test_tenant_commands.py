"""`motet tenants`, `motet keys` and `motet audit` against a router over a real registry."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import uvicorn
from click.testing import CliRunner, Result
from redis.asyncio import Redis

from motet.adapters.registry.ledger.entry import Entry, Stage
from motet.cluster.client_commands.tenant_commands import bound, lifetime_s
from motet.cluster.commands.cli import main
from motet.router.usage.usage import UsageService
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.patience import eventually_in_loop
from motet.tests.rigs.router_rig import OPERATOR_KEY
from motet.tests.rigs.tenants_rig import TenantsRig


@asynccontextmanager
async def served(rig: TenantsRig) -> AsyncIterator[str]:
    """Its URL."""
    config = uvicorn.Config(rig.app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve())
    await eventually_in_loop(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def test_a_tenants_day_at_the_command_line(redis_client: Redis, tmp_path: Path) -> None:
    async with TenantsRig(redis_client, tmp_path) as rig, served(rig) as url:

        async def run(*arguments: str, typed: str | None = None, key: str = OPERATOR_KEY) -> Result:
            environment = {"MOTET_URL": url, "MOTET_OPERATOR_KEY": key}
            return await asyncio.to_thread(CliRunner().invoke, main, arguments, input=typed, env=environment)

        async def done(*arguments: str, typed: str | None = None) -> str:
            result = await run(*arguments, typed=typed)
            assert result.exit_code == 0, result.output
            return result.stdout

        created = await done("tenants", "create", "acme", "--weight", "2", "--quota", "stored-bytes=1GiB")
        assert "acme" in created and "stored-bytes=1073741824" in created
        refused = await run("tenants", "create", "acme")
        assert refused.exit_code == 1 and "already" in refused.output
        key = (await done("keys", "create", "acme", "--scope", "infer", "--expires-in", "90d")).strip()
        assert key.startswith("motet-") and len(key.split()) == 1
        assert (await rig.ask("GET", "/v1/models", key)).status_code == 200
        (listed,) = json.loads(await done("keys", "list", "acme", "--json"))
        assert listed["scopes"] == ["infer"] and key not in str(listed)
        assert listed["id"] in await done("keys", "list", "acme")
        new = json.loads(await done("keys", "rotate", listed["id"], "--overlap", "0", "--json"))
        assert await rig.refused("GET", "/v1/models", key) == (401, "invalid_api_key")
        assert (await rig.ask("GET", "/v1/models", new["key"])).status_code == 200
        await done("keys", "delete", listed["id"])
        assert len(json.loads(await done("keys", "list", "acme", "--json"))) == 1
        shown = await done(
            "tenants", "set", "acme", "--background", "--quota", "stored-bytes=none", "--quota", "adapters=5"
        )
        assert "background" in shown and "adapters=5" in shown and "stored-bytes" not in shown
        assert (await run("tenants", "set", "acme")).exit_code == 2
        assert "suspended" in await done("tenants", "suspend", "acme")
        assert await rig.refused("GET", "/v1/models", new["key"]) == (403, "tenant_suspended")
        assert json.loads(await done("tenants", "resume", "acme", "--json"))["state"] == "active"
        assert [tenant["name"] for tenant in json.loads(await done("tenants", "list", "--json"))] == ["acme"]
        assert "acme" in await done("tenants", "list") and "acme" in await done("tenants", "show", "acme")
        assert (await run("tenants", "delete", "acme", typed="n\n")).exit_code == 1
        assert "deleted acme" in await done("tenants", "delete", "acme", typed="y\n")
        assert (await run("tenants", "show", "acme")).exit_code == 1
        entries = json.loads(await done("audit", "--tenant", "acme", "--json"))
        assert [entry["action"] for entry in entries] == [
            "tenant.deleted",
            "tenant.delete",
            "tenant.resume",
            "tenant.suspend",
            "tenant.change",
            "key.delete",
            "key.rotate",
            "key.create",
            "tenant.create",
        ]
        assert len(json.loads(await done("audit", "--limit", "2", "--json"))) == 2
        table = await done("audit")
        assert "tenant.suspend" in table and key not in table and new["key"] not in table
        stranger = await run("tenants", "list", key=key)
        assert stranger.exit_code == 1 and "Incorrect API key" in stranger.output


async def test_users_at_the_command_line(redis_client: Redis, tmp_path: Path) -> None:
    files = lora_files(seed=1)
    folder = tmp_path / "poet"
    await asyncio.to_thread(folder.mkdir)
    tensors = await asyncio.to_thread(files.write, folder)
    await asyncio.to_thread(tensors.rename, folder / "adapter_model.safetensors")
    await asyncio.to_thread((folder / "adapter_config.json").write_bytes, files.config_bytes)
    async with TenantsRig(redis_client, tmp_path) as rig, served(rig) as url:
        await rig.done("POST", "/v1/admin/tenants", json={"name": "acme"})

        async def done(*arguments: str, key: str = "") -> str:
            environment = {"MOTET_URL": url, "MOTET_OPERATOR_KEY": OPERATOR_KEY, "MOTET_API_KEY": key}
            result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=environment)
            assert result.exit_code == 0, result.output
            return result.stdout

        ann, bob = [(await done("keys", "create", "acme", "--user", user)).strip() for user in ("ann", "bob")]
        assert "ann" in await done("keys", "list", "acme")
        assert "uploaded ~ann/poet version 1" in await done(
            "adapters", "upload", "poet", str(folder), "--private", key=ann
        )
        assert "~ann/poet" in await done("adapters", "list", key=ann)
        assert "poet" not in await done("adapters", "list", key=bob)
        assert "~ann/poet" in await done("adapters", "show", "poet", key=ann)
        (entry,) = json.loads(await done("audit", "--tenant", "acme", "--user", "ann", "--json"))
        assert (entry["action"], entry["target"]) == ("adapter.upload", "~ann/poet")
        await done("adapters", "upload", "poet", str(folder), key=ann)
        assert '"name": "poet"' in await done("adapters", "show", "~/poet", "--json", key=ann)
        await done("adapters", "delete", "~ann/poet", key=ann)
        assert "~ann" not in await done("adapters", "list", key=ann)
        assert "adapters=1" in await done("tenants", "set", "acme", "--user-quota", "adapters=1")
        assert "bob" in await done("users", "list", "acme")
        environment = {"MOTET_URL": url, "MOTET_OPERATOR_KEY": OPERATOR_KEY}
        cancel = ["users", "cancel-batches", "acme", "bob"]
        idle = await asyncio.to_thread(CliRunner().invoke, main, cancel, env=environment)
        assert idle.exit_code == 1 and "no batch that has not ended" in idle.output
        assert "deleted bob, 1 keys and 0 adapters" in await done("users", "delete", "acme", "bob", "--yes")
        assert [one["name"] for one in json.loads(await done("users", "list", "acme", "--json"))] == ["ann"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45.0), ("30m", 1800.0), ("1.5h", 5400.0), ("90d", 7_776_000.0), ("7", 7.0)]
)
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert lifetime_s(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1s", "1w", "1 d", "nan", "1e3"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time"):
        lifetime_s(text)


@pytest.mark.parametrize(
    "text", ["adapters", "adapters=", "adapters=-1", "adapters=1.5", "adapter=1", "stored-bytes=x"]
)
def test_what_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        bound(text)


async def test_usage_at_the_command_line(redis_client: Redis, tmp_path: Path) -> None:
    usage = UsageService(
        redis_client, tmp_path, tmp_path, kept_days=3, spool_bytes=1 << 30, min_free_bytes=0, prices=None
    )
    now = int(time.time())
    reported: dict[str, Any] = {
        "began_at": now,
        "stage": Stage.COMPLETE,
        "requests": 1,
        "output_tokens": 7,
        "recomputed_tokens": 96,
    }
    await usage.ledger.take(
        [
            Entry(id="1", tenant="acme", adapter="poet", version=2, key_id="k", **reported),
            Entry(id="2", tenant="zoo", adapter="tiny", version=1, key_id="k", **reported),
        ]
    )
    async with TenantsRig(redis_client, tmp_path, more_routes=usage.routes) as rig, served(rig) as url:
        await rig.done("POST", "/v1/admin/tenants", json={"name": "acme"})
        made = await rig.done("POST", "/v1/admin/tenants/acme/keys", json={"scopes": ["metrics"]})

        async def run(*arguments: str) -> Result:
            environment = {"MOTET_URL": url, "MOTET_OPERATOR_KEY": OPERATOR_KEY, "MOTET_API_KEY": made["key"]}
            return await asyncio.to_thread(CliRunner().invoke, main, ("usage", *arguments), env=environment)

        own = await run("--by", "adapter")
        assert own.exit_code == 0, own.output
        assert "poet" in own.stdout and "tiny" not in own.stdout and "total" in own.stdout
        row = json.loads((await run("--by", "adapter", "--json")).stdout)["data"][0]
        assert (row["adapter"], row["version"], row["output_tokens"]) == ("poet", 2, 7)
        lines = (await run("--by", "adapter", "--csv")).stdout.splitlines()
        assert len(lines) == 2 and "poet" in lines[1]
        assert dict(zip(lines[0].split(","), lines[1].split(","), strict=True))["recomputed_tokens"] == "96"
        assert "recomputed tokens" in own.stdout
        everybody = await run("--all", "--by", "tenant")
        assert everybody.exit_code == 0 and "acme" in everybody.stdout and "zoo" in everybody.stdout
        wrong = await run("--by", "week")
        assert wrong.exit_code == 1 and "day" in wrong.output
        assert (await run("--csv", "--json")).exit_code == 2
