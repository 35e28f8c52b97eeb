"""What strangers and hostile tenants take from a neighbour: its p50 and p99 under each attack beside the same without.

Each part starts what it attacks. Its last line is JSON of all parts' figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from motet.benchmarks.hostile_parts.agents import agents
from motet.benchmarks.hostile_parts.batch_memory import batch_memory
from motet.benchmarks.hostile_parts.grammars import grammars, refusals
from motet.benchmarks.hostile_parts.keyless import health, keyless, unknown_keys
from motet.benchmarks.hostile_parts.late_redis import refused_when_late
from motet.benchmarks.hostile_parts.logprobs import logprobs
from motet.benchmarks.hostile_parts.uploads import refused_uploads, slow_expressions

Part = Callable[[float], Awaitable[dict[str, float]]]  # seconds of an attack → figures


async def late_redis(seconds: float) -> dict[str, float]:
    """`late_redis_refused`: of requests of tenants with quotas, while one answer of Redis in ten is 150 ms late."""
    return {"late_redis_refused": round(await refused_when_late(seconds), 4)}


PARTS: Final[Mapping[str, Part]] = {
    "uploads": refused_uploads,
    "expressions": slow_expressions,
    "keyless": keyless,
    "health": health,
    "unknown-keys": unknown_keys,
    "grammars": grammars,
    "refusals": refusals,
    "logprobs": logprobs,
    "late-redis": late_redis,
    "batches": batch_memory,
    "agents": agents,
}


async def measure(names: list[str], seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in names:
        print(f"{name}:", flush=True)
        found |= await PARTS[name](seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack (default 20)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.parts, arguments.seconds))
    print(json.dumps({"benchmark": "hostile", **found}))


if __name__ == "__main__":
    main()
