"""A real Prometheus scrapes two routers and two gangs while one gang is killed: sums are what clients received."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.prometheus_binaries import prometheus_folder
from motet.tests.rigs.running_motet import BASE, RunningMotet, running_motet
from motet.tests.rigs.token_streams import Job, Meter, read_stream, stream_all

pytestmark = pytest.mark.cluster

NUM_STREAMS = 16
NUM_TOKENS = 150
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: motet
    authorization: {{credentials_file: {key}}}
    http_sd_configs:
      - {{url: "{url}/metrics/targets", refresh_interval: 1s, authorization: {{credentials_file: {key}}}}}
"""
JOBS = [
    Job("acme", {"model": BASE, "prompt": f"{number} capital", "max_tokens": NUM_TOKENS, "ignore_eos": True})
    for number in range(NUM_STREAMS)
]


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def query(self, query: str) -> list[Any]:
        try:
            answer = httpx.get(f"{self._url}/query", params={"query": query}, trust_env=False, timeout=PATIENCE_S)
        except httpx.ConnectError:
            return []
        found: list[Any] = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return found

    def number(self, query: str) -> float:
        """The value of a query that has at most one; 0 if it has none."""
        return sum(float(one["value"][1]) for one in self.query(query))

    def reaches(self, query: str, check: Callable[[float], bool]) -> None:
        eventually(lambda: check(self.number(query)), lambda: f"{query} is {self.query(query)}")


@contextmanager
def scraping(motet: RunningMotet, folder: Path) -> Iterator[Prometheus]:
    (port,) = free_ports(1)
    config = folder / "prometheus.yaml"
    config.write_text(CONFIG.format(key=motet.data_dir / "operator_key", url=motet.url))
    command = [prometheus_folder() / "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, stdout=log)
    try:
        yield Prometheus(port)
    finally:
        server.terminate()
        server.wait(timeout=PATIENCE_S)


def test_sums_over_what_was_scraped_are_what_clients_received(tmp_path: Path) -> None:
    with (
        running_motet(tmp_path / "data", free_ports(1)[0], "--gangs", "2", "--routers", "2") as motet,
        scraping(motet, tmp_path) as prometheus,
    ):
        prometheus.reaches('count(up{process="router"} == 1)', lambda number: number == 2)
        prometheus.reaches('count(up{process="gang"} == 1)', lambda number: number == 2)
        victim = motet.gang_processes()[0]
        heard = stream_all(motet, JOBS, Meter(NUM_STREAMS * NUM_TOKENS // 2, victim.kill), read_stream)
        assert [len(one.token_ids) for one in heard] == [NUM_TOKENS] * NUM_STREAMS
        received = float(NUM_STREAMS * NUM_TOKENS)
        prometheus.reaches("sum(motet_completion_tokens_total)", lambda number: number == received)
        told = 'sum(motet_requests_total{route="POST /v1/completions", status="200"})'
        prometheus.reaches(told, lambda number: number == NUM_STREAMS)
        prometheus.reaches('sum(motet_finished_sequences_total{reason="length"})', lambda number: number == NUM_STREAMS)
        assert prometheus.number("count(motet_completion_tokens_total > 0)") == 2, "one router had all streams"
        # The gang that died took nothing away from what it had told, and another one came in its place.
        prometheus.reaches("count(motet_connected_gangs == 2)", lambda number: number == 2)
        prometheus.reaches('count(up{process="gang"} == 1)', lambda number: number == 2)
        lasting = "count(max_over_time(motet_engine_generated_tokens_total[10m]))"
        assert prometheus.number(lasting) >= 3
        # Gangs made what clients had, except what the dead one did after its last scrape; some was made twice.
        made = prometheus.number("sum(max_over_time(motet_engine_generated_tokens_total[10m]))")
        assert made >= received / 2
        assert prometheus.number("sum(motet_resumed_sequences_total)") > 0, "the kill met no stream"
        scraped = prometheus.query("count by (router) (motet_open_generations)")
        assert len(scraped) == 2
