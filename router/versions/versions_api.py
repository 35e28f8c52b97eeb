"""/v1/adapters/{name}/versions, …/aliases, …/promote and …/rollback: what a tenant does with an adapter's versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import (
    AdapterInvalid,
    NoSuchName,
    NoSuchVersion,
    QuotaExceeded,
    RegistryUnavailable,
    TenantGone,
    VersionRefused,
)
from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.registry.versions import name_state
from ...adapters.registry.versions.name_state import NameState
from ...adapters.registry.versions.rollout import versions_of
from ...adapters.upload import UploadService
from ..access.request_record import record_of
from ..bodies.small_body import small_body
from ..openai_api.errors import ApiError, insufficient_quota, unavailable
from ..route import RouteSpec
from ..tenants.auth import Authenticator, unknown_key
from ..tenants.identity import Identity
from .version_schema import (
    AliasAnswer,
    AliasBody,
    AliasList,
    Deleted,
    EmptyBody,
    NoteBody,
    PromoteBody,
    VersionAnswer,
    VersionList,
    shown_version,
)

T = TypeVar("T")
NAME: Final = "/v1/adapters/{name}"
_note = msgspec.json.Decoder(NoteBody)
_promote = msgspec.json.Decoder(PromoteBody)
_empty = msgspec.json.Decoder(EmptyBody)
_alias = msgspec.json.Decoder(AliasBody)
_ERRORS: Final = ("invalid_value", "adapter_not_found", "version_not_found", "version_refused", "registry_unavailable")
_FULL: Final = "insufficient_quota"  # a pinned name's current version may grow


class VersionsApi:
    """Handlers. They ask the registry itself; what they change every router hears of within a second."""

    def __init__(self, authenticator: Authenticator, uploads: UploadService, counts: CanaryCounts | None) -> None:
        """`counts`: knows which versions could not be loaded lately; None: nobody notes it."""
        self._authenticator, self._uploads, self._counts = authenticator, uploads, counts

    def routes(self) -> Sequence[RouteSpec]:
        def route(
            method: str, path: str, handler: Any, summary: str, answer: Any, body: Any = None, *more: str
        ) -> RouteSpec:
            return RouteSpec(
                method=method,
                path=NAME + path,
                handler=handler,
                scope="upload",
                summary=summary,
                body=body,
                answers={200: answer},
                errors=(*_ERRORS, *more),
            )

        return (
            route("GET", "/versions", self.list, "All versions of an adapter that are kept.", VersionList),
            route("GET", "/versions/{version}", self.show, "A version, by number or alias.", VersionAnswer),
            route("PATCH", "/versions/{version}", self.note, "Change a version's note.", VersionAnswer, NoteBody),
            route(
                "POST", "/promote", self.promote, "Make a version the current one.", VersionAnswer, PromoteBody, _FULL
            ),
            route(
                "POST", "/rollback", self.roll_back, "Go back to the version before.", VersionAnswer, EmptyBody, _FULL
            ),
            route("GET", "/aliases", self.aliases, "An adapter's aliases.", AliasList),
            route("PUT", "/aliases/{alias}", self.set_alias, "Point an alias to a version.", AliasAnswer, AliasBody),
            route("DELETE", "/aliases/{alias}", self.delete_alias, "Delete an alias.", Deleted),
        )

    async def list(self, request: Request) -> Response:
        state = await self._state(request)
        failures = await answered(self._failures(state))
        found = [shown_version(state, one, failures.get(one.version)) for one in versions_of(state.current)]
        return answer(VersionList(found))

    async def show(self, request: Request) -> Response:
        return await self._shown(await self._state(request), request.path_params["version"])

    async def note(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "upload")
        selector, body = request.path_params["version"], await small_body(request, _note)
        state = await self._change(
            request, identity, "version.note", lambda state, _: name_state.with_note(state, selector, body.note)
        )
        return await self._shown(state, selector)

    async def promote(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "upload")
        body = await small_body(request, _promote)
        selector = None if body.version is None else str(body.version)
        state = await self._change(
            request, identity, "adapter.promote", lambda state, now: name_state.promoted(state, selector, now)
        )
        return await self._shown(state, str(state.current.version))

    async def roll_back(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "upload")
        await small_body(request, _empty)
        state = await self._change(request, identity, "adapter.roll_back", name_state.rolled_back)
        return await self._shown(state, str(state.current.version))

    async def aliases(self, request: Request) -> Response:
        state = await self._state(request)
        found = sorted(state.rollout.aliases.items())
        return answer(AliasList([AliasAnswer(state.current.name, alias, version) for alias, version in found]))

    async def set_alias(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "upload")
        alias, body = request.path_params["alias"], await small_body(request, _alias)
        state = await self._change(
            request, identity, "alias.set", lambda state, _: name_state.with_alias(state, alias, str(body.version))
        )
        return answer(AliasAnswer(state.current.name, alias, state.rollout.aliases[alias]))

    async def delete_alias(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "upload")
        alias = request.path_params["alias"]
        state = await self._change(
            request, identity, "alias.delete", lambda state, _: name_state.with_alias(state, alias, None)
        )
        return answer(Deleted(f"{state.current.name}@{alias}", "alias"))

    async def _state(self, request: Request) -> NameState:
        tenant, name = self._authenticator.identify(request, "upload").name, request.path_params["name"]
        state = await answered(self._uploads.state(tenant, name))
        record_of(request.scope).model = name
        return state

    async def _change(
        self, request: Request, identity: Identity, action: str, change: Callable[[NameState, float], NameState]
    ) -> NameState:
        name, entry = request.path_params["name"], identity.entry(request, action, request.path_params["name"])
        incarnation = identity.tenant.incarnation
        state = await answered(self._uploads.change(identity.name, name, change, entry, incarnation))
        record_of(request.scope).model = name
        return state

    async def _failures(self, state: NameState) -> dict[int, str]:
        if self._counts is None:
            return {}
        versions = [one.version for one in versions_of(state.current)]
        return await self._counts.failures(state.current.tenant, state.current.name, versions)

    async def _shown(self, state: NameState, selector: str) -> Response:
        async def found() -> VersionAnswer:
            adapter = state.find(selector)
            return shown_version(state, adapter, (await self._failures(state)).get(adapter.version))

        return answer(await answered(found()))


async def answered(work: Awaitable[T]) -> T:
    """What the registry answers; its errors as those of the API."""
    try:
        return await work
    except AdapterInvalid as error:
        raise ApiError(400, str(error), code="invalid_value") from error
    except NoSuchName as error:
        raise ApiError(404, str(error), param="name", code="adapter_not_found") from error
    except NoSuchVersion as error:
        raise ApiError(404, str(error), param="version", code="version_not_found") from error
    except VersionRefused as error:
        raise ApiError(409, str(error), code="version_refused") from error
    except QuotaExceeded as error:
        raise insufficient_quota(str(error)) from error
    except TenantGone as error:
        raise unknown_key() from error
    except RegistryUnavailable as error:
        message = f"Versions cannot be read or changed now, try again: {error}"
        raise unavailable(message, "registry_unavailable") from error


def answer(body: msgspec.Struct, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")
