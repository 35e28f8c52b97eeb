"""What the ledger takes of Redis: bytes an answer by the part of the ledger, and the server's time to take one in.

A Redis server as `motet serve` starts it gets the answers of one day of several tenants, with many adapters each.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from motet.adapters.registry.ledger.ledger import Ledger
from motet.adapters.registry.registry import connect
from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.ledger_entries import bytes_by_kind, realistic_answers

PATIENCE_S = 600.0


async def measure(url: str, num_answers: int, tenants: list[str], num_adapters: int) -> None:
    client = connect(url, PATIENCE_S)
    ledger = Ledger(client, kept_days=3, timeout_s=PATIENCE_S)
    await ledger.take(realistic_answers(100, 1, tenant="warm"))
    before = (await client.info("memory"))["used_memory"]
    await client.config_resetstat()
    for seed, tenant in enumerate(tenants):
        await ledger.take(realistic_answers(num_answers // len(tenants), num_adapters, tenant, seed))
    taken_us = (await client.info("commandstats"))["cmdstat_evalsha"]["usec"]
    grown = (await client.info("memory"))["used_memory"] - before
    num_bytes, num_sums = Counter[str](), Counter[str]()
    for tenant in tenants:
        num_bytes += await bytes_by_kind(client, tenant)
        async for key in client.scan_iter(f"*tenant:{tenant}}}*"):
            if (kind := key.split(":")[-2]) in ("hours", "days"):
                num_sums[kind] += await client.hlen(key)
    await client.aclose()
    print(f"{num_answers:,} answers of {len(tenants)} tenants with {num_adapters} adapters each")
    print(
        f"memory: {grown / num_answers:.1f} bytes an answer; time in Redis: {taken_us / num_answers:.0f} us an answer"
    )
    for kind, total in num_bytes.most_common():
        each = f", {total / num_sums[kind]:.0f} bytes a sum" if kind in num_sums else ""
        print(f"  {kind:8} {total / num_answers:8.1f} bytes an answer{each}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=10)
    parser.add_argument("--adapters", type=int, default=100, help="of each tenant")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        try:
            tenants = [f"tenant-{number}" for number in range(options.tenants)]
            asyncio.run(measure(server.start(), options.answers, tenants, options.adapters))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
