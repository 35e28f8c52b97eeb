"""/v1/adapters/{name}/residency: where an adapter's versions are, as this router and the tenant's own use tell."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.registry.registry_view import RegistryView
from ...adapters.upload import UploadService
from ...adapters.versions.rollout import versions_of
from ..access.request_record import record_of
from ..fleet.dispatch import Dispatcher
from ..route import RouteSpec
from ..tenants.auth import Door
from .versions_api import NAME, answer, answered


class VersionResidency(msgspec.Struct, frozen=True):
    version: int
    gangs: list[str]  # those that have it for this tenant in their pool, or are getting it; opaque names, of it only
    tier: Literal["pool", "store"]  # the fastest of those: any gang's pool, else the store


class ResidencyAnswer(msgspec.Struct, frozen=True):
    data: list[VersionResidency]
    num_gangs: int  # in all
    object: Literal["list"] = "list"


class ResidencyApi:
    def __init__(self, door: Door, uploads: UploadService, dispatcher: Dispatcher, view: RegistryView) -> None:
        self._door, self._uploads, self._dispatcher, self._view = door, uploads, dispatcher, view

    def routes(self) -> Sequence[RouteSpec]:
        return (
            RouteSpec(
                method="GET",
                path=f"{NAME}/residency",
                handler=self.show,
                scope="metrics",
                summary="Where an adapter's versions are.",
                answers={200: ResidencyAnswer},
                errors=("adapter_not_found", "registry_unavailable"),
            ),
        )

    async def show(self, request: Request) -> Response:
        tenant, name = self._door.identify(request, "metrics").name, request.path_params["name"]
        state = await answered(self._uploads.state(tenant, name))
        record_of(request.scope).model = name
        found = []
        for version in versions_of(state.current):
            gangs = sorted(self._opaque(tenant, gang) for gang in self._dispatcher.gangs_with(tenant, version.digest))
            found.append(VersionResidency(version.version, gangs, "pool" if gangs else "store"))
        return answer(ResidencyAnswer(found, len(self._dispatcher.gangs())))

    def _opaque(self, tenant: str, gang_id: str) -> str:
        """The same at all routers, and of no use beside what another tenant is told."""
        return blake2b(f"{tenant}/{gang_id}".encode(), key=self._view.stream_keys[0], digest_size=6).hexdigest()
