"""A gang of the demo model and routers before it, each a process, without Ray: what a router does can be compared.

`python -m motet.benchmarks.rigs.bare_fleet gang` prints its address, `… router ADDRESS` its port. Both serve until
their standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import uvicorn

from motet.adapters.registry.tenants.records import KeyRecord, TenantRecord
from motet.cluster.config import part_config
from motet.cluster.replicas.replica_start import keep_pauses_short
from motet.cluster.settings.settings import Settings
from motet.router.config import CurrentConfig, RouterConfig
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.rest_server import create_app
from motet.router.text.text import TextService
from motet.tests.rigs.part_configs import admission_config, engine_config, leader_config
from motet.workers.engine_builder import build_engine_loop
from motet.workers.leader.frame_server import FrameServer

MODEL_PATH: Final = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
BASE: Final = "demo"
KEYS: Final = {"key-of-acme": "acme", "key-of-globex": "globex"}
TOKEN: Final = "t" * 64
POOL_BYTES: Final = 64 << 20


class TenantsView:
    """The tenants of KEYS, without quotas and adapters."""

    connected = is_whole = True
    is_unreachable = False
    last_event = 0
    stream_keys = (bytes(32),)

    def key(self, key: str) -> KeyRecord | None:
        return KeyRecord(key_id=key, tenant=KEYS[key]) if key in KEYS else None

    def tenant(self, name: str) -> TenantRecord:
        return TenantRecord(name=name)

    async def resolve(self, tenant: str, name: str, sight: object = None) -> None:
        return None


async def gang(folder: Path) -> None:
    config = engine_config(MODEL_PATH, folder / "store", pool_bytes=POOL_BYTES, device="cpu", num_threads=1)
    engine = build_engine_loop(config)
    server = FrameServer(engine, engine.info, TOKEN, leader_config())
    address = await server.start("127.0.0.1")
    keep_pauses_short()
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


async def router(folder: Path, address: str) -> None:
    nothing: Any = None  # its routes are not requested
    view: Any = TenantsView()
    dispatcher = FleetDispatcher(TOKEN, 60.0, adapter_pages=lambda ref: 2, admission=admission_config())
    dispatcher.update({"gang": address})
    text = TextService.from_folder(MODEL_PATH)
    config = part_config(RouterConfig, Settings(), model_name=BASE, spool_path=folder, scales_from_zero=False)
    app = create_app(
        config=CurrentConfig(config),
        dispatcher=dispatcher,
        view=view,
        uploads=nothing,
        text=text,
        operator_key=secrets.token_hex(),
    )
    keep_pauses_short()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started or not dispatcher.gangs():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving
    await dispatcher.close()
    text.close()


@contextmanager
def bare_fleet(num_routers: int) -> Iterator[list[str]]:
    """URLs of the routers."""
    with ExitStack() as processes:

        def start(*role: str) -> str:
            command = [sys.executable, "-m", "motet.benchmarks.rigs.bare_fleet", *role]
            process = processes.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            processes.callback(process.communicate)
            assert process.stdout is not None
            said = process.stdout.readline().strip()
            assert said, f"{role} did not start"
            return said

        address = start("gang")
        yield [f"http://127.0.0.1:{start('router', address)}" for _ in range(num_routers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=["gang", "router"])
    parser.add_argument("address", nargs="?", help="of the gang")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        asyncio.run(gang(Path(folder)) if options.role == "gang" else router(Path(folder), options.address))


if __name__ == "__main__":
    main()
