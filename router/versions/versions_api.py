"""/v1/adapters/{name}/versions, …/promote, …/rollback and …/aliases: the versions of a name, and which is current."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from starlette.requests import Request

from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.registry.versions import name_state
from ...adapters.registry.versions.name_state import NameState
from ...adapters.registry.versions.rollout import versions_of
from ...adapters.upload import UploadService
from ..access.request_record import record_of
from ..route import route
from ..tenants.identity import Identity
from .version_schema import (
    AliasAnswer,
    AliasBody,
    AliasList,
    EmptyBody,
    NoteBody,
    PartDeleted,
    PromoteBody,
    VersionAnswer,
    VersionList,
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
        return VersionList([shown_version(state, one, failures.get(one.version)) for one in versions_of(state.current)])

    @_route("GET", f"{NAME}/versions/{{version}}", summary="A version, by number or alias.")
    async def show(self, request: Request, identity: Identity) -> VersionAnswer:
        state = await read_name(self._uploads, request, identity)
        return await self._shown(state, request.path_params["version"])

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
        return await self._shown(state, selector)

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
        return await self._shown(state, str(state.current.version))

    @_route("POST", f"{NAME}/rollback", summary="Go back to the version before.", errors=_PIN_ERRORS)
    async def roll_back(self, request: Request, identity: Identity, body: EmptyBody) -> VersionAnswer:
        state = await change_name(self._uploads, request, identity, "adapter.roll_back", name_state.rolled_back)
        return await self._shown(state, str(state.current.version))

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
        versions = [one.version for one in versions_of(state.current)]
        return await self._counts.failures(state.current.tenant, state.current.name, versions)

    async def _shown(self, state: NameState, selector: str) -> VersionAnswer:
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
