"""The tenant that an operator's request names in its path."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from ...adapters.errors import NoSuchTenant
from ...adapters.registry.registry_view import RegistryView

TENANTS: Final = "/v1/admin/tenants"


async def named_tenant(request: Request, view: RegistryView) -> str:
    """Its name, once the view has caught up with all earlier changes. Raises NoSuchTenant."""
    name: str = request.path_params["tenant"]
    await view.catch_up()
    if not view.keys.has_tenant(name):
        raise NoSuchTenant(f"the tenant {name[:64]!r} does not exist")
    return name
