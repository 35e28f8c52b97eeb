"""Tenants that send requests to a running motet, each in a process of its own, and print their results as JSON.

A quiet one streams short answers, one after the other at a pace. A flood keeps many requests open, and reads answers
only as whole documents, so that it takes the machine little.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

KEY_VARIABLE = "BENCHMARK_KEY"
TIMEOUT_S = 60.0
PACE_S = 0.03  # of the quiet one: from one request to the next, if the answer takes no longer
LONG_PROMPT = "Where the river bends the old mill still turns, and nobody remembers who built it. " * 10

Body = dict[str, Any]


@dataclass(frozen=True)
class Flood:
    """`num_open` requests at a time; `body` is given the number of each."""

    num_open: int
    body: Callable[[int], Body]


def floods(adapters: list[str]) -> dict[str, Flood]:
    """What a tenant may do to have more than its share. `adapters`: names of its own."""
    answer: Body = {"prompt": "Count to a hundred:", "max_tokens": 100, "ignore_eos": True}
    long: Body = {"max_tokens": 4, "ignore_eos": True}
    kinds = {
        "n=128": Flood(4, lambda number: answer | {"n": 128}),
        "long prompts": Flood(16, lambda number: long | {"prompt": f"{number} {LONG_PROMPT}"}),
        "connections": Flood(160, lambda number: answer),
    }
    if adapters:
        kinds["many adapters"] = Flood(16, lambda number: answer | {"model": adapters[number % len(adapters)]})
    return kinds


class Asking(subprocess.Popen[str]):
    """A client process. `nice`: its niceness."""

    def __init__(
        self, kind: str, url: str, key: str, model: str, seconds: float, adapters: list[str], nice: int
    ) -> None:
        arguments = [kind, url, model, str(seconds), *adapters]
        super().__init__(
            ["nice", "-n", str(nice), sys.executable, "-m", "motet.benchmarks.rigs.fairness_clients", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {KEY_VARIABLE: key},
        )

    def result(self) -> Any:
        """What it printed at its end. Raises RuntimeError if it failed."""
        output, _ = self.communicate()
        if self.returncode:
            raise RuntimeError(f"a client ended with {self.returncode}")
        return json.loads(output)


def ask_quietly(url: str, key: str, model: str, seconds: float) -> list[float]:
    """Seconds to the first token of each request. Raises ValueError if one is refused."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    first_token_s: list[float] = []
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        body = {
            "model": model,
            "prompt": f"{len(first_token_s)} The capital of France is a city that",
            "max_tokens": 4,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"the quiet tenant was refused: {response.status} {response.read()!r}")
        is_first = True
        while line := response.readline():
            if is_first and line.startswith(b"data: {"):
                first_token_s.append(time.monotonic() - began)
                is_first = False
        time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))
    connection.close()
    return first_token_s


async def flood(url: str, key: str, model: str, seconds: float, kind: Flood) -> dict[str, int]:
    """Keeps requests open for so long; how many were answered, and how many refused."""
    ends = {"answered": 0, "refused": 0, "tokens": 0}
    parts = urlsplit(url)
    number = iter(range(10**9))

    async def ask_forever() -> None:
        while True:
            data = json.dumps({"model": model, "stream": False} | kind.body(next(number))).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
            )
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(head.encode() + data)
                answer = await reader.read(-1)
            finally:
                writer.close()
            if b" 200 " in answer[:20]:
                ends["answered"] += 1
                ends["tokens"] += json.loads(answer.split(b"\r\n\r\n", 1)[1])["usage"]["completion_tokens"]
            else:
                ends["refused"] += 1
                await asyncio.sleep(0.2)

    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for _ in range(kind.num_open):
                tasks.create_task(ask_forever())
    except TimeoutError:
        pass
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind")
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("seconds", type=float)
    parser.add_argument("adapters", nargs="*")
    given = parser.parse_args()
    key = os.environ[KEY_VARIABLE]
    if given.kind == "quiet":
        print(json.dumps(ask_quietly(given.url, key, given.model, given.seconds)))
    else:
        kind = floods(given.adapters)[given.kind]
        print(json.dumps(asyncio.run(flood(given.url, key, given.model, given.seconds, kind))))


if __name__ == "__main__":
    main()
