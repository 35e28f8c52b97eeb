"""Clients that send refused uploads, each one after the other, in a process of their own until its input ends.

Prints how many were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from motet.benchmarks.rigs.raw_requests import ask, upload
from motet.benchmarks.rigs.upload_router import TENANTS, key_of

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
HEADER_BYTES = 8_000_000
SLOW = r"(\w+|[a-z._0-9]+)+!"
REFUSED = (400, 413)


def large_header() -> bytes:
    """A file whose header takes long to parse, and that is refused then."""
    entries, size, number = [], 0, 0
    while size < HEADER_BYTES:
        name = f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_A.weight"
        entries.append(f'"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}')
        size, number = size + len(entries[-1]) + 1, number + 1
    header = ("{" + ",".join(entries) + "}").encode()
    return len(header).to_bytes(8, "little") + header


def requests_of(kind: str) -> list[bytes]:
    """One for each client."""
    attackers = TENANTS[1:]
    if kind == "headers":
        data = large_header()
        return [upload(key_of(tenant), "x", CONFIG, data) for tenant in attackers[:2]]
    # Two of each tenant, so that they take all places for uploads under way.
    return [upload(key_of(tenant), "x", CONFIG | {"target_modules": SLOW}, b"x" * 100) for tenant in attackers * 2]


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("kind", choices=["headers", "expressions"])
    arguments = parser.parse_args()
    requests, num_answered = requests_of(arguments.kind), 0

    async def attack(request: bytes) -> None:
        nonlocal num_answered
        while True:
            status, _ = await ask(arguments.port, request)
            if status not in REFUSED:
                raise RuntimeError(f"an upload that is to be refused was answered {status}")
            num_answered += 1

    print("attacking", flush=True)
    tasks = [asyncio.create_task(attack(request)) for request in requests]
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    done, _ = await asyncio.wait([reading, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task in done:
            task.result()
        task.cancel()
    print(json.dumps(num_answered), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
