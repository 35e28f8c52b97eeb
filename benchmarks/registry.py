"""What a registry of a million adapters costs a router: to start, in memory, for a name that it keeps and one that it
looks up, for a page of a tenant's list, and for what launches and sweeps read.

A Redis server as `motet serve` starts it is filled with adapters of seven modules, of 1,000 tenants and of one more
that has 100,000. Each number of adapters is measured in a process of its own, which holds nothing but a router's view,
in milliseconds of its CPU where the name says so. With `--python`, the view of another checkout starts as well.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import psutil
from redis.asyncio import Redis

from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.registry_view import CAPACITY, RegistryView
from motet.cluster.launch.redis_server import RedisServer

Item = TypeVar("Item")
COUNTS = (0, 10_000, 60_000, 200_000, 1_000_000)
NUM_KEYS = 10_000
LARGE_TENANT = 100_000  # adapters of "large", if there are so many in all; a thousand tenants share the others
NUM_LOOKUPS = 2_000
PAGE = 100
RANKS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 16)
FACTS = json.dumps({"module_ranks": RANKS, "num_bytes": 12_345_678, "created_at": 1760000000.123})
PREFIX = "motet:{registry}:"
# The view of whichever checkout runs it: seconds to start, those of CPU, and MiB.
START = """
import asyncio, json, sys, time
import psutil
from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.registry_view import RegistryView
async def main():
    client = connect(sys.argv[1])
    before = psutil.Process().memory_info().rss
    view = RegistryView(Registry(client))
    began, cpu = time.perf_counter(), time.process_time()
    try:
        await view.start()
    except Exception as error:
        print(json.dumps([None, str(error)[:80]]))
        return
    took = [time.perf_counter() - began, time.process_time() - cpu]
    print(json.dumps([*took, (psutil.Process().memory_info().rss - before) / 2**20]))
    await view.stop()
asyncio.run(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="adapters in the registry")
    parser.add_argument("--python", help="the Python of another checkout's environment, whose view is started, too")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # the child process: the registry's URL
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asyncio.run(measure(options.measure))))
        return
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder) / "redis")
        url = server.start()
        try:
            held = 0
            for count in sorted(options.counts):
                asyncio.run(fill(url, held, count))
                held = count
                row = json.loads(_run([sys.executable, __file__, "--measure", url]))
                rows.append({"adapters": count, **row})
                print(", ".join(f"{name} {value:,.4g}" for name, value in rows[-1].items()), flush=True)
                if options.python:
                    print(f"  the other checkout: s, CPU s, MiB: {_run([options.python, '-c', START, url]).strip()}")
        finally:
            server.stop()
    print(json.dumps({"mib_over_none": rows[-1]["mib"] - rows[0]["mib"], "start_ms": rows[-1]["start_ms"]}))


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


async def fill(url: str, start: int, stop: int) -> None:
    """Adds the adapters `start` to `stop`, as uploads leave them, but for the events."""
    client: Redis = Redis.from_url(url)
    for some in batched(names(start, stop), 5_000):
        records: dict[Any, Any] = {f"{tenant}/{name}": f"1 {digest} {FACTS}" for tenant, name, digest in some}
        pipeline = client.pipeline(transaction=False)
        pipeline.hset(PREFIX + "adapters", mapping=records)
        pipeline.hset(PREFIX + "versions", mapping=dict.fromkeys(records, 1))
        pipeline.zadd(PREFIX + "names", dict.fromkeys(records, 0))
        await pipeline.execute()
    if start == 0:
        keys: dict[Any, Any] = {
            hashlib.sha256(str(i).encode()).hexdigest(): f"tenant{i % 1000}" for i in range(NUM_KEYS)
        }
        await client.hset(PREFIX + "keys", mapping=keys)
    await client.aclose()


def batched(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while some := list(islice(items, size)):
        yield some


def names(start: int, stop: int) -> Iterator[tuple[str, str, str]]:
    for i in range(start, stop):
        tenant = "large" if i < LARGE_TENANT else f"tenant{i % 1000}"
        yield tenant, f"adapter-{i:07}", hashlib.sha256(str(i).encode()).hexdigest()


async def measure(url: str) -> dict[str, float]:
    client = connect(url)
    registry = Registry(client)
    num_adapters = (await registry.position()).num_adapters
    process = psutil.Process()
    before = process.memory_info().rss
    row: dict[str, float] = {}
    view = RegistryView(registry)
    with timed(row, "start"):
        await view.start()
    with timed(row, "fill"):
        while num_adapters <= CAPACITY and not view.is_whole:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    row["start_mib"] = (process.memory_info().rss - before) / 2**20
    wanted = list(islice(names(0, num_adapters), 0, None, max(1, num_adapters // NUM_LOOKUPS)))
    with timed(row, "first_ask", len(wanted)):
        for tenant, name, digest in wanted:
            found = await view.resolve(tenant, name)
            assert found is not None and found.digest == digest
    with timed(row, "next_ask", len(wanted)):
        for tenant, name, _ in wanted:
            await view.resolve(tenant, name)
    for some in batched(names(0, min(num_adapters, 100_000)), 200):  # more than it may keep, many at once
        await asyncio.gather(*(view.resolve(tenant, name) for tenant, name, _ in some))
    row["kept"] = view.num_kept
    row["mib"] = (process.memory_info().rss - before) / 2**20
    with timed(row, "page"):
        await view.list_adapters("large", "adapter-0000500", PAGE)
    with timed(row, "launch_check"):
        await registry.tenants_with("the-base")
    with timed(row, "digests"):
        await registry.digests()
    await view.stop()
    await client.aclose()
    return row


@contextmanager
def timed(row: dict[str, float], what: str, count: int = 1) -> Iterator[None]:
    """Sets the milliseconds of the context, of the clock and of this process's CPU, over `count`."""
    began, cpu_began = time.perf_counter(), time.process_time()
    yield
    row[f"{what}_ms"] = 1e3 * (time.perf_counter() - began) / max(1, count)
    row[f"{what}_cpu_ms"] = 1e3 * (time.process_time() - cpu_began) / max(1, count)


if __name__ == "__main__":
    main()
