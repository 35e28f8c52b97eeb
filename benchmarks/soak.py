"""Twenty minutes of everything: tenants at saturation, uploads, new versions, kills, stalls, and one hostile tenant.

A whole motet with two gangs of the demo model runs on this machine. For the first half its tenants are alone, for the
second half a hostile tenant does all that he can think of beside them. All the time clients leave in the middle,
names get new versions and go, gangs and the registry are killed with -9 and come back, and gangs stand still for a
second. What it shows: the others' time to first token with him over that without him; how every request ended; how
memory goes on from the fifth minute; and that no page is left in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from motet.benchmarks.rigs.hostile_tenant import HostileTenant
from motet.benchmarks.rigs.process_memory import ProcessMemory
from motet.benchmarks.rigs.soak_traffic import Tenant, TrafficResult
from motet.cluster.config import MotetConfig
from motet.cluster.launch.launch import Deployment
from motet.cluster.launch.local_serve import free_ports

MODEL_PATH = Path(__file__).parent.parent / "examples" / "demo" / "base"
TENANTS = ("acme", "globex")
MALLORY = "mallory"
OPERATOR_KEY = "key-of-operators"
NUM_GANGS = 2
STREAMS_EACH = 6
UPLOAD_EVERY_S = 2.0
KILL_EVERY_S, STALL_EVERY_S, STALL_S = 90.0, 31.0, 1.0
SETTLED_S = 300.0  # from here on memory counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20, help="in all (default 20)")
    arguments = parser.parse_args()
    deployment = Deployment()
    with tempfile.TemporaryDirectory(prefix="motet-soak-") as folder:
        config = MotetConfig.of(
            model_path=MODEL_PATH,
            data_dir=Path(folder),
            port=free_ports(1)[0],
            keys=tuple((tenant, f"key-of-{tenant}") for tenant in (*TENANTS, MALLORY)),
            operator_key=OPERATOR_KEY,
            pool_bytes=64 << 20,
            host_bytes=64 << 20,
            kv_host_bytes=64 << 20,  # full long before memory counts
            min_gangs=NUM_GANGS,
            max_num_sequences=32,
            tenant_running_share=0.5,
            num_threads=1,
        )
        deployment.start(config, lambda name, done, total: None)
        try:
            asyncio.run(Soak(config, arguments.minutes * 60).run())
        finally:
            deployment.stop()


class Soak:
    def __init__(self, config: MotetConfig, duration_s: float) -> None:
        self._config, self._duration_s = config, duration_s
        self._memory = ProcessMemory()
        self._draw = random.Random(0)
        self._num_kills: Counter[str] = Counter()

    async def run(self) -> None:
        tenants = [
            Tenant(self._config.url, name, f"key-of-{name}", self._config.serving.name, seed)
            for seed, name in enumerate(TENANTS)
        ]
        began_at = time.monotonic()
        disturbing = [asyncio.create_task(one) for one in (self._kill(), self._stall(), self._watch(began_at))]
        alone = await self._serve(tenants, self._duration_s / 2)
        mallory = HostileTenant(self._config.url, f"key-of-{MALLORY}", self._config.serving.name)
        attacking = asyncio.create_task(mallory.attack_forever())
        beside = await self._serve(tenants, self._duration_s / 2)
        for task in (attacking, *disturbing):
            task.cancel()
        for task in (attacking, *disturbing):
            try:
                await task
            except asyncio.CancelledError:
                pass
        await mallory.close()
        for tenant in tenants:
            await tenant.close()
        pages_left = await self._pages_left()
        self._report(alone, beside, mallory.num_attacks, pages_left)

    async def _serve(self, tenants: list[Tenant], duration_s: float) -> TrafficResult:
        """Traffic of all tenants for so long, and their result."""
        for tenant in tenants:
            tenant.result = TrafficResult()
        tasks = [asyncio.create_task(t.ask_forever()) for t in tenants for _ in range(STREAMS_EACH)]
        tasks += [asyncio.create_task(t.upload_forever(UPLOAD_EVERY_S)) for t in tenants]
        await asyncio.sleep(duration_s)
        for task in tasks:
            if task.done():
                task.result()  # it never ends by itself: this raises what ended it
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        result = TrafficResult()
        for tenant in tenants:
            result.first_token_s += tenant.result.first_token_s
            result.ends += tenant.result.ends
            result.unexplained += tenant.result.unexplained
        return result

    async def _kill(self) -> None:
        """A gang, and each third time the registry's server."""
        for what in itertools.cycle(("gang", "gang", "registry")):
            await asyncio.sleep(KILL_EVERY_S)
            title = "ServeReplica:motet:gang" if what == "gang" else "valkey-server"
            found = _processes(title)
            if found and (what == "registry" or len(found) >= NUM_GANGS):
                self._draw.choice(found).kill()
                self._num_kills[what] += 1

    async def _stall(self) -> None:
        while True:
            await asyncio.sleep(STALL_EVERY_S)
            found = _processes("ServeReplica:motet:gang")
            if found:
                stalled = self._draw.choice(found)
                try:
                    stalled.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(STALL_S)
                    stalled.send_signal(signal.SIGCONT)
                except psutil.NoSuchProcess:
                    continue
                self._num_kills["stall"] += 1

    async def _watch(self, began_at: float) -> None:
        while True:
            self._memory.sample(time.monotonic() - began_at)
            await asyncio.sleep(5.0)

    async def _pages_left(self) -> int:
        """Pages that neither are free nor keep something, a minute after the last request at the latest."""
        left = 0
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        url = self._config.url
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30.0) as http:
            for _ in range(60):
                load = (await http.get("/status")).raise_for_status().json()["load"]
                kept = load["num_free_pages"] + load["num_adapter_pages"] + load["num_idle_prefix_pages"]
                left = load["num_pages"] - kept
                if not left:
                    break
                await asyncio.sleep(1.0)
        return left

    def _report(self, alone: TrafficResult, beside: TrafficResult, num_attacks: int, pages_left: int) -> None:
        for name, result in (("alone", alone), ("beside a hostile tenant", beside)):
            quantiles = _quantiles(result.first_token_s)
            print(
                f"{name}: first token p50 {quantiles[0]:.3f} s, p99 {quantiles[1]:.3f} s, "
                f"of {len(result.first_token_s)}"
            )
            for end, count in result.ends.most_common():
                print(f"  {count:7} {end}")
            for unexplained, count in Counter(result.unexplained).most_common(10):
                print(f"  {count:7} UNEXPLAINED {unexplained}")
        print(f"{num_attacks} attacks; killed and stalled: {dict(self._num_kills)}")
        growth = self._memory.growth(SETTLED_S, SETTLED_S / 2)
        for process, (num_bytes, percent) in sorted(growth.items()):
            print(f"  {process:24} {num_bytes / 2**20:8.0f} MiB {percent:+6.1f} %")
        p99 = [_quantiles(result.first_token_s)[1] for result in (alone, beside)]
        summary = {
            "benchmark": "soak",
            "minutes": round(self._duration_s / 60, 1),
            "first_token_p99_alone_s": round(p99[0], 3),
            "first_token_p99_beside_s": round(p99[1], 3),
            "beside_over_alone": round(p99[1] / p99[0], 2),
            "unexplained": len(alone.unexplained) + len(beside.unexplained),
            "largest_growth_percent": round(max((percent for _, percent in growth.values()), default=0.0), 1),
            "pages_left": pages_left,
        }
        print(json.dumps(summary))


def _quantiles(times_s: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    cuts = statistics.quantiles(times_s, n=100) if len(times_s) > 1 else [0.0] * 99
    return cuts[49], cuts[98]


def _processes(title: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()[:1]):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


if __name__ == "__main__":
    main()
