"""/v1/adapters/{name}/preload: an adapter is brought to gangs before anybody asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.registry.versions.name_state import NameState
from ...adapters.upload import UploadService
from ..access.request_record import record_of
from ..bodies.small_body import small_body
from ..route import RouteSpec
from ..tenants.auth import Authenticator
from .preloader import Preloader
from .version_schema import PreloadAnswer, PreloadBody
from .versions_api import NAME, answer, answered

_preload: Final = msgspec.json.Decoder(PreloadBody)


class PreloadApi:
    def __init__(self, authenticator: Authenticator, uploads: UploadService, preloader: Preloader) -> None:
        self._authenticator, self._uploads, self._preloader = authenticator, uploads, preloader

    def routes(self) -> Sequence[RouteSpec]:
        return (
            RouteSpec(
                method="POST",
                path=f"{NAME}/preload",
                handler=self.preload,
                scope="upload",
                summary="Bring a version to gangs before anybody asks for it.",
                body=PreloadBody,
                answers={202: PreloadAnswer},
                errors=("adapter_not_found", "version_not_found", "overloaded", "not_ready", "registry_unavailable"),
            ),
        )

    async def preload(self, request: Request) -> Response:
        identity, name = self._authenticator.identify(request, "upload"), request.path_params["name"]
        body = await small_body(request, _preload)

        async def begun() -> PreloadAnswer:
            state: NameState = await self._uploads.state(identity.name, name)
            version = state.current if body.version is None else state.find(str(body.version))
            num_gangs = await self._preloader.begin(identity.tenant, version, body.gangs)
            return PreloadAnswer(name, version.version, num_gangs)

        found = await answered(begun())
        record_of(request.scope).model = name
        return answer(found, 202)
