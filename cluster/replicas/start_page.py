"""The part of a node's page of metrics that a replica has while it cannot start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from ...adapters.registry.starts import Kind
from ...router.exposition.families import Families
from ...router.exposition.router_families import FAILED_STARTS, WAITING_STARTS
from ..exposition.exposition_config import ExpositionConfig
from ..exposition.process_page import ProcessPage

TIMEOUT_S = 5.0  # the data folder, which may have the key, may be what hangs

_log = logging.getLogger(__name__)


class StartPage:
    """Says without Redis and without a router that a start waits or has failed. Belongs to one event loop."""

    def __init__(self, config: ExpositionConfig, kind: Kind, replica: str, node_address: str) -> None:
        """`replica`: its id, the label `start`. `node_address`: of this machine, for others."""
        self._config, self._kind, self._replica, self._node_address = config, kind, replica, node_address
        self._has_failed = False
        self._page: ProcessPage | None = None

    async def show(self, operator_key: str | None, *, has_failed: bool) -> None:
        """Shows it from now on. `operator_key`: None: the one in the data folder."""
        self._has_failed = has_failed
        if self._page is not None:
            return
        self._page = ProcessPage(self._config, "start", self._replica, operator_key, self._families)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._page.start(self._node_address)
        except (OSError, TimeoutError) as error:
            _log.warning("no metrics of this start: %s", str(error) or type(error).__name__)

    async def stop(self) -> None:
        """Shows nothing any more. Idempotent."""
        page, self._page = self._page, None
        if page is not None:
            await page.stop()

    def _families(self) -> Iterator[Metric]:
        make = Families({"start": self._replica, "base": self._config.name})
        for (name, text), value in ((WAITING_STARTS, not self._has_failed), (FAILED_STARTS, self._has_failed)):
            yield make.gauges(name, text, ("kind",), [((self._kind,), float(value))])
