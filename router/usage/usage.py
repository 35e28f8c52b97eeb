"""A router's part in the ledger, put together: counts answers, sends the counts to Redis, answers `/v1/usage`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from redis.asyncio import Redis

from ...adapters.registry.ledger.archive import LedgerArchive
from ...adapters.registry.ledger.ledger import Ledger
from ...adapters.registry.registry_view import RegistryView
from ..route import RouteSpec, routes_of
from .ledger_keeper import LedgerKeeper
from .metering import Metering
from .prices import Prices
from .spool import Spool
from .usage_api import UsageApi

LEDGERS_PART = 4  # the ledger leaves a quarter of what uploads leave free, so uploads alone never stop answers


class Usage:
    """Works from `start()` to `stop()`. Everything belongs to one event loop."""

    def __init__(
        self,
        client: Redis,
        spool_path: Path,
        archive_path: Path,
        *,
        kept_days: int,
        spool_bytes: int,
        min_free_bytes: int,
        prices: Prices | None,
    ) -> None:
        """`spool_path`: the folder of all routers' spools. `spool_bytes`: at most, and `min_free_bytes` stay free."""
        self.ledger = Ledger(client, kept_days)
        self.archive = LedgerArchive(self.ledger, archive_path)
        self._prices = prices
        self._spool = Spool(spool_path, spool_bytes, min_free_bytes)
        self.metering = Metering(self._spool)
        self.keeper = LedgerKeeper(self._spool, self.metering, self.ledger, self.archive, spool_path)

    async def start(self) -> None:
        """Raises OSError if the disk has no room for a spool."""
        await self._spool.start()
        self.keeper.start()

    async def stop(self) -> None:
        await self.keeper.stop()

    async def retire(self, tenant_id: str) -> None:
        """A tenant is deleted: its ledger is archived and removed."""
        await self.archive.retire(tenant_id, datetime.now(UTC))

    def routes(self, view: RegistryView) -> Sequence[RouteSpec]:
        return routes_of(UsageApi(view, self.ledger, self._prices))

    def behind(self) -> tuple[int, float]:
        """What Redis does not have yet: bytes of lines, and the seconds since there have been any."""
        return self.keeper.num_waiting_bytes, self.keeper.behind_s
