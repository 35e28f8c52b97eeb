"""/v1/adapters/{name}/pin: an adapter is kept in the host memory of gangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import NoSuchVersion
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.versions import name_state
from ...adapters.registry.versions.name_state import NameState
from ...adapters.upload import UploadService
from ..access.request_record import record_of
from ..bodies.small_body import small_body
from ..residency.pin_keeper import PinKeeper
from ..route import RouteSpec
from ..tenants.auth import Authenticator
from ..tenants.identity import Identity
from .residency_api import State, opaque_gang
from .version_schema import Deleted, PinBody
from .versions_api import NAME, answer, answered

_pin: Final = msgspec.json.Decoder(PinBody)
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
    state: State  # "ready": so many gangs have it; "failed": one cannot, and none is getting it
    reason: str | None
    data: list[PinnedAt]  # fewer than `gangs` where no more are connected
    object: Literal["pin"] = "pin"


class PinApi:
    def __init__(
        self, authenticator: Authenticator, uploads: UploadService, view: RegistryView, keeper: PinKeeper
    ) -> None:
        self._authenticator, self._uploads, self._view, self._keeper = authenticator, uploads, view, keeper

    def routes(self) -> Sequence[RouteSpec]:
        return (
            RouteSpec(
                method="GET",
                path=_PATH,
                handler=self.show,
                scope="upload",
                summary="An adapter's pin, and how it does.",
                answers={200: PinAnswer},
                errors=_ERRORS,
            ),
            RouteSpec(
                method="PUT",
                path=_PATH,
                handler=self.pin,
                scope="upload",
                summary="Keep an adapter's current version in the host memory of gangs.",
                body=PinBody,
                answers={200: PinAnswer},
                errors=("adapter_not_found", "version_refused", "insufficient_quota", "registry_unavailable"),
            ),
            RouteSpec(
                method="DELETE",
                path=_PATH,
                handler=self.unpin,
                scope="upload",
                summary="Pin an adapter no more.",
                answers={200: Deleted},
                errors=_ERRORS,
            ),
        )

    async def show(self, request: Request) -> Response:
        tenant, name = self._authenticator.identify(request, "upload").name, request.path_params["name"]

        async def found() -> PinAnswer:
            state = await self._uploads.state(tenant, name)
            if not state.rollout.pinned_gangs:
                raise NoSuchVersion(f"{name} is not pinned")
            return self._shown(state)

        shown = await answered(found())
        record_of(request.scope).model = name
        return answer(shown)

    async def pin(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "upload")
        num_gangs = (await small_body(request, _pin)).gangs
        return answer(self._shown(await self._change(request, identity, "pin.set", num_gangs)))

    async def unpin(self, request: Request) -> Response:
        state = await self._change(request, self._authenticator.identify(request, "upload"), "pin.delete", 0)
        return answer(Deleted(state.current.name, "pin"))

    async def _change(self, request: Request, identity: Identity, action: str, num_gangs: int) -> NameState:
        name = request.path_params["name"]
        state = await answered(
            self._uploads.change(
                identity.name,
                name,
                lambda state, _: name_state.with_pin(state, num_gangs),
                identity.entry(request, action, name),
                identity.tenant.incarnation,
                identity.key.quota.pinned_bytes,
            )
        )
        record_of(request.scope).model = name
        return state

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
            num_gangs * current.num_bytes,
            whole,
            next((one.reason for one in gangs if one.reason is not None), None),
            gangs,
        )
