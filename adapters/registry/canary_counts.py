"""Counts of the answers of canaries and of the versions that they are compared with, of all routers, in Redis.

Each answer counts once, by its id: a router repeats what Redis did not confirm. How much of one sticky key counts is
bounded (`counts_still`), so that no single client decides a trial.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from redis.asyncio import Redis

from ..names import FULL_SIGHT, Sight
from .launches import Lease
from .redis_deadline import answered_within
from .registry_keys import (
    ANSWER_ORDER,
    ANSWERS,
    CANARY_COMMENTS,
    CANARY_COUNTS,
    CANARY_STICKY,
    PREFIX,
    UPDATED_TRIALS,
    bind_script,
)
from .versions.canary_policy import (
    ANSWERS_A_SHARE,
    FIRST_TOKEN_EDGES_S,
    FREE_ANSWERS,
    PER_TOKEN_EDGES_S,
    ArmCounts,
)

Arm = Literal["stable", "canary", "shadow"]
MAX_ANSWERS: Final = 100_000  # of a tenant, that are remembered; the oldest go first
ANSWERS_KEPT_S: Final = 86_400  # how long feedback on one is taken
COUNTS_KEPT_S: Final = 7 * 86_400  # after the last answer
MAX_COMMENTS: Final = 100  # of a canary
_FAILURE_KEPT_S: Final = 600

_ARMS: Final[tuple[Arm, ...]] = ("stable", "canary", "shadow")
_FAILED: Final = PREFIX + "failed:"  # + tenant/name@version: why a gang could not load it; expires
_JUDGE: Final = PREFIX + "canary_judge"  # the router that judges, as a string that expires
_STICKY_BOUND: Final = {
    "free_answers": FREE_ANSWERS,
    "answers_a_share": ANSWERS_A_SHARE,
    "max_sticky_fields": 10_000,  # of a trial's sticky keys; then all of them start over
}


@dataclass(frozen=True, slots=True)
class TrialMember:
    """An answer's part in a trial."""

    canary_id: str
    arm: Arm
    sticky: str  # hash of its sticky key


@dataclass(frozen=True)
class Outcome:
    """What one answer adds to the counts of a trial."""

    tenant_id: str
    adapter_id: str  # tenant/name
    response_id: str
    canary_id: str
    arm: Arm
    counted: tuple[str, ...]  # names of counts, as `ArmCounts` reads them
    sticky: str = ""  # hash of the sticky key; empty: its answers have no bound, and need no judgement


@dataclass(frozen=True)
class UpdatedTrial:
    """A trial with counts that were not judged yet."""

    canary_id: str
    num: int  # answers and thumbs


@dataclass(frozen=True)
class Trial:
    """What was counted in a trial."""

    adapter_id: str  # tenant/name; empty: nothing was counted
    arms: Mapping[Arm, ArmCounts]


class CanaryCounts:
    """Raises RegistryUnavailable when Redis does not answer; every call may be repeated."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client
        self._count_answer = bind_script(client, "count_answer.lua")
        self._rate_answer = bind_script(client, "rate_answer.lua")
        self._judge = Lease(client, _JUDGE)
        self._forget_updates = bind_script(client, "forget_updates.lua")

    async def add(self, outcomes: Sequence[Outcome]) -> None:
        """Counts those answers that have not been counted yet, within the bounds of their sticky keys."""
        now = time.time()
        async with answered_within(), self._client.pipeline(transaction=False) as pipeline:
            for outcome in outcomes:
                await self._count_answer(
                    on=pipeline,
                    answers=ANSWERS + outcome.tenant_id,
                    answer_order=ANSWER_ORDER + outcome.tenant_id,
                    counts=CANARY_COUNTS + outcome.canary_id,
                    sticky=CANARY_STICKY + outcome.canary_id,
                    response_id=outcome.response_id,
                    kept=f"{outcome.canary_id} {outcome.arm} {outcome.sticky}".rstrip(),
                    trial=outcome.canary_id,
                    arm=outcome.arm,
                    sticky_key=outcome.sticky,
                    field=outcome.adapter_id,
                    now=now,
                    max_answers=MAX_ANSWERS,
                    answers_kept_s=ANSWERS_KEPT_S,
                    counts_kept_s=COUNTS_KEPT_S,
                    kinds_and_counts=[part for count in outcome.counted for part in (kind_of(count), count)],
                    **_STICKY_BOUND,
                )
            await pipeline.execute()

    async def rate(
        self, tenant_id: str, response_id: str, *, is_good: bool, comment: str = "", sight: Sight = FULL_SIGHT
    ) -> bool:
        """Counts a thumb for an answer; whether it counted.

        It does not if the tenant has had no such answer in a trial within ANSWERS_KEPT_S, if it is of an adapter that
        the caller does not see, if it was rated before, or if too many thumbs are for answers to the same sticky key.
        """
        async with answered_within():
            answer: str | None = await self._client.hget(ANSWERS + tenant_id, response_id)
            if answer is None or answer.endswith(" rated"):
                return False
            trial, arm, *sticky = answer.split(" ")
            adapter_id: str | None = await self._client.hget(CANARY_COUNTS + trial, "of")
            if adapter_id is not None and not sight.sees(adapter_id.partition("/")[2]):
                return False
            thumb = "up" if is_good else "down"
            counted = await self._rate_answer(
                answers=ANSWERS + tenant_id,
                counts=CANARY_COUNTS + trial,
                comments=CANARY_COMMENTS + trial,
                sticky=CANARY_STICKY + trial,
                response_id=response_id,
                kept=answer,
                trial=trial,
                arm=arm,
                sticky_key="".join(sticky),
                thumb=thumb,
                comment=f"{arm} {thumb}: {comment}" if comment else "",
                max_comments=MAX_COMMENTS,
                counts_kept_s=COUNTS_KEPT_S,
                **_STICKY_BOUND,
            )
        return bool(counted)

    async def read(self, canary_id: str) -> Mapping[Arm, ArmCounts]:
        """The counts of a trial, of both of its versions, or of a shadow."""
        (trial,) = await self.read_many([canary_id])
        return trial.arms

    async def read_many(self, canary_ids: Sequence[str]) -> Sequence[Trial]:
        """The counts of each trial, in one round trip."""
        async with answered_within(), self._client.pipeline(transaction=False) as pipeline:
            for canary_id in canary_ids:
                pipeline.hgetall(CANARY_COUNTS + canary_id)
            all_counts = await pipeline.execute()
        return [Trial(counts.get("of", ""), {arm: _arm(arm, counts) for arm in _ARMS}) for counts in all_counts]

    async def comments(self, canary_id: str) -> list[str]:
        """The comments on its answers, the newest first, each after "arm up: " or "arm down: "."""
        async with answered_within():
            texts: list[str] = await self._client.lrange(CANARY_COMMENTS + canary_id, 0, -1)
        return texts

    async def updated_trials(self, limit: int) -> list[UpdatedTrial]:
        """At most `limit` trials that have new counts, chosen at random."""
        async with answered_within():
            ids_and_numbers = await self._client.hrandfield(UPDATED_TRIALS, limit, withvalues=True)
        return [
            UpdatedTrial(canary_id, int(num))
            for canary_id, num in zip(ids_and_numbers[::2], ids_and_numbers[1::2], strict=True)
        ]

    async def mark_judged(self, trials: Sequence[UpdatedTrial]) -> None:
        """Marks trials as judged, except those with counts since they were read."""
        if trials:
            numbers = [part for trial in trials for part in (trial.canary_id, trial.num)]
            async with answered_within():
                await self._forget_updates(trials_and_numbers=numbers)

    async def hold_judging(self, router_id: str, hold_s: float) -> bool:
        """Makes this router the judge for `hold_s` from now on; 0 ends it. False: another one is."""
        return await self._judge.hold(router_id, hold_s)

    async def note_failures(self, failures: Mapping[tuple[str, str, int], str | None]) -> None:
        """Why gangs could not load versions, by tenant, name and version; None: they can. Forgotten after ten minutes.

        One round trip.
        """
        async with answered_within(), self._client.pipeline(transaction=False) as pipeline:
            for (tenant, name, version), reason in failures.items():
                key = f"{_FAILED}{tenant}/{name}@{version}"
                _ = pipeline.delete(key) if reason is None else pipeline.set(key, reason, ex=_FAILURE_KEPT_S)
            await pipeline.execute()

    async def failures(self, tenant: str, name: str, versions: Sequence[int]) -> dict[int, str]:
        """Why gangs could not load versions lately."""
        async with answered_within():
            reasons = await self._client.mget([f"{_FAILED}{tenant}/{name}@{version}" for version in versions])
        return {version: reason for version, reason in zip(versions, reasons, strict=True) if reason is not None}


def kind_of(count_name: str) -> str:
    """The counts that a sticky key's bound holds for together: answers with failures, and times of either kind."""
    kind, _, is_time = count_name.partition(" ")
    return kind if is_time else "answers"


def _arm(arm: str, counts: Mapping[str, str]) -> ArmCounts:
    def count(count_name: str) -> int:
        return int(counts.get(f"{arm} {count_name}", 0))

    return ArmCounts(
        answers=count("answers"),
        errors=count("errors"),
        refused=count("refused"),
        first_token=tuple(count(f"first_token {place}") for place in range(len(FIRST_TOKEN_EDGES_S) + 1)),
        per_token=tuple(count(f"per_token {place}") for place in range(len(PER_TOKEN_EDGES_S) + 1)),
        thumbs_up=count("up"),
        thumbs_down=count("down"),
        uncounted=count("uncounted"),
    )
