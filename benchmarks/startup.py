"""What a start of the demo costs until `ready`: CPU seconds and memory by process, time, and the longest silence.

`motet serve` of the demo model is started some times, one after the other, each with a data folder of its own. At
`ready` each process reports the CPU that it and the children that it has outlived have taken, and the memory that it
has for itself with its share of what processes have in common (PSS). Motet's own processes stand above the line, Ray's
below it; the time that Ray's worker takes to come up before it becomes a router or a gang counts as the router's or the
gang's. The table has medians. CPU seconds stay comparable on a busy machine, other times do not.

`--path FOLDER --cli MODULE` measures another checkout: FOLDER holds it under the name `motet`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from motet.cluster.launch.local_serve import free_ports

DEMO = Path(__file__).parent.parent / "examples" / "demo" / "base"
LAUNCHER = "launcher"
OWN = {  # of motet, by what their command lines hold
    "router": ("ServeReplica:motet:router",),
    "gang": ("ServeReplica:motet:gang",),
    "redis": ("valkey-server", "redis-server"),
    "janitor": ("launch.janitor", "cluster.janitor"),
}
RAYS = {
    "serve controller": ("ServeController",),
    "serve proxies": ("ProxyActor", "HAProxyManager"),
    "haproxy": ("bin/haproxy",),
    "gcs": ("gcs_server",),
    "raylet": ("raylet/raylet",),
    "dashboard": ("dashboard.py", "DashboardAgent"),
    "other agents": ("RuntimeEnvAgent", "log_monitor", "monitor.py"),
    "others of ray": ("",),
}


@dataclass(frozen=True)
class Start:
    ready_s: float
    silence_s: float  # the longest without a line of progress
    cpu_s: Mapping[str, float]  # by part
    pss_bytes: Mapping[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=3, help="how many (default 3)")
    parser.add_argument("--compile", action="store_true", help="with native kernels compiled at each start")
    parser.add_argument("--path", type=Path, help="a folder with another `motet` in it")
    parser.add_argument("--cli", default="motet.cluster.commands.cli", help="its module of the command line")
    arguments = parser.parse_args()
    environment = dict(os.environ)
    if arguments.path is not None:
        environment["PYTHONPATH"] = str(arguments.path)
    starts = []
    for _ in range(arguments.starts):
        with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
            if arguments.compile:
                environment["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
            starts.append(_start(Path(folder), arguments.cli, environment))
    _report(starts)


def _start(folder: Path, cli: str, environment: Mapping[str, str]) -> Start:
    command = [sys.executable, "-c", f"from {cli} import main; main()", "serve", str(DEMO), "--name", "demo"]
    command += ["--port", str(free_ports(1)[0]), "--data-dir", str(folder / "data"), "--pool-bytes", "64MiB"]
    began = time.monotonic()
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert server.stdout is not None and server.stderr is not None
    progress: list[tuple[float, str]] = [(began, "")]
    lines = server.stderr
    reader = threading.Thread(target=lambda: progress.extend((time.monotonic(), line) for line in lines), daemon=True)
    reader.start()
    try:
        if not any(line.startswith("ready ") for line in server.stdout):
            reader.join()
            raise RuntimeError("".join(line for _, line in progress))
        times = [moment for moment, _ in progress] + [time.monotonic()]
        cpu_s, pss_bytes = _costs(psutil.Process(server.pid))
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
    silence_s = max(after - before for before, after in itertools.pairwise(times))
    return Start(times[-1] - began, silence_s, cpu_s, pss_bytes)


def _costs(launcher: psutil.Process) -> tuple[dict[str, float], dict[str, int]]:
    cpu_s: dict[str, float] = {}
    pss_bytes: dict[str, int] = {}
    for process in [launcher, *launcher.children(recursive=True)]:
        try:
            part = LAUNCHER if process == launcher else _part_of(process)
            times, memory = process.cpu_times(), process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        took = times.user + times.system + times.children_user + times.children_system
        cpu_s[part] = cpu_s.get(part, 0.0) + took
        pss_bytes[part] = pss_bytes.get(part, 0) + memory.pss
    return cpu_s, pss_bytes


def _part_of(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    return next(part for part, known in (OWN | RAYS).items() if any(word in title for word in known))


def _report(starts: list[Start]) -> None:
    own, rays = [LAUNCHER, *OWN], list(RAYS)
    cpu_s = {part: statistics.median(start.cpu_s.get(part, 0.0) for start in starts) for part in (*own, *rays)}
    pss_mb = {part: statistics.median(start.pss_bytes.get(part, 0) for start in starts) / 1e6 for part in (*own, *rays)}
    print(f"{'process':<18} {'CPU s':>7} {'PSS MB':>8}")
    for parts, name in ((own, "motet's own"), (rays, "Ray's")):
        for part in parts:
            print(f"{part:<18} {cpu_s[part]:7.1f} {pss_mb[part]:8.0f}")
        print(f"{name:<18} {sum(cpu_s[part] for part in parts):7.1f} {sum(pss_mb[part] for part in parts):8.0f}\n")
    summary: dict[str, object] = {
        "benchmark": "startup",
        "starts": len(starts),
        "own_cpu_s": round(sum(cpu_s[part] for part in own), 1),
        "rays_cpu_s": round(sum(cpu_s[part] for part in rays), 1),
        "own_pss_mb": round(sum(pss_mb[part] for part in own)),
        "rays_pss_mb": round(sum(pss_mb[part] for part in rays)),
        "router_pss_mb": round(pss_mb["router"]),
        "launcher_pss_mb": round(pss_mb[LAUNCHER]),
        "ready_s": round(statistics.median(start.ready_s for start in starts), 1),
        "longest_silence_s": round(statistics.median(start.silence_s for start in starts), 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
