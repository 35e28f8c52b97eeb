"""Who asks: what a request's credentials were found to mean."""

from __future__ import annotations

from dataclasses import dataclass

from ...adapters.tenants.records import KeyRecord, TenantRecord


@dataclass(frozen=True, slots=True)
class Identity:
    tenant: TenantRecord
    key: KeyRecord

    @property
    def name(self) -> str:
        """The tenant's."""
        return self.tenant.name
