"""/v1/adapters/{name}/preload: an adapter is brought to gangs before its first request."""

from __future__ import annotations

from starlette.requests import Request

from ...adapters.upload import UploadService
from ..route import route
from ..tenants.identity import Identity
from .preloader import Preloader
from .version_schema import PreloadAnswer, PreloadBody
from .versions_api import NAME, read_name


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
