"""`motet versions`, `aliases`, `canary`, `preload` and `residency` against a served router with a real registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from click.testing import CliRunner, Result
from redis.asyncio import Redis
from starlette.applications import Starlette

from motet.cluster.commands.cli import main
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import text_service
from motet.tests.rigs.version_rig import version_rigs


def motet(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--url", url, "--key", "key-of-acme"])


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The app behind a server in this event loop, where its Redis client lives."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


async def test_a_tenant_rolls_out_and_back_by_commands(redis_client: Redis, tmp_path: Path) -> None:
    async with version_rigs(redis_client, tmp_path, text_service()) as (rig,), served(rig.app) as url:
        await rig.upload(1, note="the first")
        await rig.upload(2, activate="false")

        async def reported(*arguments: str) -> str:
            result = await asyncio.to_thread(motet, url, *arguments)
            assert result.exit_code == 0, result.output
            return result.output

        listed = await reported("versions", "list", "x")
        assert "the first" in listed and "current" in listed
        assert "90% of the requests for x go to version 2" in await reported(
            "canary", "start", "x", "2", "--share", "0.9"
        )
        assert "version 2, share 90%: running" in await reported("canary", "show", "x")
        assert "x is now version 2" in await reported("versions", "promote", "x")
        assert "promoted" in await reported("canary", "show", "x")
        assert "x@prod is version 2" in await reported("aliases", "set", "x", "prod", "2")
        assert "prod" in await reported("aliases", "list", "x")
        assert '"version": 2' in await reported("versions", "show", "x", "prod")
        assert "x is now version 1" in await reported("versions", "rollback", "x")
        assert "deleted x@prod" in await reported("aliases", "delete", "x", "prod")
        await reported("canary", "start", "x", "2")
        assert "stopped the canary of x" in await reported("canary", "stop", "x")
        assert "loading version 2 of x at 1 gang" in await reported("preload", "x@2")
        rig.dispatcher.tiers = {"gang-1": "device"}
        while "device" not in (listed := await reported("residency", "x")):
            assert "coming" in listed
        assert '"tier": "device"' in await reported("residency", "x", "--json")
        assert "x, now version 1, is pinned to 2 gangs" in await reported("pin", "x", "--gangs", "2")
        assert "x is no longer pinned" in await reported("unpin", "x")
