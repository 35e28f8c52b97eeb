"""All registries through which tenants and keys are changed, and their audit log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from redis.asyncio import Redis

from .audit_log import AuditLog
from .key_registry import KeyRegistry
from .tenant_registry import EndOfTenant, TenantRegistry


@dataclass(frozen=True)
class Administration:
    tenants: TenantRegistry
    keys: KeyRegistry
    audit: AuditLog

    @classmethod
    def of(cls, client: Redis, ends: Sequence[EndOfTenant] = ()) -> Self:
        """`ends`: what else is deleted with a tenant."""
        return cls(TenantRegistry(client, ends), KeyRegistry(client), AuditLog(client))
