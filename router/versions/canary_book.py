"""Counts how answers of names on trial ended, and reports the counts to Redis in batches."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Final, Generic, TypeVar
from uuid import uuid4

from ...adapters.adapter import AdapterVersion
from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import NoSuchName, RegistryUnavailable
from ...adapters.names import FULL_SIGHT
from ...adapters.registry.canary_counts import CanaryCounts, Outcome
from ...adapters.registry.tenants.records import Actor, AuditEntry
from ...adapters.registry.versions.canary_policy import first_token_bin, per_token_bin, why_worse
from ...adapters.registry.versions.name_state import NameState, without_canary
from ...adapters.upload import UploadService
from ..http.loop_turns import LoopShare
from ..tenancy.account import Account, AnswerRequest, Ending

# What is remembered of versions that failed lately.

VersionKey = tuple[str, str, int]  # tenant, name, version
_Value = TypeVar("_Value")


class RecentFailures(Generic[_Value]):
    """Values by version, the oldest first. Beyond its bound, a tenant, or all together, lose their oldest."""

    def __init__(self, max_of_tenant: int, max_in_all: int) -> None:
        self._max_of_tenant = max_of_tenant
        self._max_in_all = max_in_all
        self.values: dict[VersionKey, _Value] = {}
        self._of_tenant: dict[str, dict[VersionKey, None]] = {}

    def put(self, key: VersionKey, value: _Value) -> None:
        """Replaces the version's value, and makes it the newest."""
        self.drop(key)
        tenant_keys = self._of_tenant.setdefault(key[0], {})
        self.values[key], tenant_keys[key] = value, None
        if len(tenant_keys) > self._max_of_tenant:
            self.drop(next(iter(tenant_keys)))
        elif len(self.values) > self._max_in_all:
            self.drop(next(iter(self.values)))

    def drop(self, key: VersionKey) -> None:
        """No-op for an unknown version."""
        if self.values.pop(key, self) is self:
            return
        tenant_keys = self._of_tenant[key[0]]
        del tenant_keys[key]
        if not tenant_keys:
            del self._of_tenant[key[0]]


FLUSH_S: Final = 0.2  # what a router that is killed loses
MAX_PENDING: Final = 20_000  # answers, while Redis is away; the oldest are lost
_MAX_BATCH: Final = 500
MAX_FAILED_OF_TENANT: Final = 50  # versions whose failure this router has reported or will report
_MAX_FAILED: Final = 10_000
_MAX_REASON_CHARS: Final = 300
_ERRORS: Final = frozenset({"internal_error"})  # a timeout is the client's own: he could say one that never suffices
_REFUSED: Final = frozenset({"adapter_failed", "adapter_overflow"})
_log = logging.getLogger(__name__)


class CanaryBook:
    """Owned by one event loop. `counts`: where all routers count."""

    def __init__(self, counts: CanaryCounts) -> None:
        self.counts = counts
        self._pending: deque[Outcome] = deque(maxlen=MAX_PENDING)
        # Why a version could not be loaded; None: it can be loaded again.
        self._unreported = RecentFailures[str | None](MAX_FAILED_OF_TENANT, _MAX_FAILED)
        self._failed = RecentFailures[None](MAX_FAILED_OF_TENANT, _MAX_FAILED)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._flush_forever(), name="canary book")

    async def stop(self) -> None:
        """Reports to Redis what is not reported yet, if Redis answers."""
        await end_tasks(self._task)
        with suppress(RegistryUnavailable):
            for _ in range(_MAX_FAILED // _MAX_BATCH):
                await self.flush()

    async def open(self, request: AnswerRequest) -> Account:
        return _Line(self, request)

    def note(self, request: AnswerRequest, ending: Ending) -> None:
        """Takes in how an answer has ended."""
        version, trial = request.version, request.trial
        counted = counted_of(ending, is_resumed=request.is_resumed)
        if version is None or not counted:
            return
        key: VersionKey = (version.tenant, version.name, version.version)
        if ending.error in _REFUSED:
            self.note_load(version, ending.reason)
        elif key in self._failed.values and not ending.error:
            self.note_load(version, None)
        if trial is not None:
            tenant_id, of = request.identity.tenant.tenant_id, f"{version.tenant}/{version.name}"
            self.count(Outcome(tenant_id, of, request.response_id, trial.canary_id, trial.arm, counted, trial.sticky))

    def note_load(self, version: AdapterVersion, reason: str | None) -> None:
        """A gang could not load the version, for this reason; None: one could. Reported to Redis soon."""
        key: VersionKey = (version.tenant, version.name, version.version)
        if reason is None:
            self._failed.drop(key)
        else:
            self._failed.put(key, None)
        self._unreported.put(key, None if reason is None else reason[:_MAX_REASON_CHARS])

    def count(self, outcome: Outcome) -> None:
        """It is counted soon, unless nothing of it counts."""
        if outcome.counted:
            self._pending.append(outcome)

    async def flush(self) -> None:
        """One turn: what there is now, at most; what comes meanwhile is for the next one.

        Raises RegistryUnavailable, and then keeps what is not known to be counted.
        """
        for _ in range(-(-len(self._pending) // _MAX_BATCH)):
            batch = list(islice(self._pending, _MAX_BATCH))
            await self.counts.add(batch)
            for entry in batch:  # what was dropped meanwhile for lack of room is not there to be removed
                if self._pending and self._pending[0] is entry:
                    self._pending.popleft()
        failures = dict(islice(self._unreported.values.items(), _MAX_BATCH))
        if failures:
            await self.counts.note_failures(failures)
            for key, reason in failures.items():
                if self._unreported.values.get(key, "") == reason:  # else there is a later report
                    self._unreported.drop(key)

    async def _flush_forever(self) -> None:
        while True:
            try:
                await self.flush()
            except RegistryUnavailable:
                pass  # the view says so in the log
            except Exception:
                _log.exception("answers of canaries cannot be counted")
            await asyncio.sleep(FLUSH_S)


class _Line:
    """The account of one answer."""

    headers: Sequence[tuple[bytes, bytes]] = ()

    def __init__(self, book: CanaryBook, request: AnswerRequest) -> None:
        self._book, self._request = book, request

    def settle(self, ending: Ending) -> None:
        self._book.note(self._request, ending)


def counted_of(ending: Ending, *, is_resumed: bool = False) -> tuple[str, ...]:
    """What an answer counts as. Nothing, if its client has left, or for what no version is to blame for."""
    if ending.is_cancelled:
        return ()
    if ending.error in _REFUSED:
        return ("answers", "refused")
    if ending.error in _ERRORS:
        return ("answers", "errors")
    if ending.error:
        return ()
    counted = ["answers"]
    if ending.first_token_s is not None and not is_resumed:
        counted.append(f"first_token {first_token_bin(ending.first_token_s)}")
        num_later = ending.progress.num_completion_tokens - 1
        if num_later > 0:
            each_s = max(0.0, ending.duration_s - ending.first_token_s) / num_later
            counted.append(f"per_token {per_token_bin(each_s)}")
    return tuple(counted)


# Rolls canaries back that do worse: one of the routers judges the counts of all, four times a second.

JUDGE_S: Final = 0.25
LEASE_S: Final = 2.0  # after which another router judges in place of one that died
MAX_AT_ONCE: Final = 64  # trials that are judged together, each in about 0.2 ms


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
        trials = await self._counts.read_many([state.canary_id for state in updated]) if updated else []
        share, bad = LoopShare(), []
        for state, trial in zip(updated, trials, strict=True):
            reason = why_worse(trial.arms["stable"], trial.arms["canary"])
            if reason is not None and trial.adapter_id:
                bad.append((state, trial.adapter_id, reason))
            await share.pause()
        ended = await asyncio.gather(
            *(self._roll_back(adapter_id, state.canary_id, reason) for state, adapter_id, reason in bad),
            return_exceptions=True,
        )
        unreported = set()
        for (state, adapter_id, _), end in zip(bad, ended, strict=True):
            if isinstance(end, RegistryUnavailable):
                unreported.add(state)
            elif isinstance(end, Exception):
                _log.error("the canary of %s cannot be judged", adapter_id, exc_info=end)
            elif end is not None:
                raise end
        await self._counts.mark_judged([state for state in updated if state not in unreported])

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
