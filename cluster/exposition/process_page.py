"""A process's own page of metrics, as a part of its node's page, and where that is."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import ip_address
from typing import Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...router.exposition.families import text_of
from ...router.exposition.targets import MetricsTarget
from ...router.operator_key import OperatorKey
from ..launch_secrets import operator_key_in
from .exposition_config import ExpositionConfig
from .node_page import NodePage

METRICS_ADDRESS: Final = "metrics_address"  # a key in a replica's metadata, from which others know it

_log = logging.getLogger(__name__)


class ProcessPage:
    """The page of one router or gang. Belongs to one event loop."""

    def __init__(
        self,
        config: ExpositionConfig,
        process: Literal["router", "gang", "start"],
        name: str,
        operator_key: str | OperatorKey | None,
        metrics: Callable[[], Iterable[Metric]],
    ) -> None:
        """`name`: of the router, gang or start. `operator_key`: None: the one in the data folder.

        `metrics` is called on the loop; what it returns is read in a thread.
        """
        self._config, self._metrics = config, metrics
        self._process = _ProcessMetrics({process: name, "base": config.name})
        self._operator_key = operator_key
        self._key: OperatorKey | None = None  # what a scrape must present; None: nothing
        self._node_page = NodePage(process, name, self._text)
        self._address: str | None = None

    async def start(self, node_address: str) -> None:
        """`node_address`: the address of this machine for others; on loopback there are no others."""
        if not (port := self._config.metrics_port):
            return
        if self._config.metrics_access == "operators":
            self._key = OperatorKey.of(self._operator_key or await self._key_of_folder())
        try:
            await self._node_page.start(_listen_host(node_address), port)
        except OSError as error:
            _log.warning("no metrics of this process: %s", error)
            return
        host = f"[{node_address}]" if ":" in node_address else node_address
        self._address = f"{host}:{port}"
        _log.info("metrics at http://%s/metrics", self._address)

    async def stop(self) -> None:
        await self._node_page.stop()

    @property
    def metadata(self) -> dict[str, str]:
        """What a replica adds to its metadata; empty: there is no page."""
        return {} if self._address is None else {METRICS_ADDRESS: self._address}

    async def _key_of_folder(self) -> str:
        await asyncio.to_thread(self._config.data_dir.mkdir, parents=True, exist_ok=True)
        return await asyncio.to_thread(operator_key_in, self._config.data_dir)

    async def _text(self, key: bytes) -> bytes | None:
        if self._key is not None and not hmac.compare_digest(key, self._key.now.encode()):
            return None
        return await asyncio.to_thread(text_of, self._metrics(), self._process)


class _ProcessMetrics(Collector):
    """CPU seconds, memory, files and the time of the start of this process."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._collector = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            metric.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in metric.samples]
            yield metric


def targets_of(config: ExpositionConfig, replicas: Iterable[Mapping[str, str]]) -> list[MetricsTarget]:
    """The nodes that have a page, from the metadata of all replicas."""
    addresses = {metadata[METRICS_ADDRESS] for metadata in replicas if METRICS_ADDRESS in metadata}
    return [MetricsTarget(address=address, base=config.name) for address in sorted(addresses)]


def _listen_host(node_address: str) -> str:
    """All addresses of a machine that others reach; loopback otherwise."""
    address = ip_address(node_address)
    if address.is_loopback:
        return node_address
    return "0.0.0.0" if address.version == 4 else "::"
