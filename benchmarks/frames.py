"""Tokens per second from a gang to HTTP clients through one router, against Serve's own streaming handles.

A stand-in engine emits fixed tokens, one in each step for each of 64 streams, at higher and higher rates. The router is
the real one (detokenization, stop strings, OpenAI chunks, HAProxy in front), and the clients are real HTTP connections.
"per event" is the number of tokens in an SSE event: above 1, the router did not keep up with single tokens and merged
some. CPU is microseconds of each process for a token. The baseline is the same router, with each sequence as a
streaming call of a Serve `DeploymentHandle`, under the same Serve flags.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from motet.cluster.config import part_config
from motet.cluster.edge.edge_config import EdgeLimits
from motet.cluster.launch.janitor import Janitor
from motet.cluster.launch.local_serve import LOOPBACK, free_ports, serve_environment, set_environment, start_serve
from motet.cluster.settings.settings import Settings

Way = Literal["frames", "handles"]
ROOT = Path(__file__).parent
MODEL_PATH = ROOT.parent / "examples" / "demo" / "base"  # for its tokenizer
TEXT = "The router sends each request to a gang of workers that batches all tenants together, token by token. "
PROCESSES = {"router": "ray::ServeReplica:{way}:router", "gang": "ray::ServeReplica:{way}:gang", "proxy": "haproxy"}


@dataclass(frozen=True)
class Row:
    """One run. `cpu_us`: by process, for each token."""

    way: Way
    offered_per_s: int
    tokens_per_s: float
    tokens_per_event: float
    cpu_us: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0, help="that a run would take at its pace (default 4)")
    parser.add_argument("--steps-per-s", type=int, nargs="+", default=[50, 160, 320, 640], help="paces")
    arguments = parser.parse_args()
    session = secrets.token_hex(8)
    session_path = Path(tempfile.mkdtemp(prefix="motet-"))
    janitor = Janitor(session, session_path, session_path.with_name(f"{session_path.name}-logs"))
    try:
        port = free_ports(1)[0]
        set_environment(serve_environment(session, session_path, LOOPBACK, part_config(EdgeLimits, Settings())))
        start_serve(session_path, port, num_cpus=2)
        rows: list[Row] = []
        ways: tuple[Way, ...] = ("frames", "handles")
        for way in ways:
            url = _deploy(way, port)
            _run_clients(url, arguments.streams, 50, 50)  # warms up
            for pace in arguments.steps_per_s:
                rows.append(_measure(way, url, arguments.streams, pace, arguments.seconds))
    finally:
        _shut_down()
        janitor.finish()
    _report(rows, arguments.streams)


def _deploy(way: Way, port: int) -> str:
    """Deploys an app in place of the one before, and returns its URL."""
    from ray import serve
    from tokenizers import Tokenizer

    from motet.benchmarks.rigs.ready_gang import ReadyGang
    from motet.benchmarks.rigs.ready_router import ReadyRouter

    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    secret = secrets.token_hex(16)
    gangs: Any = serve.deployment(ReadyGang, name="gang", max_ongoing_requests=10_000)
    routers: Any = serve.deployment(
        serve.ingress()(ReadyRouter), name="router", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )
    gang = gangs.bind(token_ids, tokenizer.get_vocab_size(), secret)
    serve.run(routers.bind(way, secret, MODEL_PATH, gang), name=way, route_prefix=f"/{way}")
    return f"http://{LOOPBACK}:{port}/{way}"


def _measure(way: Way, url: str, num_streams: int, pace: int, seconds: float) -> Row:
    processes = {name: _find_process(title.format(way=way)) for name, title in PROCESSES.items()}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    counts = _run_clients(url, num_streams, int(pace * seconds), pace)
    spent = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
    return Row(
        way,
        num_streams * pace,
        counts["tokens"] / counts["seconds"],
        counts["tokens"] / counts["events"],
        {name: 1e6 * cpu_s / counts["tokens"] for name, cpu_s in spent.items()},
    )


def _run_clients(url: str, num_streams: int, num_tokens: int, pace: int) -> dict[str, float]:
    """Runs the clients in a process of their own, so that the Ray threads of this process do not slow them."""
    options = ["--streams", str(num_streams), "--tokens", str(num_tokens), "--steps-per-s", str(pace)]
    command = [sys.executable, str(ROOT / "rigs" / "sse_clients.py"), url, *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600).stdout
    counts: dict[str, float] = json.loads(output)
    return counts


def _find_process(title: str) -> psutil.Process:
    """The newest process of this session with this title."""
    children = psutil.Process().children(recursive=True)
    found = [process for process in children if title in " ".join(process.cmdline()[:1])]
    return max(found, key=lambda process: process.create_time())


def _shut_down() -> None:
    import ray

    ray.shutdown()


def _report(rows: list[Row], num_streams: int) -> None:
    print(
        f"{'way':8} {'offered/s':>9} {'tokens/s':>9} {'per event':>9}" + "".join(f"{n + ' µs':>10}" for n in PROCESSES)
    )
    for row in rows:
        cpu = "".join(f"{row.cpu_us[name]:10.1f}" for name in PROCESSES)
        print(f"{row.way:8} {row.offered_per_s:9d} {row.tokens_per_s:9.0f} {row.tokens_per_event:9.2f}{cpu}")
    best = {way: max(row.tokens_per_s for row in rows if row.way == way) for way in ("frames", "handles")}
    summary = {
        "benchmark": "frames",
        "streams": num_streams,
        "tokens_per_s": round(best["frames"]),
        "baseline": "Serve DeploymentHandle stream",
        "baseline_tokens_per_s": round(best["handles"]),
        "ratio": round(best["frames"] / best["handles"], 2),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
