"""A real Prometheus that scrapes a running motet."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.prometheus_binaries import prometheus_folder
from motet.tests.rigs.running_motet import RunningMotet

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
