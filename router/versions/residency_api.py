"""Routes of an adapter's residency: where its versions are, preloads, and pins."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Final, Literal

import msgspec
from starlette.requests import Request

from ...adapters.adapter import AdapterVersion
from ...adapters.errors import NoSuchVersion, RegistryUnavailable
from ...adapters.names import owner_of
from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.registry.preloads import Preload, Preloads, place_of
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import TenantRecord
from ...adapters.registry.versions import name_state
from ...adapters.registry.versions.name_state import NameState
from ...adapters.registry.versions.rollout import versions_of
from ...adapters.upload import UploadService
from ...workers.wire.messages import SamplingParams, SequenceError, SequenceRequest
from ..fleet.adapter_uses import asker_of
from ..fleet.dispatch import Dispatcher, SequenceStream
from ..fleet.known_gang import AdapterTier
from ..fleet.pin_keeper import PinKeeper
from ..http.auth import Identity
from ..http.errors import RETRY_AFTER_S, ApiError, unavailable
from ..http.route import route
from .canary_book import CanaryBook
from .version_choice import adapter_ref
from .version_schema import PartDeleted, PinBody, PreloadAnswer, PreloadBody
from .versions_api import NAME, change_name, read_name

# Brings versions to gangs before their first requests.

MAX_OF_TENANT: Final = 16  # that are under way at a router, each at one gang
MAX_IN_ALL: Final = 256
WAIT_S: Final = 60.0  # for room in a gang's pool, behind everybody else's work
_MAX_REASON_CHARS: Final = 300
# One token is computed with the adapter, so that what is called ready has been used once.
_SAMPLING: Final = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
_PROMPT: Final = 0  # a token that every vocabulary has
_log = logging.getLogger(__name__)


def may_begin(num_gangs: int, num_of_tenant: int, num_of_all: int) -> bool:
    """Whether a tenant's preload at `num_gangs` begins, beside those under way, each counted once for each gang.

    The second half of the places is for tenants that have none, for one gang each: as many tenants as that bring
    something at once, before any of them can keep another one out.

    >>> MAX_OF_TENANT, MAX_IN_ALL
    (16, 256)
    >>> may_begin(2, 0, MAX_IN_ALL // 2), may_begin(1, 0, MAX_IN_ALL // 2)
    (False, True)
    """
    if num_of_tenant + num_gangs > MAX_OF_TENANT:
        return False
    if num_of_tenant == 0 and num_gangs == 1:
        return num_of_all < MAX_IN_ALL
    return num_of_all + num_gangs <= MAX_IN_ALL // 2


class Preloader:
    """Owned by one event loop. A preload is background work of its tenant at a gang, and is charged like a cold load.

    It takes no room of what runs, nor of what others wait for; it takes what is idle as any adapter does that comes.
    """

    def __init__(self, dispatcher: Dispatcher, preloads: Preloads, book: CanaryBook) -> None:
        """`preloads`: where all routers note how they do. `book`: gets to know which versions cannot be loaded."""
        self._dispatcher, self._preloads, self._book = dispatcher, preloads, book
        self._running: set[asyncio.Task[None]] = set()
        self._num_of: Counter[str] = Counter()  # gangs that are awaited, by tenant

    async def begin(self, tenant: TenantRecord, version: AdapterVersion, num_gangs: int) -> int:
        """Brings the version to `num_gangs`, or to all that are connected; returns their number.

        Raises 429 while too many preloads are under way, 503 if no gang is connected, and RegistryUnavailable.
        """
        num_own = self._num_of[tenant.name]
        if not may_begin(num_gangs, num_own, self.num_running):
            message = f"{num_own} preloads of yours are under way at this router"
            if num_own + num_gangs > MAX_OF_TENANT:
                message += f", each at one gang: {num_gangs} more would be over {MAX_OF_TENANT}; try again later"
            else:  # the number would show other tenants' load
                message += ", and it has no places for more of them now; try again later"
                message += ", or with one gang" if num_gangs > 1 and not num_own else ""
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})
        owner = owner_of(version.name)
        request = SequenceRequest(
            prompt_token_ids=[_PROMPT],
            sampling=_SAMPLING,
            tenant=tenant.name,
            adapter=adapter_ref(version),
            adapter_name="" if owner else version.name,
            owner=owner,
            weight=tenant.weight,
            is_background=True,
        )
        streams = self._dispatcher.bring(request, num_gangs, WAIT_S)
        if not streams:
            raise unavailable("No gang is connected that the adapter could be brought to.", "not_ready")
        self._num_of[tenant.name] += len(streams)
        try:  # before any of them can end
            await self._preloads.note(_place(version), dict.fromkeys(streams, Preload()))
        except BaseException:
            for stream in streams.values():
                stream.cancel()
            self._leave(tenant.name, len(streams))
            raise
        for gang, stream in streams.items():
            task = asyncio.create_task(self._follow(version, gang, stream), name="preload")
            self._running.add(task)
            task.add_done_callback(partial(self._ended, tenant.name))
        return len(streams)

    @property
    def num_running(self) -> int:
        """Preloads that have not ended, each at one gang."""
        return self._num_of.total()

    def _ended(self, tenant: str, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._leave(tenant, 1)

    def _leave(self, tenant: str, num_gangs: int) -> None:
        self._num_of[tenant] -= num_gangs
        if not self._num_of[tenant]:
            del self._num_of[tenant]

    async def _follow(self, version: AdapterVersion, gang: str, stream: SequenceStream) -> None:
        error: SequenceError | None = None
        async for update in stream:
            error = update.error or error
        if error is None or error.kind == "adapter_failed":  # else nothing is known of the version
            self._book.note_load(version, None if error is None else error.message)
        try:
            await self._preloads.note(_place(version), {gang: Preload(is_over=True, failure=reason_of(error))})
        except RegistryUnavailable as away:
            _log.warning("how a preload has ended cannot be noted: %s", away)


def _place(version: AdapterVersion) -> str:
    return place_of(version.tenant, version.name, version.version, version.digest)


def reason_of(error: SequenceError | None) -> str:
    """Why a version could not be brought to a gang, for its tenant; empty: it could."""
    if error is None:
        return ""
    if error.kind == "overloaded" and error.reason == "waited":
        return f"the gang's pool was full of what runs for {WAIT_S:g} s; try again later"
    return f"{error.kind}: {error.message}"[:_MAX_REASON_CHARS]


# /v1/adapters/{name}/preload: an adapter is brought to gangs before its first request.


class PreloadApi:
    def __init__(self, uploads: UploadService, preloader: Preloader) -> None:
        self._uploads, self._preloader = uploads, preloader

    @route(
        "POST",
        f"{NAME}/preload",
        scope="upload",
        summary="Bring a version to gangs before its first request.",
        status=202,
        errors=("adapter_not_found", "version_not_found", "overloaded", "not_ready", "registry_unavailable"),
    )
    async def preload(self, request: Request, identity: Identity, body: PreloadBody) -> PreloadAnswer:
        state = await read_name(self._uploads, request, identity)
        version = state.current if body.version is None else state.find(str(body.version))
        num_gangs = await self._preloader.begin(identity.tenant, version, body.gangs)
        return PreloadAnswer(version.name, version.version, num_gangs)


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
            failures = await self._counts.failures(tenant, name, [version.version for version in versions])
        if self._preloads is not None:
            preloads = await self._preloads.read(
                [place_of(tenant, name, version.version, version.digest) for version in versions]
            )
        return [
            self._residency(
                tenant, version, failures.get(version.version), noted, pins if version is state.current else {}
            )
            for version, noted in zip(versions, preloads, strict=True)
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
        preloaded_gangs = [gang for gang, preload in noted.items() if preload.is_over and not preload.failure]
        tiers: dict[str, AdapterTier] = {gang: "host" for gang, failed in pins.items() if failed is None}
        tiers |= self._dispatcher.residency(asker_of(tenant, owner_of(version.name)), version.digest, preloaded_gangs)
        noted = {**noted, **{gang: Preload(is_over=fail != "", failure=fail or "") for gang, fail in pins.items()}}
        gangs = [
            _gang(opaque_gang(self._view, tenant, gang), tiers.get(gang, "store"), noted.get(gang))
            for gang in {**tiers, **noted}
        ]
        gangs.sort(key=lambda gang_state: gang_state.gang)
        states, reasons = (
            {gang_state.state for gang_state in gangs},
            [gang_state.reason for gang_state in gangs if gang_state.reason is not None],
        )
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


# /v1/adapters/{name}/pin: an adapter is kept in the host memory of gangs.

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
        return self._answer(state)

    @_route(
        "PUT",
        _PATH,
        summary="Keep an adapter's current version in the host memory of gangs.",
        errors=("adapter_not_found", "version_refused", "insufficient_quota", "registry_unavailable"),
    )
    async def pin(self, request: Request, identity: Identity, body: PinBody) -> PinAnswer:
        return self._answer(await self._change(request, identity, "pin.set", body.gangs))

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

    def _answer(self, state: NameState) -> PinAnswer:
        current, num_gangs = state.current, state.rollout.pinned_gangs
        gangs = [
            PinnedAt(
                opaque_gang(self._view, current.tenant, gang),
                "ready" if failure is None else "failed" if failure else "coming",
                failure or None,
            )
            for gang, failure in self._keeper.states(current.digest).items()
        ][:num_gangs]
        states = [gang_state.state for gang_state in gangs]
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
            next((gang_state.reason for gang_state in gangs if gang_state.reason is not None), None),
            gangs,
        )
