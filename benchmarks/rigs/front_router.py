"""Two fronts in one router process that differ in what they do for tenants, before a gang that answers at once.

Prints the ports of both as JSON, and serves until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from redis.asyncio import Redis
from starlette.applications import Starlette

from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.registry.tenants.records import KeyRecord, Quota, TenantRecord
from motet.cluster.config import part_config
from motet.cluster.replicas.replica_start import keep_pauses_short
from motet.cluster.settings.settings import Settings
from motet.router.config import CurrentConfig, RouterConfig
from motet.router.fleet.admission import TimeLimit
from motet.router.rest_server import create_app
from motet.router.tenancy.quotas import Quotas
from motet.router.text.text import TextService
from motet.router.usage.usage import UsageService
from motet.workers.wire.engine_load import EngineLoad
from motet.workers.wire.messages import GangInfo, SequenceRequest, SequenceUpdate, SequenceUsage

MODEL_PATH = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"  # for its tokenizer
BASE = "ready"
PATIENCE_S = 10.0  # for Redis: on a busy machine it must not be given up, which would be cheaper
KEY = "key-of-tenant-7"
ADAPTER = "pirate"
NUM_TENANTS = 2_000
PLENTY = Quota(requests_per_minute=10_000_000, tokens_per_minute=1_000_000_000, concurrent_streams=10_000)


class QuotaView(RegistryView):
    """Every tenant has all quotas, and none is reached."""

    def tenant(self, name: str) -> TenantRecord:
        return TenantRecord(name=name, quota=PLENTY)


class OneTenantView:
    """Every key belongs to one tenant without quotas, and there are no adapters."""

    connected = is_whole = True
    is_unreachable = False
    last_event = 0
    stream_keys = (bytes(32),)
    _key = KeyRecord(key_id="key", tenant="tenant")
    _tenant = TenantRecord(name="tenant")

    def key(self, key: str) -> KeyRecord:
        return self._key

    def tenant(self, name: str) -> TenantRecord:
        return self._tenant

    async def resolve(self, tenant: str, name: str) -> None:
        return None


class InstantStream:
    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        for number in range(self._num_tokens):
            await asyncio.sleep(0)
            yield SequenceUpdate(1, [number % 50 + 10], None, "length" if number == self._num_tokens - 1 else None)

    def cancel(self) -> None: ...

    usage, usage_at, is_reported = SequenceUsage(), None, True

    async def reported(self) -> None: ...


class InstantDispatcher:
    """A gang whose tokens come one in each turn of the loop."""

    num_resumed = num_moved = num_waiting = 0

    def submit(self, request: SequenceRequest, *, is_resumed: bool = False, limit: TimeLimit | None = None) -> Any:
        return InstantStream(request.sampling.max_tokens or 1)

    def gang(self) -> GangInfo:
        return GangInfo(
            gang_id="gang-1",
            model="/m",
            device="cpu",
            dtype="float32",
            kernels="torch",
            max_model_len=4096,
            block_size=16,
            num_pages=64,
            page_bytes=1024,
            num_threads=1,
            vocab_size=512,
        )

    def gangs(self) -> list[tuple[GangInfo, EngineLoad]]:
        return [(self.gang(), self.load())]

    def load(self) -> EngineLoad:
        return EngineLoad()


def usage_of(client: Redis, folder: Path) -> UsageService:
    """Who keeps count of each answer, beside quotas, where all is on: its lines go to Redis as in a router."""
    return UsageService(
        client,
        folder / "ledger",
        folder / "archive",
        kept_days=3,
        spool_bytes=1 << 30,
        min_free_bytes=0,
        prices=None,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="of an empty Redis")
    client = connect(parser.parse_args().url)
    registry = Registry(client)
    tenants = [f"tenant-{number}" for number in range(NUM_TENANTS)]
    await registry.set_launch_keys("benchmark", [(tenant, f"key-of-{tenant}") for tenant in tenants])
    await registry.names.register("tenant-7", ADAPTER, digest="d" * 64, module_ranks={"q_proj": 8}, num_bytes=1000)
    view = QuotaView(registry)
    await view.start()
    quotas = Quotas(client, lambda: 1, wait_s=PATIENCE_S)
    quotas.start()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        usage = usage_of(client, Path(folder))
        await usage.start()
        text = TextService.from_folder(MODEL_PATH)
        fronts = {
            "on": _app(view, text, Path(folder), quotas=quotas, accountants=[usage.metering]),
            "off": _app(OneTenantView(), text, Path(folder)),
        }
        keep_pauses_short()  # as a router does
        servers = {
            name: uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
            for name, app in fronts.items()
        }
        serving = [asyncio.create_task(server.serve()) for server in servers.values()]
        while not all(server.started for server in servers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        ports = {name: server.servers[0].sockets[0].getsockname()[1] for name, server in servers.items()}
        print(json.dumps(ports), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for server in servers.values():
            server.should_exit = True
        await asyncio.gather(*serving)
        await usage.stop()
    await quotas.stop()
    await view.stop()
    await client.aclose()
    text.close()


def _app(view: Any, text: TextService, folder: Path, **tenancy: Any) -> Starlette:
    nothing: Any = None  # its routes are not requested
    dispatcher: Any = InstantDispatcher()
    config = part_config(RouterConfig, Settings(), model_name=BASE, spool_path=folder, scales_from_zero=False)
    return create_app(
        config=CurrentConfig(config),
        dispatcher=dispatcher,
        view=view,
        uploads=nothing,
        text=text,
        operator_key=secrets.token_hex(),
        **tenancy,
    )


if __name__ == "__main__":
    asyncio.run(main())
