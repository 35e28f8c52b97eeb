"""How a flood affects a quiet tenant: its time to first token beside each kind of flood over that alone, fair or not.

A whole motet of the demo model runs on this machine, its gang on one thread. All asking is done over HTTP by processes
of their own, those of the flood at a low priority. In each round the quiet tenant is measured beside each kind of
flood, and alone before each: with fair scheduling, and for a shorter time first come, first served, where it waits for
seconds. Then two tenants ask for more than the gang can do, for the throughput of either. A ratio is of measurements of
one round, and the median of the rounds is printed. A round has hundreds of answers, so its p99 is not the longest one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from motet.benchmarks.rigs.fairness_clients import Asking, floods
from motet.cluster.config import MotetConfig
from motet.cluster.launch.launch import Deployment
from motet.cluster.launch.local_serve import free_ports

DEMO = Path(__file__).parent.parent / "examples" / "demo"
OPERATOR_KEY = "key-of-operators"
QUIET, FLOODER, OTHER = "quiet", "flooder", "other"
WARM_S = 2.0  # a flood is under way for so long before it is measured
REST_S = 0.5  # for what a flood has left behind
FIFO_SHARE = 0.5  # of the time of a measurement, first come, first served
NICE = 10  # of what is not measured

Way = Literal["fair", "fifo"]
WAYS: tuple[Way, ...] = ("fair", "fifo")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of all measurements (default 3)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default 8)")
    parser.add_argument("--adapters", type=int, default=24, help="that the flood cycles through (default 24)")
    parser.add_argument("--sequences", type=int, default=16, help="that run at once (default 16)")
    arguments = parser.parse_args()
    deployment = Deployment()
    with tempfile.TemporaryDirectory(prefix="motet-fairness-") as folder:
        config = MotetConfig.of(
            model_path=DEMO / "base",
            data_dir=Path(folder) / "data",
            port=free_ports(1)[0],
            keys=tuple((tenant, f"key-of-{tenant}") for tenant in (QUIET, FLOODER, OTHER)),
            operator_key=OPERATOR_KEY,
            pool_bytes=16 << 20,  # less than the adapters take
            host_bytes=64 << 20,
            max_num_sequences=arguments.sequences,
            num_threads=1,
            scheduling="fair",
        )
        deployment.start(config, lambda name, done, total: None)
        try:
            bench = Fairness(config, deployment, asyncio.run(upload(config, arguments.adapters, Path(folder))))
            for number in range(arguments.rounds):
                bench.round(arguments.seconds, WAYS if number % 2 == 0 else WAYS[::-1])
        finally:
            deployment.stop()
    bench.report()


async def upload(config: MotetConfig, count: int, folder: Path) -> list[str]:
    """The flooder's adapters, each with a digest of its own."""
    source = DEMO / "adapters" / "json"
    tensors = load_file(source / "adapter_model.safetensors")
    first = next(name for name in tensors if "lora_A" in name)
    names = [f"style-{number}" for number in range(count)]
    headers = {"Authorization": f"Bearer key-of-{FLOODER}"}
    async with httpx.AsyncClient(base_url=config.url, headers=headers, timeout=60, trust_env=False) as http:
        for number, name in enumerate(names):
            changed = tensors | {first: tensors[first] * np.asarray(1 + number / 64, tensors[first].dtype)}
            path = folder / "adapter_model.safetensors"
            save_file(changed, path)
            files = {
                "adapter_config.json": ("adapter_config.json", (source / "adapter_config.json").read_bytes()),
                path.name: (path.name, path.read_bytes()),
            }
            (await http.post("/v1/adapters", data={"name": name}, files=files)).raise_for_status()
    return names


class Fairness:
    def __init__(self, config: MotetConfig, deployment: Deployment, adapters: list[str]) -> None:
        self._config, self._deployment, self._adapters = config, deployment, adapters
        self._kinds = [*floods(adapters)]
        self._ratios: dict[tuple[Way, str], list[float]] = {}  # of p99 beside each kind over alone, a round each
        self._over_fifo: list[float] = []

    def round(self, seconds: float, ways: tuple[Way, ...]) -> None:
        """Measures everything once, and prints what it found."""
        tokens_per_s: dict[Way, float] = {}
        for way in ways:
            self._config = self._config.replaced(scheduling=way)
            self._deployment.update(self._config)
            each_s = seconds if way == "fair" else FIFO_SHARE * seconds
            self._quiet(WARM_S)
            alone: list[float] = []
            beside: dict[str, list[float]] = {}
            for kind in self._kinds:
                alone += self._quiet(each_s / 2)
                flood = self._ask(kind, FLOODER, 2 * WARM_S + each_s, NICE)
                time.sleep(WARM_S)
                beside[kind] = self._quiet(each_s)
                print(f"{way:5} {kind:14} {_formatted(beside[kind])}, {flood.result()}", flush=True)
                time.sleep(REST_S)
            print(f"{way:5} {'alone':14} {_formatted(alone)}", flush=True)
            for kind, times_s in beside.items():
                self._ratios.setdefault((way, kind), []).append(_p99(times_s) / _p99(alone))
            both = [self._ask("connections", tenant, 2 * WARM_S + seconds, NICE) for tenant in (FLOODER, OTHER)]
            tokens_per_s[way] = self._tokens_per_s(seconds)
            for one in both:
                one.result()
            print(f"{way:5} {'both backlogged':14} {tokens_per_s[way]:.0f} tokens/s", flush=True)
        self._over_fifo.append(tokens_per_s["fair"] / tokens_per_s["fifo"])

    def _ask(self, kind: str, tenant: str, seconds: float, nice: int = 0) -> Asking:
        adapters = self._adapters if tenant == FLOODER else []
        return Asking(kind, self._config.url, f"key-of-{tenant}", self._config.serving.name, seconds, adapters, nice)

    def _quiet(self, seconds: float) -> list[float]:
        first_token_s: list[float] = self._ask("quiet", QUIET, seconds).result()
        return first_token_s

    def _tokens_per_s(self, seconds: float) -> float:
        """That the gang generates, once both tenants are under way."""
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        with httpx.Client(base_url=self._config.url, headers=headers, timeout=60, trust_env=False) as http:
            counts: list[tuple[float, int]] = []
            for pause_s in (WARM_S, seconds):
                time.sleep(pause_s)
                load = http.get("/status").raise_for_status().json()["load"]
                counts.append((time.monotonic(), load["num_generated_tokens"]))
        (then, before), (now, after) = counts
        return (after - before) / (now - then)

    def report(self) -> None:
        worst: dict[Way, float] = {}
        print(f"{'':14}{'fair':>8}{'fifo':>8}   p99 to the first token over that alone, median of the rounds")
        for kind in self._kinds:
            medians = {way: statistics.median(self._ratios[way, kind]) for way in WAYS}
            print(f"{kind:14}{medians['fair']:8.2f}{medians['fifo']:8.2f}")
            for way, median in medians.items():
                worst[way] = max(worst.get(way, 0.0), median)
        row = {
            "benchmark": "fairness",
            "quiet_ttft_p99_ratio": round(worst["fair"], 2),
            "fcfs_quiet_ttft_p99_ratio": round(worst["fifo"], 2),
            "throughput_over_fcfs": round(statistics.median(self._over_fifo), 3),
        }
        print(json.dumps(row))


def _p99(times_s: list[float]) -> float:
    """At most one in a hundred took longer; of fewer than a hundred, the longest."""
    return sorted(times_s)[min(int(0.99 * len(times_s)), len(times_s) - 1)]


def _formatted(times_s: list[float]) -> str:
    return f"p50 {1000 * statistics.median(times_s):8.1f} ms, p99 {1000 * _p99(times_s):8.1f} ms of {len(times_s)}"


if __name__ == "__main__":
    main()
