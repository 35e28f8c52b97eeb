"""/v1/adapters/{name}/canary, …/shadow and /v1/feedback: versions on trial, and what people think of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import NoSuchVersion
from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.registry.versions import name_state
from ...adapters.registry.versions.name_state import NameState
from ...adapters.registry.versions.rollout import Canary
from ...adapters.upload import UploadService
from ..access.request_record import record_of
from ..bodies.small_body import small_body
from ..openai_api.errors import invalid_value
from ..route import RouteSpec
from ..tenants.auth import Authenticator
from ..tenants.identity import Identity
from .canary_book import FLUSH_S
from .version_schema import (
    CanaryAnswer,
    CanaryBody,
    Deleted,
    FeedbackAnswer,
    FeedbackBody,
    ShadowAnswer,
    ShadowBody,
    shown_arm,
)
from .versions_api import NAME, answer, answered

T = TypeVar("T")
_canary = msgspec.json.Decoder(CanaryBody)
_shadow = msgspec.json.Decoder(ShadowBody)
_feedback = msgspec.json.Decoder(FeedbackBody)
_ERRORS: Final = ("invalid_value", "adapter_not_found", "version_not_found", "version_refused", "registry_unavailable")


class TrialsApi:
    """Handlers. What they change every router hears of within a second."""

    def __init__(self, authenticator: Authenticator, uploads: UploadService, counts: CanaryCounts) -> None:
        self._authenticator, self._uploads, self._counts = authenticator, uploads, counts

    def routes(self) -> Sequence[RouteSpec]:
        spec, canary, shadow = RouteSpec, f"{NAME}/canary", f"{NAME}/shadow"
        one, other, gone = {200: CanaryAnswer}, {200: ShadowAnswer}, {200: Deleted}
        return (
            spec(
                method="GET",
                path=canary,
                handler=self.canary,
                scope="upload",
                summary="An adapter's canary, or how its last one ended.",
                answers=one,
                errors=_ERRORS,
            ),
            spec(
                method="PUT",
                path=canary,
                handler=self.set_canary,
                scope="upload",
                summary="Put a version on trial, or change its share.",
                body=CanaryBody,
                answers=one,
                errors=_ERRORS,
            ),
            spec(
                method="DELETE",
                path=canary,
                handler=self.stop_canary,
                scope="upload",
                summary="Stop the canary.",
                answers=gone,
                errors=_ERRORS,
            ),
            spec(
                method="GET",
                path=shadow,
                handler=self.shadow,
                scope="upload",
                summary="An adapter's shadow.",
                answers=other,
                errors=_ERRORS,
            ),
            spec(
                method="PUT",
                path=shadow,
                handler=self.set_shadow,
                scope="upload",
                summary="Send a share of the requests to a version as well.",
                body=ShadowBody,
                answers=other,
                errors=_ERRORS,
            ),
            spec(
                method="DELETE",
                path=shadow,
                handler=self.stop_shadow,
                scope="upload",
                summary="Stop the shadow.",
                answers=gone,
                errors=_ERRORS,
            ),
            spec(
                method="POST",
                path="/v1/feedback",
                handler=self.feedback,
                scope="infer",
                summary="Say what somebody thinks of an answer.",
                body=FeedbackBody,
                answers={200: FeedbackAnswer},
                errors=_ERRORS,
            ),
        )

    async def canary(self, request: Request) -> Response:
        state = await answered(self._uploads.state(self._tenant(request), request.path_params["name"]))
        return answer(await answered(self._shown(state)))

    async def set_canary(self, request: Request) -> Response:
        identity, body, canary_id = (
            self._authenticator.identify(request, "upload"),
            await small_body(request, _canary),
            uuid4().hex,
        )
        version, share = str(body.version), body.share
        state = await self._change(
            request,
            identity,
            "canary.start",
            lambda state, now: name_state.with_canary(state, version, share, canary_id, now),
        )
        return answer(await answered(self._shown(state)))

    async def stop_canary(self, request: Request) -> Response:
        def stop(state: NameState, now: float) -> NameState:
            _existing(state, state.rollout.canary, "canary")
            return name_state.without_canary(state, "stopped", "somebody stopped it", now)

        state = await self._change(request, self._authenticator.identify(request, "upload"), "canary.stop", stop)
        return answer(Deleted(state.current.name, "canary"))

    async def shadow(self, request: Request) -> Response:
        state = await answered(self._uploads.state(self._tenant(request), request.path_params["name"]))
        return answer(await answered(self._shown_shadow(state)))

    async def set_shadow(self, request: Request) -> Response:
        identity, body = self._authenticator.identify(request, "upload"), await small_body(request, _shadow)
        version, share, shadow_id = str(body.version), body.share, uuid4().hex
        state = await self._change(
            request, identity, "shadow.set", lambda state, _: name_state.with_shadow(state, version, share, shadow_id)
        )
        return answer(await answered(self._shown_shadow(state)))

    async def stop_shadow(self, request: Request) -> Response:
        def stop(state: NameState, now: float) -> NameState:
            _existing(state, state.rollout.shadow, "shadow")
            return name_state.with_shadow(state, None, 0.0)

        state = await self._change(request, self._authenticator.identify(request, "upload"), "shadow.stop", stop)
        return answer(Deleted(state.current.name, "shadow"))

    async def feedback(self, request: Request) -> Response:
        """The answer is the same for an id that nobody has and for one of another tenant."""
        tenant_id = self._authenticator.identify(request, "infer").tenant.tenant_id
        body = await small_body(request, _feedback)
        if (body.score is None) == (body.thumb is None):
            raise invalid_value("score", "either score or thumb is needed, and not both.")
        if body.score == 0:
            raise invalid_value("score", "it says neither good nor bad: above 0 is good, below 0 is bad.")
        is_good = body.thumb == "up" if body.score is None else body.score > 0
        rate = partial(self._counts.rate, tenant_id, body.id, is_good=is_good, comment=body.comment)
        counted = await answered(rate())
        if not counted:  # the answer may be so new that its router has not told Redis of it yet
            await asyncio.sleep(2 * FLUSH_S)
            counted = await answered(rate())
        return answer(FeedbackAnswer(body.id, counted))

    def _tenant(self, request: Request) -> str:
        return self._authenticator.identify(request, "upload").name

    async def _change(
        self, request: Request, identity: Identity, action: str, change: Callable[[NameState, float], NameState]
    ) -> NameState:
        name, entry = request.path_params["name"], identity.entry(request, action, request.path_params["name"])
        incarnation = identity.tenant.incarnation
        state = await answered(self._uploads.change(identity.name, name, change, entry, incarnation))
        record_of(request.scope).model = name
        return state

    async def _shown(self, state: NameState) -> CanaryAnswer:
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


def _existing(state: NameState, trial: T | None, what: str) -> T:
    if trial is None:
        raise NoSuchVersion(f"{state.current.name} has no {what}.")
    return trial
