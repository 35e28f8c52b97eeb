"""What `--threads` gives a served motet, with router, HAProxy and clients on the same cores.

`motet serve` of a random model of SmolLM2-135M's shape is started once for each number of threads. 64 streaming
completions are sent at once, three times: the first time to warm up, and the better of the other two counts. The
baseline is one thread. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from motet.benchmarks.rigs.random_model import write_model
from motet.benchmarks.rigs.workload import Job, draw_jobs
from motet.cluster.launch.local_serve import free_ports

DEMO = Path(__file__).parent.parent / "examples" / "demo" / "base"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
KEY = "key-of-the-benchmark"
NUM_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers to try (default 1 2)")
    parser.add_argument("--streams", type=int, default=64, help="sent at once (default 64)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        model_path = write_model(Path(name) / "model")
        for file in TOKENIZER_FILES:
            shutil.copy(DEMO / file, model_path)
        vocab_size = len(json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"])
        jobs = draw_jobs(arguments.streams, [None], vocab_size)
        speeds = {count: _tokens_per_s(Path(name), model_path, count, jobs) for count in arguments.threads}
    baseline = speeds[arguments.threads[0]]
    for count, speed in speeds.items():
        print(f"{count} threads: {speed:7.1f} tokens/s, {speed / baseline:.2f} times {arguments.threads[0]}")
    print(
        json.dumps(
            {"benchmark": "threads", **{f"speedup_{count}": round(speeds[count] / baseline, 2) for count in speeds}}
        )
    )


def _tokens_per_s(folder: Path, model_path: Path, num_threads: int, jobs: list[Job]) -> float:
    command = [str(Path(sys.executable).parent / "motet"), "serve", str(model_path)]
    command += ["--port", str(free_ports(1)[0]), "--data-dir", str(folder / f"data{num_threads}")]
    command += ["--threads", str(num_threads), "--pool-bytes", "512MiB", "--no-prefix-cache"]
    environ = os.environ | {"MOTET_KEYS": f"benchmark={KEY}"}
    log_path = folder / "log"
    with log_path.open("w") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=environ
        )
    try:
        assert server.stdout is not None
        ready = next((line for line in server.stdout if line.startswith("ready ")), None)
        if ready is None:
            raise RuntimeError(log_path.read_text())
        rounds = [_round(ready.split()[1], jobs) for _ in range(NUM_ROUNDS)]
        return max(rounds[1:])
    finally:
        server.terminate()
        server.wait(timeout=60)


def _round(url: str, jobs: list[Job]) -> float:
    """Output tokens per second from the first request to the last answer."""

    def ask(job: Job) -> int:
        fields = {"model": "model", "prompt": job.prompt_token_ids, "max_tokens": job.num_output_tokens}
        fields |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        last = ""
        with http.stream("POST", f"{url}/v1/completions", json=fields) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    last = line
        num_tokens: int = json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]
        return num_tokens

    limits = httpx.Limits(max_connections=len(jobs))
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        httpx.Client(timeout=600, trust_env=False, limits=limits, headers=headers) as http,
        ThreadPoolExecutor(len(jobs)) as pool,
    ):
        started = time.perf_counter()
        num_tokens = sum(pool.map(ask, jobs))
        return num_tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
