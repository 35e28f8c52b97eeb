"""What a scrape costs a router: the text of its own page, and how late the event loop comes while it is made.

The baseline is the same text made on the loop itself. "gangs": what `/metrics` of the API's port shows of them too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from itertools import chain

from motet.cluster.replicas.replica_start import SWITCH_INTERVAL_S
from motet.router.exposition.families import RouterFacts, gang_families, router_families, text_of
from motet.router.metrics import Metrics
from motet.workers.wire.engine_load import EngineLoad

TICK_S = 0.001
LABELS = {"router": "r1", "base": "base"}


def text(num_gangs: int) -> bytes:
    facts = RouterFacts(num_gangs=1, num_resumed=0, num_moved=0, num_gang_faults={}, is_registry_connected=True)
    loads = {f"g{number}": EngineLoad() for number in range(num_gangs)}
    return text_of(chain(router_families(Metrics(), facts, LABELS), gang_families(loads, LABELS)))


async def longest_wait_s(num_gangs: int, *, in_thread: bool) -> float:
    """By how much a timer of the loop comes late at most, while one page is made."""
    latest_s, is_done = 0.0, asyncio.Event()

    async def tick() -> None:
        nonlocal latest_s
        while not is_done.is_set():
            due_at = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            latest_s = max(latest_s, time.perf_counter() - due_at)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    if in_thread:
        await asyncio.to_thread(text, num_gangs)
    else:
        text(num_gangs)
    is_done.set()
    await ticking
    return latest_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gangs", type=int, nargs="+", default=[0, 8, 64])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    print(f"{'gangs':>6} {'series':>7} {'CPU ms':>7} {'held on loop ms':>16} {'in thread ms':>13} {'ratio':>6}")
    for num_gangs in arguments.gangs:
        began_at = time.process_time()
        for _ in range(arguments.rounds):
            made = text(num_gangs)
        cpu_ms = (time.process_time() - began_at) / arguments.rounds * 1e3
        held = [
            sorted(asyncio.run(longest_wait_s(num_gangs, in_thread=in_thread)) for _ in range(arguments.rounds))
            for in_thread in (False, True)
        ]
        on_loop, in_thread = (waits[len(waits) // 2] * 1e3 for waits in held)
        num_series = sum(not line.startswith(b"#") for line in made.splitlines())
        ratio = in_thread / on_loop
        print(f"{num_gangs:>6} {num_series:>7} {cpu_ms:>7.2f} {on_loop:>16.2f} {in_thread:>13.2f} {ratio:>6.2f}")


if __name__ == "__main__":
    main()
