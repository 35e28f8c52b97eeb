"""The accountant of canaries: it tells Redis how the answers of a name on trial have ended, some of them at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ...adapters.adapter import AdapterVersion
from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.canary_counts import Arm, CanaryCounts, Outcome
from ...adapters.registry.registry_view import RegistryView
from ...adapters.versions.canary_policy import first_token_bin, per_token_bin
from ...adapters.versions.rollout import rollout_of
from ..accounts.account import Account, Asked, Ending

FLUSH_S: Final = 0.2  # what a router that is killed loses
MAX_PENDING: Final = 20_000  # answers, while Redis is away; the oldest are lost
_MAX_BATCH: Final = 500
_MAX_FAILED: Final = 1_000  # versions whose failure this router remembers having told
_MAX_REASON_CHARS: Final = 300
_ERRORS: Final = frozenset({"internal_error"})  # a timeout is the client's own: he could say one that never suffices
_REFUSED: Final = "adapter_failed"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Failure:
    tenant: str
    name: str
    version: int
    reason: str | None  # None: it can be loaded again


class CanaryBook:
    """Owned by one event loop. `counts`: where all routers count."""

    def __init__(self, view: RegistryView, counts: CanaryCounts) -> None:
        self._view, self.counts = view, counts
        self._pending: deque[Outcome] = deque(maxlen=MAX_PENDING)
        self._failures: deque[_Failure] = deque(maxlen=_MAX_FAILED)
        self._failed: dict[tuple[str, str, int], None] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._flush_forever(), name="canary book")

    async def stop(self) -> None:
        """Tells Redis what is not told yet, if it answers."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        with suppress(RegistryUnavailable):
            await self.flush()

    async def open(self, asked: Asked) -> Account:
        version = asked.version
        trial = None if version is None else await self._trial(asked, version)
        return _Line(self, asked, *(trial or (None, "stable")))

    def note(self, asked: Asked, canary_id: str | None, arm: Arm, ending: Ending) -> None:
        """Takes in how an answer has ended. `canary_id`: of the trial that it counts in; None: of none."""
        version = asked.version
        counted = counted_of(ending, is_resumed=asked.is_resumed)
        if version is None or not counted:
            return
        place = (version.tenant, version.name, version.version)
        if ending.error == _REFUSED:
            self.note_load(version, ending.reason)
        elif place in self._failed and not ending.error:
            self.note_load(version, None)
        if canary_id is not None:
            self.count(Outcome(version.tenant, asked.response_id, canary_id, arm, counted))

    def note_load(self, version: AdapterVersion, reason: str | None) -> None:
        """A gang could not load the version, for this reason; None: one could. Redis is told soon."""
        place = (version.tenant, version.name, version.version)
        if reason is None:
            self._failed.pop(place, None)
        elif len(self._failed) < _MAX_FAILED:
            self._failed[place] = None
        self._failures.append(_Failure(*place, None if reason is None else reason[:_MAX_REASON_CHARS]))

    def count(self, outcome: Outcome) -> None:
        """It is counted soon, unless nothing of it counts."""
        if outcome.counted:
            self._pending.append(outcome)

    async def flush(self) -> None:
        """Raises RegistryUnavailable, and then keeps what is not known to be counted."""
        while self._pending:
            batch = [self._pending[place] for place in range(min(len(self._pending), _MAX_BATCH))]
            await self.counts.add(batch)
            for one in batch:  # what was dropped meanwhile for lack of room is not there to be removed
                if self._pending and self._pending[0] is one:
                    self._pending.popleft()
        while self._failures:
            failure = self._failures[0]
            await self.counts.note_failure(failure.tenant, failure.name, failure.version, failure.reason)
            if self._failures and self._failures[0] is failure:
                self._failures.popleft()

    async def _flush_forever(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # asked here, because the Redis client may swallow the exception of `stop`
            try:
                await self.flush()
            except RegistryUnavailable:
                pass  # the view says so in the log
            except Exception:
                _log.exception("answers of canaries cannot be counted")
            await asyncio.sleep(FLUSH_S)

    async def _trial(self, asked: Asked, version: AdapterVersion) -> tuple[str, Arm] | None:
        """The trial that an answer belongs to, and for which of the two versions it speaks."""
        if "@" in asked.model:
            return None
        try:
            current = await self._view.resolve(version.tenant, version.name)
        except RegistryUnavailable:
            return None
        canary = None if current is None or not current.rollout else rollout_of(current).canary
        if current is None or canary is None:
            return None
        if version.version == canary.version:
            return canary.id, "canary"
        return (canary.id, "stable") if version.version == current.version else None


class _Line:
    headers: Sequence[tuple[bytes, bytes]] = ()

    def __init__(self, book: CanaryBook, asked: Asked, canary_id: str | None, arm: Arm) -> None:
        self._book, self._asked, self._canary_id, self._arm = book, asked, canary_id, arm

    def settle(self, ending: Ending) -> None:
        self._book.note(self._asked, self._canary_id, self._arm, ending)


def counted_of(ending: Ending, *, is_resumed: bool = False) -> tuple[str, ...]:
    """What an answer counts as. Nothing, if its client has left, or for what no version is to blame for."""
    if ending.error == _REFUSED:
        return ("answers", "refused")
    if ending.error in _ERRORS:
        return ("answers", "errors")
    if ending.error or ending.is_cancelled:
        return ()
    counted = ["answers"]
    if ending.first_token_s is not None and not is_resumed:
        counted.append(f"first_token {first_token_bin(ending.first_token_s)}")
        num_later = ending.progress.num_completion_tokens - 1
        if num_later > 0:
            each_s = max(0.0, ending.duration_s - ending.first_token_s) / num_later
            counted.append(f"per_token {per_token_bin(each_s)}")
    return tuple(counted)
