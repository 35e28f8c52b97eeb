"""Takes back canaries that do worse: one router of all looks at what all have counted, again and again."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final
from uuid import uuid4

from ...adapters.errors import NoSuchVersion, RegistryUnavailable
from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.tenants.audit_entry import Actor, AuditEntry
from ...adapters.upload import UploadService
from ...adapters.versions.canary_policy import why_worse
from ...adapters.versions.name_state import NameState, without_canary

JUDGE_S: Final = 0.25
LEASE_S: Final = 2.0  # after which another router judges in place of one that died
_AT_ONCE: Final = 32  # names that are looked at
_log = logging.getLogger(__name__)


class CanaryJudge:
    """Owned by one event loop. Keeps nothing: whichever router judges next goes on from what Redis has."""

    def __init__(self, uploads: UploadService, counts: CanaryCounts) -> None:
        self._uploads, self._counts = uploads, counts
        self._id = uuid4().hex
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._judge_forever(), name="canary judge")

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        with suppress(RegistryUnavailable):
            await self._counts.hold_judging(self._id, 0)

    async def judge(self) -> None:
        """Looks at all canaries once, unless another router does. Raises RegistryUnavailable."""
        if not await self._counts.hold_judging(self._id, LEASE_S):
            return
        names = await self._counts.running()
        for start in range(0, len(names), _AT_ONCE):
            await asyncio.gather(*(self._judge_one(*name) for name in names[start : start + _AT_ONCE]))
            if not await self._counts.hold_judging(self._id, LEASE_S):
                return

    async def _judge_one(self, tenant: str, name: str) -> None:
        with suppress(NoSuchVersion):  # deleted since
            canary = (await self._uploads.state(tenant, name)).rollout.canary
            if canary is None:
                return
            counts = await self._counts.read(canary.id)
            reason = why_worse(counts["stable"], counts["canary"])
            if reason is None:
                return
            canary_id, bad = canary.id, reason

            def take_back(state: NameState, now: float) -> NameState:
                running = state.rollout.canary
                if running is None or running.id != canary_id:
                    return state
                return without_canary(state, "rolled_back", bad, now)

            actor = Actor(kind="judge", tenant=tenant)
            entry = AuditEntry(action="canary.rolled_back", tenant=tenant, target=name, actor=actor)
            await self._uploads.change(tenant, name, take_back, entry)
            _log.warning("the canary of an adapter was rolled back", extra={"tenant": tenant, "model": name})

    async def _judge_forever(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # asked here, because the Redis client may swallow the exception of `stop`
            try:
                await self.judge()
            except RegistryUnavailable:
                pass  # the view says so in the log
            except Exception:
                _log.exception("canaries cannot be judged")
            await asyncio.sleep(JUDGE_S)
