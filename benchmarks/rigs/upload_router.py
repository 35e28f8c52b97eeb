"""A router with its adapters API and a gang that answers at once, in a process of its own, for attacks by upload.

Prints its port, and serves until its standard input ends. Its base has 128 experts in each of 48 layers, so that an
adapter may have 37,000 tensors.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from pathlib import Path
from typing import Any

import uvicorn

from motet.adapters.adapter import EXPERT_MODULES, MODULES, BaseShape, ExpertShape
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload import UploadLimits, UploadService
from motet.benchmarks.rigs.front_router import BASE, MODEL_PATH, InstantDispatcher
from motet.cluster.config import part_config
from motet.cluster.replicas.replica_start import keep_pauses_short
from motet.cluster.settings.settings import Settings
from motet.router.config import CurrentConfig, RouterConfig
from motet.router.rest_server import create_app
from motet.router.text.text import TextService

SHAPE = BaseShape(
    48,
    dict.fromkeys(MODULES[:4], (64, 64)) | dict.fromkeys(EXPERT_MODULES, (64, 64)),
    ExpertShape(128, tuple(range(48)), "mlp", {module: module.partition(".")[2] for module in EXPERT_MODULES}),
)
LAYOUT = AdapterLayout(SHAPE, slab=4096, dtype="bfloat16")
TENANTS = ("neighbour", *(f"attacker-{number}" for number in range(1, 5)))
PATIENCE_S = 30.0  # for Redis


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="of an empty Redis")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    client = connect(arguments.url, PATIENCE_S)
    registry = Registry(client, PATIENCE_S)
    await registry.set_launch_keys("benchmark", [(tenant, key_of(tenant)) for tenant in TENANTS])
    view = RegistryView(registry)
    await view.start()
    limits = UploadLimits(max_tensors_bytes=64 << 20)
    uploads = UploadService(AdapterStore(arguments.folder / "store"), registry, view, [LAYOUT], limits)
    config = part_config(
        RouterConfig, Settings(), model_name=BASE, spool_path=arguments.folder / "spool", scales_from_zero=False
    )
    dispatcher: Any = InstantDispatcher()
    text = TextService.from_folder(MODEL_PATH)
    app = create_app(
        config=CurrentConfig(config),
        dispatcher=dispatcher,
        view=view,
        uploads=uploads,
        text=text,
        operator_key=secrets.token_hex(),
    )
    keep_pauses_short()  # as a router does
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving
    await view.stop()
    await client.aclose()
    text.close()


if __name__ == "__main__":
    asyncio.run(main())
