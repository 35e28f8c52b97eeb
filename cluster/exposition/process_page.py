"""Starts a process's own page of metrics, and publishes its address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from ...router.exposition.families import text_of
from ...router.exposition.targets import MetricsTarget, Process
from ...router.operator_key import OperatorKey
from ..launch_secrets import operator_key_in
from .exposition_config import ExpositionConfig
from .metrics_server import MetricsServer

# Keys in a replica's metadata, from which others know it.
METRICS_ADDRESS = "metrics_address"
METRICS_NAME = "metrics_name"

_log = logging.getLogger(__name__)


class ProcessPage:
    """The page of one router or gang. Belongs to one event loop."""

    def __init__(
        self,
        config: ExpositionConfig,
        name: str,
        operator_key: str | OperatorKey | None,
        metrics: Callable[[], Iterable[Metric]],
    ) -> None:
        """`name`: of the router or gang. `operator_key`: None: the one in the data folder. `metrics` is called on the
        loop; what it returns is read in a thread.
        """
        self._config, self._name, self._metrics = config, name, metrics
        self._process = ProcessCollector(registry=CollectorRegistry())  # CPU seconds, memory, files, time of the start
        self._operator_key = operator_key
        self._server: MetricsServer | None = None
        self._address: str | None = None

    async def start(self, node_address: str) -> None:
        """`node_address`: the address of this machine for others; on loopback there are no others."""
        if not self._config.metrics_port:
            return
        self._server = MetricsServer(self._text, await self._key())
        port = await self._server.start(_listen_host(node_address), self._config.metrics_port)
        if port is not None:
            host = f"[{node_address}]" if ":" in node_address else node_address
            self._address = f"{host}:{port}"
            _log.info("metrics at http://%s/metrics", self._address)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    @property
    def metadata(self) -> dict[str, str]:
        """What a replica adds to its metadata; empty: there is no page."""
        return {} if self._address is None else {METRICS_ADDRESS: self._address, METRICS_NAME: self._name}

    async def _key(self) -> str | OperatorKey | None:
        """What a scrape must present; None: nothing."""
        if self._config.metrics_access == "all":
            return None
        if self._operator_key is not None:
            return self._operator_key
        await asyncio.to_thread(self._config.data_dir.mkdir, parents=True, exist_ok=True)
        return await asyncio.to_thread(operator_key_in, self._config.data_dir)

    async def _text(self) -> bytes:
        return await asyncio.to_thread(text_of, self._metrics(), self._process)


def targets_of(
    config: ExpositionConfig, routers: Iterable[Mapping[str, str]], gangs: Iterable[Mapping[str, str]]
) -> list[MetricsTarget]:
    """The processes that have a page, from the metadata of all replicas."""
    return [
        *(_target(config, "router", metadata) for metadata in routers if METRICS_ADDRESS in metadata),
        *(_target(config, "gang", metadata) for metadata in gangs if METRICS_ADDRESS in metadata),
    ]


def _target(config: ExpositionConfig, process: Process, metadata: Mapping[str, str]) -> MetricsTarget:
    return MetricsTarget(
        process=process, name=metadata[METRICS_NAME], address=metadata[METRICS_ADDRESS], base=config.name
    )


def _listen_host(node_address: str) -> str:
    """All addresses of a machine that others reach; loopback otherwise."""
    address = ip_address(node_address)
    if address.is_loopback:
        return node_address
    return "0.0.0.0" if address.version == 4 else "::"
