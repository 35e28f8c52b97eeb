"""What strangers and hostile tenants take from a neighbour: its p50 and p99 under each attack beside the same without.

Each part starts what it attacks. Its last line is JSON of all parts' figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from motet.benchmarks.hostile_parts.grammars import grammars, refusals
from motet.benchmarks.hostile_parts.keyless import health, keyless, unknown_keys
from motet.benchmarks.hostile_parts.uploads import refused_uploads, slow_expressions

Part = Callable[[float], Awaitable[dict[str, float]]]  # seconds of an attack → figures

PARTS: Final[Mapping[str, Part]] = {
    "uploads": refused_uploads,
    "expressions": slow_expressions,
    "keyless": keyless,
    "health": health,
    "unknown-keys": unknown_keys,
    "grammars": grammars,
    "refusals": refusals,
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
