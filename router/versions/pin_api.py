"""/v1/adapters/{name}/pin: an adapter is kept in the host memory of gangs."""

from __future__ import annotations

from functools import partial
from typing import Final, Literal

import msgspec
from starlette.requests import Request

from ...adapters.errors import NoSuchVersion
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.versions import name_state
from ...adapters.registry.versions.name_state import NameState
from ...adapters.upload import UploadService
from ..residency.pin_keeper import PinKeeper
from ..route import route
from ..tenants.identity import Identity
from .residency_api import State, opaque_gang
from .version_schema import PartDeleted, PinBody
from .versions_api import NAME, change_name, read_name

_PATH: Final = f"{NAME}/pin"
_ERRORS: Final = ("adapter_not_found", "version_not_found", "registry_unavailable")


class PinnedAt(msgspec.Struct, frozen=True):
    gang: str  # an opaque name, of this tenant only
    state: State  # "ready": it is in the gang's host memory
    reason: str | None = None  # why it failed


class PinAnswer(msgspec.Struct, frozen=True):
    """A pin, and how it does as far as this router knows."""

    name: str
    version: int  # the current one
    gangs: int  # that are to keep it
    bytes: int  # that count for the tenant's quota
    state: State  # "ready": `gangs` have it; "failed": one cannot, and none is getting it
    reason: str | None
    data: list[PinnedAt]  # fewer than `gangs` where no more are connected
    object: Literal["pin"] = "pin"


_route: Final = partial(route, scope="upload", errors=_ERRORS)


class PinApi:
    def __init__(self, uploads: UploadService, view: RegistryView, keeper: PinKeeper) -> None:
        self._uploads, self._view, self._keeper = uploads, view, keeper

    @_route("GET", _PATH, summary="An adapter's pin, and how it does.")
    async def show(self, request: Request, identity: Identity) -> PinAnswer:
        state = await read_name(self._uploads, request, identity)
        if not state.rollout.pinned_gangs:
            raise NoSuchVersion(f"{state.current.name} is not pinned")
        return self._shown(state)

    @_route(
        "PUT",
        _PATH,
        summary="Keep an adapter's current version in the host memory of gangs.",
        errors=("adapter_not_found", "version_refused", "insufficient_quota", "registry_unavailable"),
    )
    async def pin(self, request: Request, identity: Identity, body: PinBody) -> PinAnswer:
        return self._shown(await self._change(request, identity, "pin.set", body.gangs))

    @_route("DELETE", _PATH, summary="Pin an adapter no more.")
    async def unpin(self, request: Request, identity: Identity) -> PartDeleted:
        state = await self._change(request, identity, "pin.delete", 0)
        return PartDeleted(state.current.name, "pin")

    async def _change(self, request: Request, identity: Identity, action: str, num_gangs: int) -> NameState:
        return await change_name(
            self._uploads,
            request,
            identity,
            action,
            lambda state, _: name_state.with_pin(state, num_gangs),
            identity.key.quota.pinned_bytes,
        )

    def _shown(self, state: NameState) -> PinAnswer:
        current, num_gangs = state.current, state.rollout.pinned_gangs
        gangs = [
            PinnedAt(
                opaque_gang(self._view, current.tenant, gang),
                "ready" if failure is None else "failed" if failure else "coming",
                failure or None,
            )
            for gang, failure in self._keeper.states(current.digest).items()
        ][:num_gangs]
        states = [one.state for one in gangs]
        whole: State = "coming"
        if "failed" in states and "coming" not in states:
            whole = "failed"
        elif states.count("ready") >= num_gangs:
            whole = "ready"
        return PinAnswer(
            current.name,
            current.version,
            num_gangs,
            num_gangs * current.pinned_bytes,
            whole,
            next((one.reason for one in gangs if one.reason is not None), None),
            gangs,
        )
