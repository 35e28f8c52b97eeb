"""A node's processes, each with its part in the node's page: `python -m … PORT READ_S router_r1 gang_g1 …`.

It prints their process ids in this order, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import Metric

from motet.cluster.config import part_config
from motet.cluster.exposition import node_page
from motet.cluster.exposition.node_page import ExpositionConfig, ProcessPage
from motet.router.exposition.families import Families
from motet.tests.rigs.part_configs import DEFAULTS

LOOPBACK: Final = "127.0.0.1"
KEY: Final = "secret"


def requests_of(process: str, name: str, number: float = 3) -> Callable[[], Iterator[Metric]]:
    """What a process shows: one counter."""

    def metrics() -> Iterator[Metric]:
        yield Families({process: name, "base": "llama"}).counter("motet_requests", "Requests.", number)

    return metrics


@contextmanager
def metrics_node(port: int, names: list[str], read_s: float) -> Iterator[list[int]]:
    """Running processes of these names; their ids."""
    command = [sys.executable, "-m", "motet.tests.rigs.metrics_node", str(port), str(read_s), *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield [int(pid) for pid in running.stdout.readline().split()]
        finally:
            running.communicate("")


async def _show(process: str, name: str, port: int) -> None:
    config = part_config(ExpositionConfig, DEFAULTS, name="llama", metrics_port=port)
    page = ProcessPage(config, process, name, KEY, requests_of(process, name))  # type: ignore[arg-type]
    await page.start(LOOPBACK)
    await asyncio.Event().wait()


def main(port: str, read_s: str, *names: str) -> None:
    node_page.READ_S = float(read_s)  # type: ignore[misc]
    pids = []
    for name in names:
        pid = os.fork()
        if pid == 0:
            process, _, rest = name.partition("_")
            asyncio.run(_show(process, rest, int(port)))
        pids.append(pid)
    print(*pids, flush=True)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
