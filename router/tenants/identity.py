"""The caller: what a request's credentials were found to mean."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from ...adapters.registry.tenants.audit_entry import Actor, AuditEntry
from ...adapters.registry.tenants.records import Admission, KeyRecord, TenantRecord
from ...adapters.sight import Sight
from ..access.request_record import record_of


@dataclass(frozen=True, slots=True)
class Identity:
    tenant: TenantRecord
    key: KeyRecord  # of a token: what it allows
    subject: str = ""  # whom the issuer of a token means; empty: it is a key
    last_event: int = 0  # of the registry, that the router had when it admitted the request

    @property
    def name(self) -> str:
        """The tenant's."""
        return self.tenant.name

    @property
    def user(self) -> str:
        """The tenant's user; empty: the key belongs to no user."""
        return self.key.user

    @property
    def admission(self) -> Admission:
        """For the request's writes."""
        return Admission(incarnation=self.tenant.incarnation, last_event=self.last_event, user=self.user)

    @property
    def is_admin(self) -> bool:
        return "admin" in self.key.scopes

    @property
    def sight(self) -> Sight:
        """Which of the tenant's adapters may be seen."""
        return Sight(self.user, self.is_admin)

    def actor(self, request: Request) -> Actor:
        """For the audit log."""
        request_id = record_of(request.scope).request_id
        if self.subject:
            return Actor(kind="token", id=self.subject, tenant=self.name, user=self.user, request_id=request_id)
        return Actor(kind="key", id=self.key.key_id, tenant=self.name, user=self.user, request_id=request_id)

    def entry(self, request: Request, action: str, target: str) -> AuditEntry:
        """A change of the tenant's own things, for the audit log."""
        return AuditEntry(action=action, tenant=self.name, target=target, actor=self.actor(request))


def operators(request: Request) -> Actor:
    """The operators, for the audit log. The caller has seen their key."""
    return Actor(kind="operator", request_id=record_of(request.scope).request_id)
