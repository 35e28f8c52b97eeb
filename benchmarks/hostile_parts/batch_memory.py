"""What a router's process grows by while it runs a batch whose small lines have long answers.

`python -m motet.benchmarks.hostile_parts.batch_memory` runs one such router, with a stand-in for its gang.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import psutil

from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.batch_client import BatchClient, line
from motet.tests.rigs.real_front import real_front
from motet.tests.rigs.router_rig import text_service
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate, TokenLogprobs

_NUM_LINES: Final = 16
_FIELDS: Final[dict[str, Any]] = {"n": 64, "logprobs": 20, "max_tokens": 200}  # some 7 MB an answer
_PART: Final = 20  # tokens that come at once


def _updates(request: SequenceRequest) -> list[SequenceUpdate]:
    num_tokens = request.sampling.max_tokens or 1
    values = [
        TokenLogprobs(-0.5, [*range(40, 60)], [-1.2345678 - place / 7 for place in range(20)]) for _ in range(_PART)
    ]
    parts = num_tokens // _PART
    return [SequenceUpdate(1, [50] * _PART, values, None if part < parts - 1 else "length") for part in range(parts)]


async def batch_memory(seconds: float) -> dict[str, float]:
    """`batch_mb_per_router`: the most that the process had, less what it had before. `seconds` is not used."""
    command = [sys.executable, "-m", "motet.benchmarks.hostile_parts.batch_memory"]
    ran = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    print(f"  {figures}", flush=True)
    return {"batch_mb_per_router": figures["grown_mb"]}


async def _run(url: str, folder: Path) -> dict[str, float]:
    process, most, is_over = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.01):
            most = max(most, process.memory_info().rss)

    async with real_front(url, folder, text_service()) as front:
        front.dispatcher.script = _updates
        front.batches.start()
        owner = BatchClient(front)
        await owner.ended(await owner.create(await owner.upload([line("warm")])))
        before = process.memory_info().rss
        watching = threading.Thread(target=watch)
        watching.start()
        began = time.monotonic()
        lines = [line(f"id-{number}", **_FIELDS) for number in range(_NUM_LINES)]
        batch = await owner.ended(await owner.create(await owner.upload(lines)))
        is_over.set()
        watching.join()
        await front.batches.stop()
        assert batch["request_counts"]["completed"] == _NUM_LINES, batch
    return {
        "before_mb": round(before / 2**20),
        "grown_mb": round((most - before) / 2**20),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        server = RedisServer(Path(folder) / "redis")
        try:
            print(json.dumps(asyncio.run(_run(server.start(), Path(folder)))))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
