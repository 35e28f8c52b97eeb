"""What a served motet computes on this machine's CPUs: tokens per second and CPU seconds, by number of threads.

`motet serve` of a random model of SmolLM2-135M's shape is started for each number of threads. With `--before FOLDER`, a
checkout of other code with its own FOLDER/.venv, that code is started in turn with this one. Streaming completions are
sent at once, first to warm up; the best of the rounds after that counts. CPU seconds are those of all processes under
`motet serve` in that round, also by process, and of the clients. Nothing else should run beside it.

In one round more Linux's `perf` samples the gang's thread that computes: which part of the time it was in native
kernels, in Python (with ctypes and what else is not native or torch), in torch, in the system, waiting for a core that
others have, and waiting for anything else. Then up to 32 streams run while one prompt of 2,000 tokens arrives: the
longest time that one of them got no token.

`--adapters 64` uploads as many, of ranks 8 to 64, and sends the same requests to them in turn. `--experts` takes a base
of as many active parameters with two of eight experts in each layer. `--avx2` compiles kernels, and limits torch, as
for a CPU with no more than that.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from threading import Event

import httpx

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.busy_seconds import busy_seconds
from motet.benchmarks.rigs.with_avx2 import with_avx2
from motet.benchmarks.rigs.workload import Job, draw_jobs
from motet.cluster.launch.local_serve import free_ports

HERE = Path(__file__).parent.parent
DEMO = HERE / "examples" / "demo" / "base"
VOCAB_SIZE = len(json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"])
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
KEY = "key-of-the-benchmark"
TICKS = os.sysconf("SC_CLK_TCK")
GANG = "motet:gang"
SAMPLES_PER_S = 299
LONG_PROMPT, MOST_BESIDE = 2000, 32  # tokens, and streams beside it
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CORE_TAKEN = "waiting for a core"
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
    all_cpu_s: float  # of all programs of this machine

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

    def __str__(self) -> str:
        most = sorted(self.cpu_s.items(), key=lambda item: -item[1])[:4]
        processes = ", ".join(f"{name} {seconds:.1f}" for name, seconds in most)
        own_s = sum(self.cpu_s.values()) + self.clients_cpu_s
        return (
            f"{self.tokens_per_s:7.1f} tokens/s, {1e3 * self.cpu_per_token:6.2f} CPU ms a token "
            f"({processes}, clients {self.clients_cpu_s:.1f} s of {self.wall_s:.1f}, "
            f"all {own_s / self.wall_s:.2f} cores, other programs {(self.all_cpu_s - own_s) / self.wall_s:.2f}); "
            f"first token p50 {statistics.median(self.first_token_s):.2f} s, p99 {self.p99_over_p50:.2f} times"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=32, help="sent at once (default 32)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers to try (default 1 2)")
    parser.add_argument("--dtype", default="bfloat16", help="of the base (default bfloat16)")
    parser.add_argument("--before", type=Path, help="a checkout of other code, with its .venv")
    parser.add_argument("--turns", type=int, default=2, help="starts of each kind (default 2)")
    parser.add_argument("--rounds", type=int, default=2, help="bursts of a start, after one that warms up (default 2)")
    parser.add_argument("--adapters", type=int, default=0, help="that are measured beside the base (default 0)")
    parser.add_argument("--experts", action="store_true", help="a base with experts, without --adapters")
    parser.add_argument("--avx2", action="store_true", help="kernels and torch as for a CPU that has no more")
    arguments = parser.parse_args()
    if arguments.experts and arguments.adapters:
        parser.error("--adapters are for the base without experts: leave out --experts or --adapters")
    codes = {"now": HERE} | ({"before": arguments.before.resolve()} if arguments.before else {})
    kinds = [(code, threads) for threads in arguments.threads for code in codes]
    rounds: dict[tuple[str, int], list[Round]] = {kind: [] for kind in kinds}
    found_shares: dict[int, dict[str, float]] = {}  # by number of threads
    gaps_s: dict[int, float] = {}  # by number of threads
    of_adapters: dict[int, list[Round]] = {threads: [] for threads in arguments.threads}
    environ = with_avx2() if arguments.avx2 else {}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        model_path = _prepare(Path(name), arguments.experts)
        jobs = draw_jobs(arguments.streams, [None], VOCAB_SIZE)
        adapters = random_model.write_adapters(Path(name) / "adapters", arguments.adapters)
        for turn in range(arguments.turns):
            for code, threads in kinds:
                data = Path(name) / f"data-{code}-{threads}-{turn}"
                with _served(codes[code], model_path, data, threads, arguments.dtype, environ) as (url, pid):
                    done = [_round(url, pid, jobs) for _ in range(1 + arguments.rounds)]
                    if code == "now" and turn == 0 and shutil.which("perf"):
                        found_shares[threads] = _sampled_round(url, pid, jobs, Path(name) / "samples")
                    if code == "now" and turn == 0:
                        gaps_s[threads] = _longest_gap_s(url, jobs[:MOST_BESIDE])
                    if code == "now" and adapters:
                        _upload(url, adapters)
                        own = draw_jobs(arguments.streams, range(len(adapters)), VOCAB_SIZE)
                        of_adapters[threads] += [_round(url, pid, own) for _ in range(1 + arguments.rounds)][1:]
                rounds[code, threads] += done[1:]
    best = {kind: _best(found) for kind, found in rounds.items()}
    for (code, threads), found in best.items():
        print(f"{code:6} {threads} threads: {found}")
    best_of_adapters = {threads: _best(found) for threads, found in of_adapters.items() if found}
    for threads, found in best_of_adapters.items():
        print(f"{arguments.adapters} adapters, {threads} threads: {found}")
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
        both = [each["Python"] + each["waiting"] + each[CORE_TAKEN] for each in found_shares.values()]
        line["python_and_waiting"] = round(max(both), 2)
        line["of_that_cores_of_others"] = round(found_shares[arguments.threads[both.index(max(both))]][CORE_TAKEN], 2)
    if arguments.before:
        ratios = [
            best["now", threads].tokens_per_s / best["before", threads].tokens_per_s for threads in arguments.threads
        ]
        line["over_before"] = round(min(ratios), 2)
    if best_of_adapters:
        of_base = [found.tokens_per_s / best["now", own].tokens_per_s for own, found in best_of_adapters.items()]
        line["adapters_over_base"] = round(min(of_base), 2)
    line["longest_gap_ms"] = round(1e3 * max(gaps_s.values()))
    print(json.dumps(line))


def _best(rounds: list[Round]) -> Round:
    return max(rounds, key=lambda each: each.tokens_per_s)


def _prepare(folder: Path, has_experts: bool) -> Path:
    model_path = random_model.write_model(folder / "model", has_experts=has_experts)
    for file in TOKENIZER_FILES:
        shutil.copy(DEMO / file, model_path)
    tokenizer = json.loads((DEMO / TOKENIZER_FILES[0]).read_text())
    # Every token has a whole text, so that each is sent when it is there; bytes alone would wait for the next ones.
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    others = set(range(random_model.VOCAB_SIZE)) - set(added.values())
    tokenizer["model"] |= {"vocab": added | {f"t{token}": token for token in others}, "merges": []}
    (model_path / TOKENIZER_FILES[0]).write_text(json.dumps(tokenizer))
    return model_path


@contextmanager
def _served(
    code: Path, model_path: Path, data: Path, num_threads: int, dtype: str, environ: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """The URL and the process of a motet that serves."""
    command = [str(code / ".venv" / "bin" / "motet"), "serve", str(model_path)]
    command += ["--port", str(free_ports(1)[0]), "--data-dir", str(data), "--dtype", dtype]
    command += ["--threads", str(num_threads), "--pool-bytes", "3GiB", "--no-prefix-cache"]
    log_path = data.with_suffix(".log")
    with log_path.open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, "MOTET_KEYS": f"benchmark={KEY}", **environ},
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
        last, first_at = "", 0.0
        with http.stream("POST", f"{url}/v1/completions", json=_body(job)) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first_at, last = first_at or time.perf_counter(), line
        return json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"], first_at - started

    with _client(len(jobs)) as http, ThreadPoolExecutor(len(jobs)) as pool:
        before, clients_before, all_before = _cpu_seconds(pid), time.process_time(), busy_seconds()
        started = time.perf_counter()
        answers = list(pool.map(ask, jobs))
        wall_s, after = time.perf_counter() - started, _cpu_seconds(pid)
        clients_s, all_s = time.process_time() - clients_before, busy_seconds() - all_before
    spent: dict[str, float] = {}
    for process, (name, seconds) in after.items():
        spent[name] = spent.get(name, 0.0) + seconds - before.get(process, (name, 0.0))[1]
    num_tokens, first_token_s = sum(tokens for tokens, _ in answers), [first for _, first in answers]
    return Round(num_tokens, wall_s, spent, first_token_s, clients_s, all_s)


def _longest_gap_s(url: str, jobs: list[Job]) -> float:
    """Of all streams, the longest time without a token while a long prompt waits for its first one."""
    times: list[list[float]] = [[] for _ in jobs]
    is_over = Event()

    def stream(job: Job, times: list[float]) -> None:
        body = _body(replace(job, num_output_tokens=1000)) | {"skip_special_tokens": False}  # each token has a text
        with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                if is_over.is_set():
                    return

    with _client(len(jobs) + 1) as http, ThreadPoolExecutor(len(jobs)) as pool:
        streams = [pool.submit(stream, *each) for each in zip(jobs, times, strict=True)]
        while min(map(len, times)) < 3 and not any(each.done() for each in streams):
            time.sleep(0.01)
        long = Job([1 + index * 7 % (VOCAB_SIZE - 1) for index in range(LONG_PROMPT)], 1, None)
        sent_at = time.perf_counter()
        http.post(f"{url}/v1/completions", json=_body(long)).raise_for_status()
        ended_at = time.perf_counter()
        is_over.set()
        for each in streams:
            each.result()
    return max(
        after - before for own in times for before, after in pairwise(own) if after > sent_at and before < ended_at
    )


def _body(job: Job) -> dict[str, object]:
    model = "model" if job.adapter is None else f"adapter-{job.adapter:03d}"
    own = {"model": model, "prompt": job.prompt_token_ids, "max_tokens": job.num_output_tokens}
    return own | {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


def _client(num_connections: int) -> httpx.Client:
    limits = httpx.Limits(max_connections=num_connections)
    return httpx.Client(timeout=600, trust_env=False, limits=limits, headers={"Authorization": f"Bearer {KEY}"})


def _upload(url: str, folders: list[Path]) -> None:
    with _client(1) as http:
        for folder in folders:
            files = {name: (folder / name).read_bytes() for name in ADAPTER_FILES}
            http.post(f"{url}/v1/adapters", data={"name": folder.name}, files=files).raise_for_status()


def _sampled_round(url: str, root: int, jobs: list[Job], path: Path) -> dict[str, float]:
    """Shares of a round's time in which the gang's thread that computes was at what."""
    gang = next(pid for pid, (_, name, _) in _processes().items() if GANG in name and _is_under(pid, root))
    command = ["perf", "record", "-e", "cpu-clock", "-F", str(SAMPLES_PER_S), "-p", str(gang), "-o", str(path)]
    recorder = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # until it samples
        before = _thread_seconds(gang)
        wall_s = _round(url, root, jobs).wall_s
        after = _thread_seconds(gang)
    finally:
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
    computing = [thread for thread, counts in by_thread.items() if counts["native kernels"]]
    thread = max(computing, key=lambda each: by_thread[each]["Python"])
    running_s, without_core_s = (now - then for now, then in zip(after[thread], before[thread], strict=True))
    counts = by_thread[thread]
    shares = {part: count / sum(counts.values()) * running_s / wall_s for part, count in counts.items()}
    shares[CORE_TAKEN] = without_core_s / wall_s
    return shares | {"waiting": max(0.0, 1 - sum(shares.values()))}


def _thread_seconds(pid: int) -> dict[str, tuple[float, float]]:
    """By thread of a process: seconds in which it ran, and in which it could have and others had the cores."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        running, without_core, _ = map(int, path.read_text().split())
        found[path.parent.name] = running / 1e9, without_core / 1e9
    return found


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


def _cpu_seconds(root: int) -> dict[int, tuple[str, float]]:
    """Name, which may change, and CPU seconds of a process and of all under it."""
    stats = _processes()
    known = {root}
    while more := {pid for pid, (parent, _, _) in stats.items() if parent in known} - known:
        known |= more
    return {pid: stats[pid][1:] for pid in known & stats.keys()}


if __name__ == "__main__":
    main()
