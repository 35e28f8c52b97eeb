"""Rolls canaries back that do worse: one of the routers judges the counts of all, four times a second."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final
from uuid import uuid4

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import NoSuchName, RegistryUnavailable
from ...adapters.registry.canary_counts import CanaryCounts
from ...adapters.registry.tenants.audit_entry import Actor, AuditEntry
from ...adapters.registry.versions.canary_policy import why_worse
from ...adapters.registry.versions.name_state import NameState, without_canary
from ...adapters.sight import FULL_SIGHT
from ...adapters.upload import UploadService
from ..loop_share import LoopShare

JUDGE_S: Final = 0.25
LEASE_S: Final = 2.0  # after which another router judges in place of one that died
MAX_AT_ONCE: Final = 64  # trials that are judged together, each in about 0.2 ms
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
        await end_tasks(self._task)
        with suppress(RegistryUnavailable):
            await self._counts.hold_judging(self._id, 0)

    async def judge(self) -> None:
        """Judges trials with new counts, unless another router does.

        At most MAX_AT_ONCE of them, of any tenants; the others are judged next time. Raises RegistryUnavailable.
        """
        if not await self._counts.hold_judging(self._id, LEASE_S):
            return
        updated = await self._counts.updated_trials(MAX_AT_ONCE)
        trials = await self._counts.read_many([one.canary_id for one in updated]) if updated else []
        share, bad = LoopShare(), []
        for one, trial in zip(updated, trials, strict=True):
            reason = why_worse(trial.arms["stable"], trial.arms["canary"])
            if reason is not None and trial.adapter_id:
                bad.append((one, trial.adapter_id, reason))
            await share.pause()
        ended = await asyncio.gather(
            *(self._roll_back(adapter_id, one.canary_id, reason) for one, adapter_id, reason in bad),
            return_exceptions=True,
        )
        unreported = set()
        for (one, adapter_id, _), end in zip(bad, ended, strict=True):
            if isinstance(end, RegistryUnavailable):
                unreported.add(one)
            elif isinstance(end, Exception):
                _log.error("the canary of %s cannot be judged", adapter_id, exc_info=end)
            elif end is not None:
                raise end
        await self._counts.mark_judged([one for one in updated if one not in unreported])

    async def _roll_back(self, adapter_id: str, canary_id: str, reason: str) -> None:
        tenant, name = adapter_id.split("/", 1)
        is_running = False

        def roll_back(state: NameState, now: float) -> NameState:
            nonlocal is_running
            running = state.rollout.canary
            is_running = running is not None and running.id == canary_id
            if not is_running:  # it has ended since, or the name is another tenant's by now
                return state
            return without_canary(state, "rolled_back", reason, now)

        actor = Actor(kind="judge", tenant=tenant)
        entry = AuditEntry(action="canary.rolled_back", tenant=tenant, target=name, actor=actor)
        with suppress(NoSuchName):  # deleted since
            await self._uploads.change(tenant, name, roll_back, entry, sight=FULL_SIGHT)
            if is_running:
                _log.warning("the canary of an adapter was rolled back", extra={"tenant": tenant, "model": name})

    async def _judge_forever(self) -> None:
        while True:
            try:
                await self.judge()
            except RegistryUnavailable:
                pass  # the view logs it
            except Exception:
                _log.exception("canaries cannot be judged")
            await asyncio.sleep(JUDGE_S)
