"""/v1/adapters/{name}/residency: where an adapter's versions are, as the tenant's own use has shown this router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, Literal

import msgspec
from starlette.requests import Request

from ...adapters.adapter import AdapterVersion
from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.registry.preloads import Preload, Preloads, place_of
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.versions.name_state import NameState
from ...adapters.registry.versions.rollout import versions_of
from ...adapters.sight import owner_of
from ...adapters.upload import UploadService
from ..fleet.dispatch import Dispatcher
from ..fleet.known_gang import AdapterTier
from ..residency.adapter_uses import asker_of
from ..residency.pin_keeper import PinKeeper
from ..route import route
from ..tenants.identity import Identity
from .versions_api import NAME, read_name

Tier = Literal["device", "host", "store"]  # a gang's pool, or on its way there; its host memory; the store alone
State = Literal["ready", "coming", "failed"]


class GangResidency(msgspec.Struct, frozen=True):
    gang: str  # an opaque name, of this tenant only
    tier: Tier
    state: State  # of its pin there, or the preload that was last noted; "ready": there is none under way
    reason: str | None = None  # why it failed


class VersionResidency(msgspec.Struct, frozen=True):
    version: int
    tier: Tier  # the fastest that has it for this tenant, at any gang
    state: State  # "coming": to some gang, by a preload; "failed": a gang could not get it lately, and none has it
    reason: str | None
    gangs: list[GangResidency]


class ResidencyAnswer(msgspec.Struct, frozen=True):
    data: list[VersionResidency]
    num_gangs: int  # in all
    object: Literal["list"] = "list"


class ResidencyApi:
    def __init__(
        self,
        uploads: UploadService,
        dispatcher: Dispatcher,
        view: RegistryView,
        counts: CanaryCounts | None,
        preloads: Preloads | None,
        pins: PinKeeper | None,
    ) -> None:
        """`counts`, `preloads`: what routers have noted of versions; None: not recorded. `pins`: None: none."""
        self._uploads, self._dispatcher, self._view = uploads, dispatcher, view
        self._counts, self._preloads, self._pins = counts, preloads, pins

    @route(
        "GET",
        f"{NAME}/residency",
        scope="metrics",
        summary="Where an adapter's versions are.",
        errors=("adapter_not_found", "registry_unavailable"),
    )
    async def show(self, request: Request, identity: Identity) -> ResidencyAnswer:
        state = await read_name(self._uploads, request, identity)
        return ResidencyAnswer(await self._residencies(state), len(self._dispatcher.gangs()))

    async def _residencies(self, state: NameState) -> list[VersionResidency]:
        tenant, name = state.current.tenant, state.current.name
        versions = [*versions_of(state.current)]
        pins: Mapping[str, str | None] = {}
        if self._pins is not None and state.rollout.pinned_gangs:
            pins = dict([*self._pins.states(state.current.digest).items()][: state.rollout.pinned_gangs])
        failures: Mapping[int, str] = {}
        preloads: Sequence[Mapping[str, Preload]] = [{}] * len(versions)
        if self._counts is not None:
            failures = await self._counts.failures(tenant, name, [one.version for one in versions])
        if self._preloads is not None:
            preloads = await self._preloads.read([place_of(tenant, name, one.version, one.digest) for one in versions])
        return [
            self._residency(tenant, one, failures.get(one.version), noted, pins if one is state.current else {})
            for one, noted in zip(versions, preloads, strict=True)
        ]

    def _residency(
        self,
        tenant: str,
        version: AdapterVersion,
        failure: str | None,
        noted: Mapping[str, Preload],
        pins: Mapping[str, str | None],
    ) -> VersionResidency:
        """`pins`: the gangs that keep it for the tenant; None: it is there, or empty: it comes, or why not."""
        brought = [gang for gang, preload in noted.items() if preload.is_over and not preload.failure]
        tiers: dict[str, AdapterTier] = {gang: "host" for gang, failed in pins.items() if failed is None}
        tiers |= self._dispatcher.residency(asker_of(tenant, owner_of(version.name)), version.digest, brought)
        noted = {**noted, **{gang: Preload(is_over=fail != "", failure=fail or "") for gang, fail in pins.items()}}
        gangs = [
            _gang(opaque_gang(self._view, tenant, gang), tiers.get(gang, "store"), noted.get(gang))
            for gang in {**tiers, **noted}
        ]
        gangs.sort(key=lambda one: one.gang)
        states, reasons = {one.state for one in gangs}, [one.reason for one in gangs if one.reason is not None]
        tier: Tier = next((tier for tier in _FASTEST_FIRST if tier in tiers.values()), "store")
        if failure is None and reasons and tier == "store":
            failure = reasons[0]
        state: State = "failed" if failure is not None else "coming" if "coming" in states else "ready"
        return VersionResidency(version.version, tier, state, failure, gangs)


def opaque_gang(view: RegistryView, tenant: str, gang_id: str) -> str:
    """The same at all routers, and different for each tenant."""
    return blake2b(f"{tenant}/{gang_id}".encode(), key=view.stream_keys[0], digest_size=6).hexdigest()


_FASTEST_FIRST: Final[tuple[AdapterTier, ...]] = ("device", "host")


def _gang(name: str, tier: Tier, preload: Preload | None) -> GangResidency:
    if preload is None or (preload.is_over and not preload.failure):
        return GangResidency(name, tier, "ready")
    if not preload.is_over:
        return GangResidency(name, tier, "coming")
    return GangResidency(name, tier, "failed", preload.failure)
