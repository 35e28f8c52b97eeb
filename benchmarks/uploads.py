"""Uploads of 2,000 adapters through REST to one machine: how long they take, and whether memory stays bounded.

`motet serve` runs the demo model in processes of its own. Adapters of rank 4 (157 KB; `--rank 24`: 0.9 MB), all
different, are uploaded several at a time. After each tenth of them, a hundred random ones among those uploaded so far
are asked for one token, so that the gang loads far more than its host memory for adapters (`--host-bytes`, small here)
holds. Memory of router, gang and registry is PSS: what a process has for itself, and its share of what it has in common
with others. The growth for each adapter is reported for the second half of the uploads, when all pools and tiers are
full.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch
from safetensors.torch import load_file, save

from motet.cluster.launch.local_serve import free_ports

DEMO = Path(__file__).parent.parent / "examples" / "demo"
KEY = "key-of-the-benchmark"
HOST_BYTES = 16 << 20  # a few hundred of the adapters
PARTS = {"router": "ServeReplica:motet:router", "gang": "ServeReplica:motet:gang", "registry": "valkey"}


@dataclass(frozen=True)
class Row:
    num_uploaded: int
    uploads_per_s: float  # since the last row
    asks_per_s: float
    bytes_of: dict[str, int]  # by part


class Uploader:
    """Uploads adapter after adapter, and asks adapters for tokens."""

    def __init__(self, url: str, num_clients: int, rank: int) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False)
        self._threads = ThreadPoolExecutor(num_clients)
        folder = DEMO / "adapters" / "shout"
        config = json.loads((folder / "adapter_config.json").read_text())
        times = rank // config["r"]
        self._config = json.dumps(config | {"r": times * config["r"]}).encode()
        self._tensors = {
            name: tensor.repeat((times, 1) if "lora_A" in name else (1, times)).contiguous()
            for name, tensor in load_file(folder / "adapter_model.safetensors").items()
        }

    def upload(self, indices: Iterable[int]) -> None:
        list(self._threads.map(self._upload, indices))

    def ask(self, indices: Iterable[int]) -> None:
        list(self._threads.map(self._ask, indices))

    def _upload(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        scale = {name: 0.9 + 0.2 * torch.rand(1, generator=generator).item() for name in self._tensors}
        data = save({name: tensor * scale[name] for name, tensor in self._tensors.items()})
        files = {
            "adapter_config.json": ("adapter_config.json", self._config),
            "adapter_model.safetensors": ("adapter_model.safetensors", data),
        }
        answer = self._http.post("/v1/adapters", data={"name": f"adapter-{index}"}, files=files)
        if answer.status_code != 201:
            raise RuntimeError(f"upload {index}: {answer.status_code} {answer.text}")

    def _ask(self, index: int) -> None:
        messages = [{"role": "user", "content": "What color is the sky?"}]
        body = {"model": f"adapter-{index}", "messages": messages, "max_tokens": 1}
        answer = self._http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"asking adapter {index}: {answer.status_code} {answer.text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, default=2000, help="to upload (default 2000)")
    parser.add_argument("--clients", type=int, default=4, help="that upload at a time (default 4)")
    parser.add_argument("--rank", type=int, default=4, help="of each: a multiple of 4 (default 4)")
    parser.add_argument("--requests", type=int, default=100, help="requests after each tenth (default 100)")
    arguments = parser.parse_args()
    rng = random.Random(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        server = _start(Path(folder))
        try:
            assert server.stdout is not None
            ready = next((line for line in server.stdout if line.startswith("ready ")), None)
            if ready is None:
                raise RuntimeError((Path(folder) / "log").read_text())
            uploader = Uploader(ready.split()[1], arguments.clients, arguments.rank)
            num_uploaded = 0
            for number in range(1, 11):
                until = arguments.adapters * number // 10
                started = time.perf_counter()
                uploader.upload(range(num_uploaded, until))
                uploaded_at = time.perf_counter()
                uploader.ask(rng.randrange(until) for _ in range(arguments.requests))
                requested_s = time.perf_counter() - uploaded_at
                speed = (until - num_uploaded) / (uploaded_at - started)
                rows.append(Row(until, speed, arguments.requests / requested_s, _memory(server.pid)))
                num_uploaded = until
                _print(rows[-1], first=number == 1)
        finally:
            server.terminate()
            server.wait(timeout=60)
    _report(rows, arguments.rank)


def _start(folder: Path) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).parent / "motet"), "serve", str(DEMO / "base"), "--name", "demo"]
    command += ["--port", str(free_ports(1)[0]), "--data-dir", str(folder / "data")]
    command += ["--pool-bytes", "16MiB", "--host-bytes", str(HOST_BYTES), "--kv-host-bytes", "16MiB"]
    environ = os.environ | {"MOTET_KEYS": f"benchmark={KEY}"}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=environ
        )


def _memory(pid: int) -> dict[str, int]:
    found = dict.fromkeys(PARTS, 0)
    for process in psutil.Process(pid).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            for part, known in PARTS.items():
                if known in title:
                    found[part] += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def _print(row: Row, first: bool) -> None:
    if first:
        print(f"{'adapters':>8} {'uploads/s':>9} {'asks/s':>7}" + "".join(f"{part + ' MB':>12}" for part in PARTS))
    sizes = "".join(f"{num_bytes / 1e6:12.1f}" for num_bytes in row.bytes_of.values())
    print(f"{row.num_uploaded:8} {row.uploads_per_s:9.1f} {row.asks_per_s:7.1f}{sizes}", flush=True)


def _report(rows: list[Row], rank: int) -> None:
    first, last = rows[0], rows[-1]
    summary: dict[str, str | float] = {
        "benchmark": "uploads",
        "adapters": last.num_uploaded,
        "rank": rank,
        "upload_s": round(sum(last.num_uploaded / 10 / row.uploads_per_s for row in rows), 1),
        "uploads_per_s_last_over_first_tenth": round(last.uploads_per_s / first.uploads_per_s, 2),
    }
    half = rows[len(rows) // 2 - 1]
    for part in PARTS:
        grown = last.bytes_of[part] - half.bytes_of[part]
        summary[f"{part}_memory_over_first_tenth"] = round(last.bytes_of[part] / first.bytes_of[part], 2)
        summary[f"{part}_kb_per_adapter"] = round(grown / (last.num_uploaded - half.num_uploaded) / 1e3, 1)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
