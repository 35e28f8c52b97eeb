"""Which tenants have waited for a registry that does not answer."""

from __future__ import annotations

from collections.abc import Callable

from ..adapters.errors import RegistryUnavailable


class RegistryOutages:
    """While the registry is away one request of a tenant waits for it, and the next ones are refused at once.

    `is_unreachable`: whether the router's own tries to read the registry fail; these end the outage for all tenants.
    """

    def __init__(self, is_unreachable: Callable[[], bool]) -> None:
        self._is_unreachable = is_unreachable
        self._tenant_ids: set[str] = set()

    def check(self, tenant_id: str) -> None:
        """Raises RegistryUnavailable if a request of the tenant has waited in vain during this outage."""
        if not self._is_unreachable():
            self._tenant_ids.clear()
        elif tenant_id in self._tenant_ids:
            raise RegistryUnavailable("the registry cannot be reached: try again in a moment")

    def add(self, tenant_id: str) -> None:
        """A request of the tenant has waited in vain."""
        self._tenant_ids.add(tenant_id)
