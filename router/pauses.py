"""Pauses of a tenant's own requests, which trainers ask for while they upload a version, under vLLM's names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec
from starlette.requests import Request

from ..adapters.registry.administration.tenant_registry import TenantRegistry
from ..adapters.registry.registry_view import RegistryView
from ..adapters.registry.tenants.records import TenantRecord
from .fleet.dispatch import MAX_PAUSE_S, Dispatcher
from .http.auth import Authenticates, Identity
from .http.errors import RETRY_AFTER_S, ApiError, invalid_value
from .http.route import route

MAX_HELD: Final = 1024  # requests of a tenant that wait at a router while they are paused


class Pause:
    """One tenant's, as one router has it."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer  # ends it
        self.ended = asyncio.Event()
        self.num_waiting = 0


class Pauses:
    """As the registry says, whose events come to every router. Belongs to one event loop.

    New requests wait here until the pause ends, before anything of them is read, and see all uploads until then, whose
    events come before that of its end. Running sequences wait in the dispatcher.
    """

    def __init__(
        self,
        view: RegistryView,
        dispatcher: Dispatcher,
        authenticator: Authenticates,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.now: dict[str, Pause] = {}  # by tenant; read only
        self._dispatcher, self._authenticator, self._clock = dispatcher, authenticator, clock
        for tenant in view.keys.tenants():
            self._update(tenant)
        view.on_tenant = self._update

    async def wait(self, request: Request, identity: Identity) -> Identity:
        """The caller, when the tenant's requests are paused no more: the key may have been revoked meanwhile.

        Raises 429 if too many of them wait here already, and as `Authenticates.identify`.
        """
        while (pause := self.now.get(identity.name)) is not None:
            if pause.num_waiting >= MAX_HELD:
                message = f"You have paused your requests, and {MAX_HELD} of them wait at this router already."
                raise ApiError(429, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})
            pause.num_waiting += 1
            try:
                await pause.ended.wait()
            finally:
                pause.num_waiting -= 1
        return self._authenticator.identify(request, "infer")

    def _update(self, tenant: TenantRecord) -> None:
        pause, left_s = self.now.get(tenant.name), tenant.paused_until - self._clock()
        if left_s <= 0 or tenant.is_suspended or tenant.is_ending:  # what waits is refused at once
            self._end(tenant.name)
            return
        # Clocks of routers differ.
        timer = asyncio.get_running_loop().call_later(min(left_s, MAX_PAUSE_S), self._end, tenant.name)
        if pause is None:
            self.now[tenant.name] = Pause(timer)
            self._dispatcher.hold(tenant.name)
        else:
            pause.timer.cancel()
            pause.timer = timer

    def _end(self, tenant: str) -> None:
        pause = self.now.pop(tenant, None)
        if pause is not None:
            pause.timer.cancel()
            pause.ended.set()
            self._dispatcher.release(tenant)


# The routes of pauses.


class PauseAnswer(msgspec.Struct, frozen=True):
    status: Literal["paused", "resumed"]


class PauseState(msgspec.Struct, frozen=True):
    is_paused: bool


_ERRORS: Final = ("tenant_ending", "registry_unavailable")


class PauseApi:
    def __init__(self, pauses: Pauses, tenants: TenantRegistry, view: RegistryView) -> None:
        self._pauses, self._tenants, self._view = pauses, tenants, view

    @route(
        "POST",
        "/pause",
        scope="upload",
        summary="Hold your tenant's requests, running ones included.",
        query={"mode": Literal["keep"]},
        errors=_ERRORS,
    )
    async def pause(self, request: Request, identity: Identity) -> PauseAnswer:
        """Until `/resume`, at most ten minutes, after which they go on by themselves. No other tenant is affected."""
        mode = request.query_params.get("mode", "abort")  # vLLM's default
        if mode != "keep":
            raise invalid_value(
                "mode", f"{mode[:20]!r}: only `keep` is there. Running requests are kept and go on later."
            )
        await self._set(identity, time.time() + MAX_PAUSE_S)
        return PauseAnswer("paused")

    @route("POST", "/resume", scope="upload", summary="End your tenant's pause.", errors=_ERRORS)
    async def resume(self, request: Request, identity: Identity) -> PauseAnswer:
        """They go on with the newest versions."""
        await self._set(identity, 0.0)
        return PauseAnswer("resumed")

    @route("GET", "/is_paused", scope="infer", summary="Are your tenant's requests held?")
    async def is_paused(self, request: Request, identity: Identity) -> PauseState:
        return PauseState(identity.name in self._pauses.now)

    async def _set(self, identity: Identity, until: float) -> None:
        if identity.user and not identity.is_admin:
            message = (
                "A pause holds the requests of all users: it needs a key of the tenant, or one with the scope admin."
            )
            raise ApiError(403, message, code="missing_scope")
        await self._tenants.pause(identity.name, until, identity.admission)
        await self._view.catch_up()
        await self._view.spread()
