"""/v1/adapters/{name}/versions, …/promote, …/rollback and …/aliases: the versions of a name, and which is current."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar
from uuid import uuid4

from starlette.requests import Request

from ...adapters.errors import NoSuchVersion
from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.registry.versions import name_state
from ...adapters.registry.versions.name_state import NameState
from ...adapters.registry.versions.rollout import Canary, versions_of
from ...adapters.upload import UploadService
from ..http.access_log import record_of
from ..http.auth import Identity
from ..http.errors import invalid_value
from ..http.route import route
from .canary_book import FLUSH_S
from .version_schema import (
    AliasAnswer,
    AliasBody,
    AliasList,
    CanaryAnswer,
    CanaryBody,
    EmptyBody,
    FeedbackAnswer,
    FeedbackBody,
    NoteBody,
    PartDeleted,
    PromoteBody,
    ShadowAnswer,
    ShadowBody,
    VersionAnswer,
    VersionList,
    shown_arm,
    shown_version,
)

NAME: Final = "/v1/adapters/{name}"
ERRORS: Final = ("invalid_value", "adapter_not_found", "version_not_found", "version_refused", "registry_unavailable")
_PIN_ERRORS: Final = (*ERRORS, "insufficient_quota")  # a pinned name's current version may grow
_route: Final = partial(route, scope="upload", errors=ERRORS)


class VersionsApi:
    """Handlers. They ask the registry itself; every router has the change within a second."""

    def __init__(self, uploads: UploadService, counts: CanaryCounts | None) -> None:
        """`counts`: has the versions that could not be loaded lately; None: that is not known."""
        self._uploads, self._counts = uploads, counts

    @_route("GET", f"{NAME}/versions", summary="All versions of an adapter that are kept.")
    async def list(self, request: Request, identity: Identity) -> VersionList:
        state = await read_name(self._uploads, request, identity)
        failures = await self._failures(state)
        return VersionList(
            [shown_version(state, version, failures.get(version.version)) for version in versions_of(state.current)]
        )

    @_route("GET", f"{NAME}/versions/{{version}}", summary="A version, by number or alias.")
    async def show(self, request: Request, identity: Identity) -> VersionAnswer:
        state = await read_name(self._uploads, request, identity)
        return await self._answer(state, request.path_params["version"])

    @_route("PATCH", f"{NAME}/versions/{{version}}", summary="Change a version's note.")
    async def note(self, request: Request, identity: Identity, body: NoteBody) -> VersionAnswer:
        selector = request.path_params["version"]
        state = await change_name(
            self._uploads,
            request,
            identity,
            "version.note",
            lambda state, _: name_state.with_note(state, selector, body.note),
        )
        return await self._answer(state, selector)

    @_route("POST", f"{NAME}/promote", summary="Make a version the current one.", errors=_PIN_ERRORS)
    async def promote(self, request: Request, identity: Identity, body: PromoteBody) -> VersionAnswer:
        selector = None if body.version is None else str(body.version)
        state = await change_name(
            self._uploads,
            request,
            identity,
            "adapter.promote",
            lambda state, now: name_state.promoted(state, selector, now),
        )
        return await self._answer(state, str(state.current.version))

    @_route("POST", f"{NAME}/rollback", summary="Go back to the version before.", errors=_PIN_ERRORS)
    async def roll_back(self, request: Request, identity: Identity, body: EmptyBody) -> VersionAnswer:
        state = await change_name(self._uploads, request, identity, "adapter.roll_back", name_state.rolled_back)
        return await self._answer(state, str(state.current.version))

    @_route("GET", f"{NAME}/aliases", summary="An adapter's aliases.")
    async def aliases(self, request: Request, identity: Identity) -> AliasList:
        state = await read_name(self._uploads, request, identity)
        aliases = sorted(state.rollout.aliases.items())
        return AliasList([AliasAnswer(state.current.name, alias, version) for alias, version in aliases])

    @_route("PUT", f"{NAME}/aliases/{{alias}}", summary="Point an alias to a version.")
    async def set_alias(self, request: Request, identity: Identity, body: AliasBody) -> AliasAnswer:
        alias = request.path_params["alias"]
        state = await change_name(
            self._uploads,
            request,
            identity,
            "alias.set",
            lambda state, _: name_state.with_alias(state, alias, str(body.version)),
        )
        return AliasAnswer(state.current.name, alias, state.rollout.aliases[alias])

    @_route("DELETE", f"{NAME}/aliases/{{alias}}", summary="Delete an alias.")
    async def delete_alias(self, request: Request, identity: Identity) -> PartDeleted:
        alias = request.path_params["alias"]
        state = await change_name(
            self._uploads, request, identity, "alias.delete", lambda state, _: name_state.with_alias(state, alias, None)
        )
        return PartDeleted(f"{state.current.name}@{alias}", "alias")

    async def _failures(self, state: NameState) -> dict[int, str]:
        if self._counts is None:
            return {}
        versions = [version.version for version in versions_of(state.current)]
        return await self._counts.failures(state.current.tenant, state.current.name, versions)

    async def _answer(self, state: NameState, selector: str) -> VersionAnswer:
        version = state.find(selector)
        return shown_version(state, version, (await self._failures(state)).get(version.version))


async def read_name(uploads: UploadService, request: Request, identity: Identity) -> NameState:
    """What the registry has of the name in the path."""
    name: str = request.path_params["name"]
    state = await uploads.state(identity.name, name, identity.sight)
    record_of(request.scope).model = state.current.name
    return state


async def change_name(
    uploads: UploadService,
    request: Request,
    identity: Identity,
    action: str,
    change: Callable[[NameState, float], NameState],
    max_pinned_bytes: int | None = None,
) -> NameState:
    """Changes the name in the path; what the registry has of it then. `action`: for the audit log."""
    name: str = request.path_params["name"]
    entry = identity.entry(request, action, name)
    state = await uploads.change(
        identity.name, name, change, entry, identity.admission, max_pinned_bytes, identity.sight
    )
    record_of(request.scope).model = state.current.name
    return state


# /v1/adapters/{name}/canary, …/shadow and /v1/feedback: versions on trial, and what people think of their answers.

T = TypeVar("T")
NEW_ANSWER_WAIT_S: Final = 1.0  # within which a router that is not overloaded has reported an answer to Redis
_CANARY: Final = f"{NAME}/canary"
_SHADOW: Final = f"{NAME}/shadow"


class TrialsApi:
    """Handlers. Every router has what they change within a second."""

    def __init__(self, uploads: UploadService, counts: CanaryCounts) -> None:
        self._uploads, self._counts = uploads, counts

    @_route("GET", _CANARY, summary="An adapter's canary, or how its last one ended.")
    async def canary(self, request: Request, identity: Identity) -> CanaryAnswer:
        return await self._answer(await read_name(self._uploads, request, identity))

    @_route("PUT", _CANARY, summary="Put a version on trial, or change its share.")
    async def set_canary(self, request: Request, identity: Identity, body: CanaryBody) -> CanaryAnswer:
        version, canary_id = str(body.version), uuid4().hex
        state = await change_name(
            self._uploads,
            request,
            identity,
            "canary.start",
            lambda state, now: name_state.with_canary(state, version, body.share, canary_id, now),
        )
        return await self._answer(state)

    @_route("DELETE", _CANARY, summary="Stop the canary.")
    async def stop_canary(self, request: Request, identity: Identity) -> PartDeleted:
        def stop(state: NameState, now: float) -> NameState:
            _existing(state, state.rollout.canary, "canary")
            return name_state.without_canary(state, "stopped", "it was stopped by a request", now)

        state = await change_name(self._uploads, request, identity, "canary.stop", stop)
        return PartDeleted(state.current.name, "canary")

    @_route("GET", _SHADOW, summary="An adapter's shadow.")
    async def shadow(self, request: Request, identity: Identity) -> ShadowAnswer:
        return await self._shown_shadow(await read_name(self._uploads, request, identity))

    @_route("PUT", _SHADOW, summary="Send a share of the requests to a version as well.")
    async def set_shadow(self, request: Request, identity: Identity, body: ShadowBody) -> ShadowAnswer:
        version, shadow_id = str(body.version), uuid4().hex
        state = await change_name(
            self._uploads,
            request,
            identity,
            "shadow.set",
            lambda state, _: name_state.with_shadow(state, version, body.share, shadow_id),
        )
        return await self._shown_shadow(state)

    @_route("DELETE", _SHADOW, summary="Stop the shadow.")
    async def stop_shadow(self, request: Request, identity: Identity) -> PartDeleted:
        def stop(state: NameState, now: float) -> NameState:
            _existing(state, state.rollout.shadow, "shadow")
            return name_state.with_shadow(state, None, 0.0)

        state = await change_name(self._uploads, request, identity, "shadow.stop", stop)
        return PartDeleted(state.current.name, "shadow")

    @route("POST", "/v1/feedback", scope="infer", summary="Rate an answer.", errors=ERRORS)
    async def feedback(self, request: Request, identity: Identity, body: FeedbackBody) -> FeedbackAnswer:
        """The answer is the same for an unknown id and for one of an answer that you may not see."""
        if (body.score is None) == (body.thumb is None):
            raise invalid_value("score", "either score or thumb is needed, and not both.")
        if body.score == 0:
            raise invalid_value("score", "it says neither good nor bad: above 0 is good, below 0 is bad.")
        is_good = body.thumb == "up" if body.score is None else body.score > 0
        tenant = identity.tenant.tenant_id
        rate = partial(self._counts.rate, tenant, body.id, is_good=is_good, comment=body.comment, sight=identity.sight)
        is_counted = await rate()
        deadline = asyncio.get_running_loop().time() + NEW_ANSWER_WAIT_S
        while not is_counted and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(FLUSH_S)  # the answer may be so new that its router has not reported it to Redis yet
            is_counted = await rate()
        return FeedbackAnswer(body.id, is_counted)

    async def _answer(self, state: NameState) -> CanaryAnswer:
        running, ended = state.rollout.canary, state.notes.last_canary
        if running is None and ended is None:
            raise NoSuchVersion(f"{state.current.name} has no canary.")
        trial = running or ended
        assert trial is not None
        counts, comments = await self._counts.read(trial.id), await self._counts.comments(trial.id)
        return CanaryAnswer(
            name=state.current.name,
            version=trial.version,
            share=trial.share,
            state="running" if isinstance(trial, Canary) else trial.state,
            reason=None if isinstance(trial, Canary) else trial.reason,
            stable=shown_arm(counts["stable"]),
            canary=shown_arm(counts["canary"]),
            comments=comments,
        )

    async def _shown_shadow(self, state: NameState) -> ShadowAnswer:
        shadow = _existing(state, state.rollout.shadow, "shadow")
        counts = await self._counts.read(shadow.id)
        return ShadowAnswer(state.current.name, shadow.version, shadow.share, shown_arm(counts["shadow"]))


def _existing(state: NameState, trial: T | None, kind: str) -> T:
    if trial is None:
        raise NoSuchVersion(f"{state.current.name} has no {kind}.")
    return trial
