"""A long question for usage lets others in between its months, and what ends in an error leaves its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from typing import Any

import pytest

from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry.ledger.ledger import Sum
from motet.adapters.registry.tenants.records import TenantRecord
from motet.router.usage import usage
from motet.router.usage.usage import UsageApi
from motet.router.usage.usage_rows import usage_query
from motet.tests.rigs.patience import PATIENCE_S


class MonthlyLedger:
    def __init__(self) -> None:
        self.read: list[str] = []

    async def days(self, tenant_id: str, month: date) -> AsyncIterator[list[Sum]]:
        self.read.append(tenant_id)
        await asyncio.sleep(0)
        if tenant_id == "broken":
            raise RegistryUnavailable("Redis is away")
        yield []


async def test_a_long_question_lets_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_READING", 1)
    ledger: Any = MonthlyLedger()
    view: Any = None
    api = UsageApi(view, ledger, None)

    async def requested(name: str, start: str) -> int:
        query = usage_query(
            {"from": start, "to": "2026-11-20"}, datetime(2026, 11, 22, tzinfo=UTC), for_operators=False
        )

        async def tenants() -> AsyncIterator[TenantRecord]:
            yield TenantRecord(name=name)

        return (await api._answer(name, query, tenants)).status_code

    with pytest.raises(RegistryUnavailable):
        await requested("broken", "2026-11-01")
    asking = [requested("long", "2025-12-01"), requested("short", "2026-11-01")]
    assert await asyncio.wait_for(asyncio.gather(*asking), PATIENCE_S) == [200, 200]
    assert ledger.read.count("long") == 12
    assert ledger.read.index("short") <= 3
