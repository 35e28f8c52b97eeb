"""What a served motet computes on this machine's CPUs: tokens per second and CPU seconds, by number of threads.

`motet serve` of a random model of SmolLM2-135M's shape is started for each number of threads. With `--before FOLDER`, a
checkout of other code with its own FOLDER/.venv, that code is started in turn with this one. Streaming completions are
sent at once, first to warm up; the best of the rounds after that counts. CPU seconds are those of all processes under
`motet serve` in that round, also by process, and of the clients. Nothing else should run beside it.

In one round more Linux's `perf` samples the gang's thread that computes: which part of the time it was in native
kernels, in Python (with ctypes and what else is not native or torch), in torch, in the system, and waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from motet.benchmarks.rigs.random_model import write_model
from motet.benchmarks.rigs.workload import Job, draw_jobs
from motet.cluster.launch.local_serve import free_ports

HERE = Path(__file__).parent.parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
KEY = "key-of-the-benchmark"
TICKS = os.sysconf("SC_CLK_TCK")
GANG = "motet:gang"
SAMPLES_PER_S = 299
PARTS = {  # by what the names of libraries contain
    "native kernels": ("/kernels-",),
    "torch": ("libtorch", "libc10", "libdnnl"),
    "system": ("[kernel",),
    "Python": ("",),  # with ctypes and what else there is
}


@dataclass(frozen=True)
class Round:
    """One burst of requests, from the first to the last answer."""

    num_tokens: int
    wall_s: float
    cpu_s: dict[str, float]  # by process
    first_token_s: list[float]
    clients_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def cpu_per_token(self) -> float:
        return sum(self.cpu_s.values()) / self.num_tokens

    @property
    def p99_over_p50(self) -> float:
        times = sorted(self.first_token_s)
        return times[min(len(times) - 1, len(times) * 99 // 100)] / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=32, help="sent at once (default 32)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers to try (default 1 2)")
    parser.add_argument("--dtype", default="bfloat16", help="of the base (default bfloat16)")
    parser.add_argument("--before", type=Path, help="a checkout of other code, with its .venv")
    parser.add_argument("--turns", type=int, default=2, help="starts of each kind (default 2)")
    parser.add_argument("--rounds", type=int, default=2, help="bursts of a start, after one that warms up (default 2)")
    arguments = parser.parse_args()
    codes = {"now": HERE} | ({"before": arguments.before.resolve()} if arguments.before else {})
    kinds = [(code, threads) for threads in arguments.threads for code in codes]
    rounds: dict[tuple[str, int], list[Round]] = {kind: [] for kind in kinds}
    found_shares: dict[int, dict[str, float]] = {}  # by number of threads
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        model_path, jobs = _prepare(Path(name), arguments.streams)
        for turn in range(arguments.turns):
            for code, threads in kinds:
                data = Path(name) / f"data-{code}-{threads}-{turn}"
                with _served(codes[code], model_path, data, threads, arguments.dtype) as (url, pid):
                    done = [_round(url, pid, jobs) for _ in range(1 + arguments.rounds)]
                    if code == "now" and turn == 0 and shutil.which("perf"):
                        with _sampled(pid, Path(name) / "samples") as shares:
                            _round(url, pid, jobs)
                        found_shares[threads] = shares
                rounds[code, threads] += done[1:]
    best = {kind: max(found, key=lambda each: each.tokens_per_s) for kind, found in rounds.items()}
    for (code, threads), found in best.items():
        own = ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in sorted(found.cpu_s.items(), key=lambda item: -item[1])[:4]
        )
        print(
            f"{code:6} {threads} threads: {found.tokens_per_s:7.1f} tokens/s, {1e3 * found.cpu_per_token:6.2f} CPU ms "
            f"a token ({own}, clients {found.clients_cpu_s:.1f} s of {found.wall_s:.1f}); "
            f"first token p50 {statistics.median(found.first_token_s):.2f} s, p99 {found.p99_over_p50:.2f} times"
        )
    for threads, shares in found_shares.items():
        listed = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        print(f"the computing thread with {threads} threads: {listed}")
    least, *more = arguments.threads
    one, line = best["now", least], dict[str, str | float](benchmark="served")
    for threads in more:
        found = best["now", threads]
        line[f"threads_{threads}_over_{least}"] = round(found.tokens_per_s / one.tokens_per_s, 2)
        line[f"cpu_per_token_{threads}_over_{least}"] = round(found.cpu_per_token / one.cpu_per_token, 2)
    line["burst_ttft_p99_over_p50"] = round(max(best["now", threads].p99_over_p50 for threads in arguments.threads), 2)
    if found_shares:
        line["python_and_waiting"] = round(max(each["Python"] + each["waiting"] for each in found_shares.values()), 2)
    if arguments.before:
        ratios = [
            best["now", threads].tokens_per_s / best["before", threads].tokens_per_s for threads in arguments.threads
        ]
        line["over_before"] = round(min(ratios), 2)
    print(json.dumps(line))


def _prepare(folder: Path, num_streams: int) -> tuple[Path, list[Job]]:
    demo = HERE / "examples" / "demo" / "base"
    model_path = write_model(folder / "model")
    for file in TOKENIZER_FILES:
        shutil.copy(demo / file, model_path)
    vocab_size = len(json.loads((demo / "tokenizer.json").read_text())["model"]["vocab"])
    return model_path, draw_jobs(num_streams, [None], vocab_size)


@contextmanager
def _served(code: Path, model_path: Path, data: Path, num_threads: int, dtype: str) -> Iterator[tuple[str, int]]:
    """The URL and the process of a motet that serves."""
    command = [str(code / ".venv" / "bin" / "motet"), "serve", str(model_path)]
    command += ["--port", str(free_ports(1)[0]), "--data-dir", str(data), "--dtype", dtype]
    command += ["--threads", str(num_threads), "--pool-bytes", "512MiB", "--no-prefix-cache"]
    log_path = data.with_suffix(".log")
    with log_path.open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env=os.environ | {"MOTET_KEYS": f"benchmark={KEY}"},
        )
    try:
        assert server.stdout is not None
        ready = next((line for line in server.stdout if line.startswith("ready ")), None)
        if ready is None:
            raise RuntimeError(log_path.read_text())
        yield ready.split()[1], server.pid
    finally:
        server.terminate()
        server.wait(timeout=60)


def _round(url: str, pid: int, jobs: list[Job]) -> Round:
    def ask(job: Job) -> tuple[int, float]:
        """Output tokens, and when the first one came."""
        fields = {"model": "model", "prompt": job.prompt_token_ids, "max_tokens": job.num_output_tokens}
        fields |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        last, first_at = "", 0.0
        with http.stream("POST", f"{url}/v1/completions", json=fields) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first_at, last = first_at or time.perf_counter(), line
        return json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"], first_at - started

    limits = httpx.Limits(max_connections=len(jobs))
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        httpx.Client(timeout=600, trust_env=False, limits=limits, headers=headers) as http,
        ThreadPoolExecutor(len(jobs)) as pool,
    ):
        before, clients_before, started = _cpu_seconds(pid), time.process_time(), time.perf_counter()
        answers = list(pool.map(ask, jobs))
        wall_s, after = time.perf_counter() - started, _cpu_seconds(pid)
        clients_s = time.process_time() - clients_before
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return Round(sum(tokens for tokens, _ in answers), wall_s, spent, [first for _, first in answers], clients_s)


@contextmanager
def _sampled(root: int, path: Path) -> Iterator[dict[str, float]]:
    """Fills a dict with the shares of the time in which the gang's thread that computes was at what."""
    gang = next(pid for pid, (_, name, _) in _processes().items() if GANG in name and _is_under(pid, root))
    command = ["perf", "record", "-e", "cpu-clock", "-F", str(SAMPLES_PER_S), "-p", str(gang), "-o", str(path)]
    recorder = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shares: dict[str, float] = {}
    started = time.perf_counter()
    try:
        yield shares
    finally:
        wall_s = time.perf_counter() - started
        recorder.send_signal(signal.SIGINT)
        recorder.wait(timeout=60)
    listed = subprocess.run(
        ["perf", "script", "-i", str(path), "-F", "tid,ip,dso"], capture_output=True, text=True, check=True
    )
    by_thread: dict[str, dict[str, int]] = {}
    for sample in listed.stdout.splitlines():
        if match := re.match(r"\s*(\d+)\s+[0-9a-f]+\s+\((.*)\)", sample):
            counts = by_thread.setdefault(match[1], dict.fromkeys(PARTS, 0))
            counts[next(part for part, names in PARTS.items() if any(name in match[2] for name in names))] += 1
    # Helpers only take blocks of kernels, and the leader's loop computes none.
    computing = [each for each in by_thread.values() if each["native kernels"]]
    counts = max(computing, key=lambda each: each["Python"])
    shares |= {part: count / (SAMPLES_PER_S * wall_s) for part, count in counts.items()}
    shares["waiting"] = max(0.0, 1 - sum(shares.values()))


def _is_under(pid: int, root: int) -> bool:
    processes = _processes()
    while pid in processes and pid != root:
        pid = processes[pid][0]
    return pid == root


def _processes() -> dict[int, tuple[int, str, float]]:
    """Parent, name and CPU seconds of each process of this machine."""
    stats: dict[int, tuple[int, str, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
            title = (path.parent / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:
            continue  # it has ended
        fields = tail.split()
        name = title.split("/")[-1] or head.partition("(")[2]
        stats[int(head.split()[0])] = (int(fields[1]), name[:40], (int(fields[11]) + int(fields[12])) / TICKS)
    return stats


def _cpu_seconds(root: int) -> dict[str, float]:
    """CPU seconds of a process and all under it, by name."""
    stats = _processes()
    found: dict[str, float] = {}
    known = {root}
    while more := {pid for pid, (parent, _, _) in stats.items() if parent in known} - known:
        known |= more
    for pid in known & stats.keys():
        name, seconds = stats[pid][1:]
        found[name] = found.get(name, 0.0) + seconds
    return found


if __name__ == "__main__":
    main()
