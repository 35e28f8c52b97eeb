"""Seconds without tokens for streams whose gang is killed with -9, with a warm spare gang and without one.

A whole motet runs on this machine: Ray Serve, two gangs of the demo model, one router. In each round some clients
stream from it over HTTP. In rounds with a spare, the gang that serves more streams is killed in the middle; in the
baseline both gangs are killed, and the streams wait until Serve has started another. Undisturbed rounds show the pauses
of the machine itself. The pause of a stream is the longest time between two of its events; the pause of a round is that
of its slowest stream. The benchmark fails unless every stream ends with every token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from motet.cluster.config import MotetConfig
from motet.cluster.launch.launch import Deployment
from motet.cluster.launch.local_serve import free_ports

MODEL_PATH = Path(__file__).parent.parent / "examples" / "demo" / "base"
KEY = "key-of-the-benchmark"
OPERATOR_KEY = "key-of-operators"
OPERATORS = {"Authorization": f"Bearer {OPERATOR_KEY}"}
NUM_GANGS = 2
NUM_TOKENS = 480
KILL_AFTER = 10  # events of every stream
TIMEOUT_S = 120.0
SHOWN = {str(token_id): -100 for token_id in range(4)}  # not those of the demo model's tokens that have no text
KINDS = {0: "undisturbed", 1: "spare", NUM_GANGS: "no spare"}  # by the number of gangs that are killed


@dataclass(frozen=True)
class Round:
    num_killed: int
    num_resumed: int
    pauses_s: list[float]  # of each stream

    @property
    def pause_s(self) -> float:
        return max(self.pauses_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--streams", type=int, default=8, help="of each round (default 8)")
    arguments = parser.parse_args()
    deployment = Deployment()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        config = MotetConfig.of(
            model_path=MODEL_PATH,
            data_dir=Path(folder),
            port=free_ports(1)[0],
            keys=(("benchmark", KEY),),
            operator_key=OPERATOR_KEY,
            pool_bytes=64 << 20,
            host_bytes=64 << 20,
            min_gangs=NUM_GANGS,
        )
        deployment.start(config, lambda name, done, total: None)
        try:
            headers = {"Authorization": f"Bearer {KEY}"}
            with httpx.Client(base_url=config.url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
                play(client, arguments.streams, num_killed=0)  # warms up
                # In turn, so that what disturbs the machine disturbs all alike.
                rounds = [
                    play(client, arguments.streams, num_killed) for _ in range(arguments.rounds) for num_killed in KINDS
                ]
        finally:
            deployment.stop()
    report(rounds, arguments.streams)


def play(client: httpx.Client, num_streams: int, num_killed: int) -> Round:
    """One round: streams, kills this many gangs in the middle, and waits until all gangs are back."""
    wait_until(lambda: len(status(client)["gangs"]) == NUM_GANGS)
    num_resumed = resumed(client)
    kill = partial(kill_busiest, gangs(), num_killed)
    under_way = threading.Barrier(num_streams, action=kill, timeout=TIMEOUT_S)
    with ThreadPoolExecutor(num_streams) as pool:
        pauses = list(pool.map(partial(stream, client, under_way), range(num_streams)))
    num_resumed = resumed(client) - num_resumed
    if num_killed and not num_resumed:
        raise SystemExit("no stream was under way when its gang was killed: take more --streams")
    return Round(num_killed, num_resumed, pauses)


def stream(client: httpx.Client, under_way: threading.Barrier, seed: int) -> float:
    """The longest time between two events of one stream, which begins to count when all streams have begun."""
    body = {"model": MODEL_PATH.name, "prompt": "What", "max_tokens": NUM_TOKENS, "seed": seed, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "logit_bias": SHOWN}
    longest_s, num_events, last = 0.0, 0, ""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        at = time.monotonic()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            num_events += 1
            now = time.monotonic()
            longest_s, at, last = max(longest_s, now - at), now, line.removeprefix("data: ")
            if num_events == KILL_AFTER:
                under_way.wait()
                at = time.monotonic()  # waiting for other streams is no pause
    answer = json.loads(last)
    if answer.get("usage", {}).get("completion_tokens") != NUM_TOKENS:
        raise SystemExit(f"a stream did not come to its end: {last}")
    return longest_s


def gangs() -> list[psutil.Process]:
    """The gangs' processes that are ready to serve or starting."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "ServeReplica:motet:gang" in title(process)]


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def kill_busiest(processes: list[psutil.Process], number: int) -> None:
    """Kills this many gangs, first those that compute at the moment."""
    used = {process: process.cpu_times().user for process in processes}
    time.sleep(0.1)
    for process in sorted(processes, key=lambda process: used[process] - process.cpu_times().user)[:number]:
        process.kill()


def status(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/status", headers=OPERATORS).raise_for_status().json()
    return found


def resumed(client: httpx.Client) -> int:
    lines = client.get("/metrics", headers=OPERATORS).raise_for_status().text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("motet_resumed_sequences_total"))))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"the gangs were not back within {TIMEOUT_S:g} s")
        time.sleep(0.1)


def report(rounds: list[Round], num_streams: int) -> None:
    print(f"{'':12} {'round':>5} {'resumptions':>11} {'longest pause s':>16}")
    medians: dict[int, float] = {}
    for num_killed, name in KINDS.items():
        those = [played for played in rounds if played.num_killed == num_killed]
        medians[num_killed] = statistics.median(played.pause_s for played in those)
        for number, played in enumerate(those, 1):
            print(f"{name:12} {number:5} {played.num_resumed:11} {played.pause_s:16.2f}")
    summary = {
        "benchmark": "recovery",
        "streams": num_streams,
        "pause_s": round(medians[1], 2),
        "worst_pause_s": round(max(played.pause_s for played in rounds if played.num_killed == 1), 2),
        "undisturbed_pause_s": round(medians[0], 2),
        "baseline": "no spare gang: the streams wait for a new one",
        "baseline_pause_s": round(medians[NUM_GANGS], 2),
        "ratio": round(medians[1] / medians[NUM_GANGS], 3),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
