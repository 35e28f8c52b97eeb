"""A real Prometheus scrapes two routers and two gangs while one gang is killed: sums are what clients received."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.prometheus_binaries import prometheus_folder
from motet.tests.rigs.running_motet import BASE, RunningMotet, running_motet
from motet.tests.rigs.token_streams import Job, Meter, read_stream, stream_all

pytestmark = pytest.mark.cluster

NUM_STREAMS = 16
NUM_TOKENS = 300
# Gangs are far ahead of what clients read. With two streams at a time each has most of its streams still waiting when
# the first token arrives at a client, however fast it is.
MAX_NUM_SEQUENCES = 2
MADE = "motet_engine_generated_tokens_total"
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: motet
    authorization: {{credentials_file: {key}}}
    http_sd_configs:
      - url: {url}/metrics/targets
        refresh_interval: 1s
        authorization: {{type: Bearer, credentials_file: {key}}}
"""
JOBS = [
    Job("acme", {"model": BASE, "prompt": f"{number} capital", "max_tokens": NUM_TOKENS, "ignore_eos": True})
    for number in range(NUM_STREAMS)
]


class Prometheus:
    """A running Prometheus. `http`: a client of its API."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def query(self, query: str) -> list[Any]:
        try:
            answer = self._http.get("/query", params={"query": query})
        except httpx.ConnectError:
            return []
        found: list[Any] = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return found

    def number(self, query: str) -> float:
        """The value of a query that has at most one; 0 if it has none."""
        return sum(float(one["value"][1]) for one in self.query(query))

    def gangs(self, query: str) -> set[str]:
        return {one["metric"]["gang"] for one in self.query(query)}

    def reaches(self, query: str, check: Callable[[float], bool]) -> None:
        eventually(lambda: check(self.number(query)), lambda: f"{query} is {self.query(query)}")


@contextmanager
def scraping(motet: RunningMotet, folder: Path) -> Iterator[Prometheus]:
    (port,) = free_ports(1)
    config = folder / "prometheus.yaml"
    config.write_text(CONFIG.format(key=motet.data_dir / "operator_key", url=motet.url))
    command = [
        str(prometheus_folder() / "prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, stdout=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False, timeout=PATIENCE_S) as http:
            yield Prometheus(http)
    finally:
        server.terminate()
        server.wait(timeout=PATIENCE_S)


def test_sums_over_what_was_scraped_are_what_clients_received(tmp_path: Path) -> None:
    with (
        running_motet(
            *(tmp_path / "data", free_ports(1)[0], "--gangs", "2", "--routers", "2"),
            *("--max-num-sequences", str(MAX_NUM_SEQUENCES)),
        ) as motet,
        scraping(motet, tmp_path) as prometheus,
    ):
        check_sums(motet, prometheus)


def cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def check_sums(motet: RunningMotet, prometheus: Prometheus) -> None:
    for process in ("router", "gang"):
        prometheus.reaches(f'count(motet_process_up{{process="{process}"}} == 1)', lambda number: number == 2)
    assert len(prometheus.query("up == 1")) == 1  # all four are on one page
    # A scrape that comes too late on a busy machine takes all series of its process away until the next one.
    eventually(lambda: len(prometheus.gangs(MADE)) == 2)
    gangs = prometheus.gangs(f"max_over_time({MADE}[10m])")
    assert len(gangs) == 2
    used_s = {gang: cpu_s(gang) for gang in motet.gang_processes()}

    def kill_the_busier() -> None:  # the other may have had few streams, and be through with them
        max(used_s, key=lambda gang: cpu_s(gang) - used_s[gang]).kill()

    heard = stream_all(motet, JOBS, Meter(1, kill_the_busier), read_stream)
    assert [len(one.token_ids) for one in heard] == [NUM_TOKENS] * NUM_STREAMS

    # Each router has counted what it sent, and together they have sent what clients received: once.
    num_received = NUM_STREAMS * NUM_TOKENS
    prometheus.reaches("sum(motet_completion_tokens_total)", lambda number: number == num_received)
    prometheus.reaches("count(motet_completion_tokens_total > 0)", lambda number: number == 2)  # each had some streams
    answered = 'motet_requests_total{route="POST /v1/completions", status="200"}'
    prometheus.reaches(f"sum({answered})", lambda number: number == NUM_STREAMS)
    finished = 'motet_finished_sequences_total{reason="length"}'
    prometheus.reaches(f"sum({finished})", lambda number: number == NUM_STREAMS)
    prometheus.reaches("sum(motet_resumed_sequences_total)", lambda number: number > 0)

    # The gang that died takes nothing away of what it had told, and another one is found by itself.
    prometheus.reaches("count(motet_connected_gangs == 2)", lambda number: number == 2)
    prometheus.reaches('count(motet_process_up{process="gang"} == 1)', lambda number: number == 2)
    eventually(lambda: len(prometheus.gangs(MADE)) == 2 and len(prometheus.gangs(MADE) & gangs) == 1)
    assert prometheus.gangs(f"max_over_time({MADE}[10m])") > gangs
    for counter in (MADE, "motet_completion_tokens_total"):
        assert prometheus.query(f"resets({counter}[10m])")
        assert prometheus.number(f"resets({counter}[10m])") == 0
