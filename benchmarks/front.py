"""What a router does for tenants, and what that costs a request: keys, quotas, an adapter's name, and who keeps count.

One router process serves two fronts before a gang that answers at once: one that does all of it, with quotas of
requests, tokens and streams and the ledger in a Redis as `motet serve` starts it, and one that does none. Both are
asked in turn.
Latency: of one request at a time, from its sending to the end of its answer. CPU: of the router's process, with as many
requests under way as `--clients`. Each ratio is of one run. Beside them: a call of a script that writes to that Redis,
which has each change on its disk before it answers. A request makes such a call where its router has no grant.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from motet.adapters.registry.registry import connect
from motet.benchmarks.rigs import front_router
from motet.cluster.launch.redis_server import RedisServer

END = b"0\r\n\r\n"
FRONTS = ("off", "on")
_TURNS = 8  # of each front, in a round


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=400, help="of each front and round (default 400)")
    parser.add_argument("--rounds", type=int, default=5, help="of both fronts in turn (default 5)")
    parser.add_argument("--clients", type=int, default=16, help="that ask at once where CPU is measured (default 16)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, which is a stream (default 64)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        server = RedisServer(Path(folder) / "redis")
        url = server.start()
        command = [sys.executable, "-m", front_router.__name__, url]
        router = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert router.stdout is not None
            ports = json.loads(router.stdout.readline())
            asyncio.run(measure(ports, url, psutil.Process(router.pid), options))
        finally:
            router.communicate()
            server.stop()


async def measure(ports: dict[str, int], url: str, router: psutil.Process, options: argparse.Namespace) -> None:
    requests = {
        "on": request_bytes(front_router.ADAPTER, options.tokens),
        "off": request_bytes(front_router.BASE, options.tokens),
    }
    latencies: dict[str, list[float]] = {name: [] for name in FRONTS}
    cpu: dict[str, list[float]] = {name: [] for name in FRONTS}
    redis: list[float] = []
    for name in FRONTS:
        await ask(ports[name], requests[name], options.requests // 4, options.clients)  # warm
    for _ in range(options.rounds):
        for name in FRONTS * (options.requests // 2):  # one after the other, so that what disturbs disturbs both
            latencies[name] += await ask(ports[name], requests[name], 1, 1)
        redis += await write_to_redis(url, options.requests)
        for name in FRONTS * _TURNS:
            before = router.cpu_times()
            await ask(ports[name], requests[name], options.requests // _TURNS, options.clients)
            after = router.cpu_times()
            cpu[name].append(
                (after.user - before.user + after.system - before.system) / options.requests * _TURNS * 1e3
            )
    p50 = {name: statistics.median(latencies[name]) * 1e3 for name in FRONTS}
    cpu_ms = {name: statistics.mean(cpu[name]) for name in FRONTS}
    ratio = cpu_ms["on"] / cpu_ms["off"]
    for name in FRONTS:
        print(f"{name:4} p50 {p50[name]:6.2f} ms   CPU of the router {cpu_ms[name]:6.2f} ms a request")
    print(
        json.dumps(
            {
                "benchmark": "front",
                "added_p50_ms": round(p50["on"] - p50["off"], 2),
                "cpu_over_off": round(ratio, 2),
                "redis_p50_ms": round(statistics.median(redis) * 1e3, 2),
                **{f"{name}_p50_ms": round(p50[name], 2) for name in FRONTS},
                **{f"{name}_cpu_ms": round(cpu_ms[name], 2) for name in FRONTS},
                "tokens": options.tokens,
                "clients": options.clients,
            }
        )
    )


async def write_to_redis(url: str, count: int) -> list[float]:
    """Seconds that each of `count` calls of a script takes that writes one key: what a quota cannot do without."""
    client = connect(url)
    script = client.register_script("return redis.call('SET', KEYS[1], ARGV[1])")
    took: list[float] = []
    for number in range(count):
        began = time.perf_counter()
        await script(keys=["benchmark"], args=[number])
        took.append(time.perf_counter() - began)
    await client.aclose()
    return took


def request_bytes(model: str, num_tokens: int) -> bytes:
    body = json.dumps({"model": model, "prompt": list(range(10, 210)), "max_tokens": num_tokens, "stream": True})
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nAuthorization: Bearer {front_router.KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def ask(port: int, request: bytes, count: int, num_clients: int) -> list[float]:
    """Seconds of each of `count` requests, by so many clients, each on a connection that it keeps."""
    took: list[float] = []

    async def client(num_requests: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(num_requests):
            began = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(END)
            took.append(time.perf_counter() - began)
            assert answer.startswith(b"HTTP/1.1 200"), answer
        writer.close()

    await asyncio.gather(*(client(count // num_clients) for _ in range(num_clients)))
    return took


if __name__ == "__main__":
    main()
