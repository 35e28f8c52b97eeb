"""Counts of the answers of canaries and of the versions that they are compared with, of all routers, in Redis.

Each answer counts once, by its id: a router repeats what Redis did not confirm. How much of one sticky key counts is
bounded (`counts_still`), so that no single client decides a trial.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
)
from .store import Command, Snapshot, Store, Transaction, Write
from .versions.canary_policy import (
    FIRST_TOKEN_EDGES_S,
    PER_TOKEN_EDGES_S,
    ArmCounts,
    counts_still,
)

Arm = Literal["stable", "canary", "shadow"]
MAX_ANSWERS: Final = 100_000  # of a tenant, that are remembered; the oldest go first
ANSWERS_KEPT_S: Final = 86_400  # how long feedback on one is taken
COUNTS_KEPT_S: Final = 7 * 86_400  # after the last answer
MAX_COMMENTS: Final = 100  # of a canary
_FAILURE_KEPT_S: Final = 600
_PAGE: Final = 100  # answers that are counted at once: a few milliseconds of Redis's time

_ARMS: Final[tuple[Arm, ...]] = ("stable", "canary", "shadow")
_FAILED: Final = PREFIX + "failed:"  # + tenant/name@version: why a gang could not load it; expires
_JUDGE: Final = PREFIX + "canary_judge"  # the router that judges, as a string that expires
MAX_STICKY_FIELDS: Final = 10_000  # of a trial's sticky keys; then all of them start over


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
        self._store = Store(client)
        self._judge = Lease(client, _JUDGE)

    async def add(self, outcomes: Sequence[Outcome]) -> None:
        """Counts those answers that have not been counted yet, within the bounds of their sticky keys."""
        now = time.time()
        for start in range(0, len(outcomes), _PAGE):
            page = outcomes[start : start + _PAGE]
            rows = [row for outcome in page for row in _rows_of(outcome)]
            await self._store.change(partial(_addition, page, now), [*dict.fromkeys(rows)])

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
        thumb, sticky_key = "up" if is_good else "down", "".join(sticky)
        row = ("HGET", ANSWERS + tenant_id, response_id)

        def rating(rows: Snapshot) -> Transaction:
            if rows[row] != answer:
                return Transaction(value=False)
            counting = _Counting(rows)
            counting.writes.append(("HSET", ANSWERS + tenant_id, response_id, f"{answer} rated"))
            counted = counting.admits(trial, arm, "thumbs", sticky_key)
            if counted:
                counting.add(trial, f"{arm} {thumb}")
                if sticky_key:
                    counting.writes.append(("HINCRBY", UPDATED_TRIALS, trial, 1))
                if comment:
                    comments = CANARY_COMMENTS + trial
                    counting.writes.append(("LPUSH", comments, f"{arm} {thumb}: {comment}"))
                    counting.writes.append(("LTRIM", comments, 0, MAX_COMMENTS - 1))
                    counting.writes.append(("EXPIRE", comments, COUNTS_KEPT_S))
            return counting.change(counted)

        rated = await self._store.change(rating, [row, *_sticky_rows(trial, arm, ("thumbs",), sticky_key)])
        return bool(rated.value)

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
        rows: list[Command] = [("HGET", UPDATED_TRIALS, trial.canary_id) for trial in trials]

        def removal(read: Snapshot) -> Transaction:
            judged = (trial.canary_id for row, trial in zip(rows, trials, strict=True) if read[row] == str(trial.num))
            return Transaction(writes=[("HDEL", UPDATED_TRIALS, canary_id) for canary_id in judged])

        await self._store.change(removal, rows)

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


def _sticky_rows(trial: str, arm: str, kinds: Iterable[str], sticky_key: str) -> list[Command]:
    """What `_Counting.admits` reads."""
    if not sticky_key:
        return []
    sticky = CANARY_STICKY + trial
    fields = [f"{arm} {kind}{end}" for kind in kinds for end in ("", f" {sticky_key}")]
    return [("HLEN", sticky), *(("HGET", sticky, field) for field in fields)]


def _rows_of(outcome: Outcome) -> list[Command]:
    """What counting the outcome reads."""
    return [
        ("HGET", ANSWERS + outcome.tenant_id, outcome.response_id),
        *_order_rows(outcome.tenant_id),
        *_sticky_rows(outcome.canary_id, outcome.arm, map(kind_of, outcome.counted), outcome.sticky),
    ]


def _order_rows(tenant_id: str) -> list[Command]:
    """How many answers are remembered, and those that make room for others."""
    return [("ZCARD", ANSWER_ORDER + tenant_id), ("ZRANGE", ANSWER_ORDER + tenant_id, 0, _PAGE - 1)]


def _addition(outcomes: Sequence[Outcome], now: float, rows: Snapshot) -> Transaction:
    counting = _Counting(rows)
    for outcome in outcomes:
        counting.add_answer(outcome, now)
    counting.forget_answers({outcome.tenant_id for outcome in outcomes})
    return counting.change()


class _Counting:
    """What a change counts in trials, within the bounds of sticky keys.

    What has counted for each sticky key is compared, for all keys of a trial only read: routers that count answers of
    the same trial do not conflict, and a bound is no higher than it should be.
    """

    def __init__(self, rows: Snapshot) -> None:
        self.writes: list[Write] = []
        self.seconds_kept: dict[str, int] = {}  # by key
        self._rows = rows
        self._new_ids: defaultdict[str, set[str]] = defaultdict(set)  # of answers, by key
        self._counts: Counter[tuple[str, str]] = Counter()  # by trial and name
        self._sticky: dict[str, dict[str, int]] = {}  # by trial and field, as far as they were read or have changed
        self._num_fields: dict[str, int] = {}  # of a trial's sticky keys
        self._restarted: set[str] = set()  # trials whose sticky keys start over

    def add_answer(self, outcome: Outcome, now: float) -> None:
        """Counts an answer that was not counted yet."""
        trial, arm, answers = outcome.canary_id, outcome.arm, ANSWERS + outcome.tenant_id
        row = ("HGET", answers, outcome.response_id)
        if outcome.response_id in self._new_ids[answers] or self._rows[row] is not None:
            return
        self._new_ids[answers].add(outcome.response_id)
        note = f"{trial} {arm} {outcome.sticky}".rstrip()
        self.writes.append(("HSET", answers, outcome.response_id, note))
        self.writes.append(("ZADD", ANSWER_ORDER + outcome.tenant_id, now, outcome.response_id))
        self.writes.append(("HSET", CANARY_COUNTS + trial, "of", outcome.adapter_id))
        kinds = dict.fromkeys(map(kind_of, outcome.counted))
        admitted = {kind: self.admits(trial, arm, kind, outcome.sticky) for kind in kinds}
        for name in outcome.counted:
            if admitted[kind_of(name)]:
                self.add(trial, f"{arm} {name}")
        if not admitted.get("answers", True):
            self.add(trial, f"{arm} uncounted")
        if outcome.sticky:
            self.writes.append(("HINCRBY", UPDATED_TRIALS, trial, 1))
        self.seconds_kept[answers] = self.seconds_kept[ANSWER_ORDER + outcome.tenant_id] = ANSWERS_KEPT_S

    def forget_answers(self, tenant_ids: Iterable[str]) -> None:
        """Makes room for the new answers: the oldest go first."""
        for tenant_id in tenant_ids:
            answers, order = ANSWERS + tenant_id, ANSWER_ORDER + tenant_id
            num_answers, oldest = map(self._rows.peek, _order_rows(tenant_id))
            num_over = num_answers + len(self._new_ids[answers]) - MAX_ANSWERS
            if num_over > 0 and oldest:
                oldest = oldest[:num_over]
                self.writes += [("HDEL", answers, *oldest), ("ZREM", order, *oldest)]

    def admits(self, trial: str, arm: str, kind: str, sticky_key: str) -> bool:
        """Whether one more counts for this sticky key, as `counts_still` says; then it is counted for it."""
        if not sticky_key:
            return True
        key, all_field = CANARY_STICKY + trial, f"{arm} {kind}"
        own_field = f"{all_field} {sticky_key}"
        counts = self._sticky.setdefault(trial, {})
        for field, read in ((own_field, self._rows.__getitem__), (all_field, self._rows.peek)):
            if field not in counts:
                counts[field] = 0 if trial in self._restarted else int(read(("HGET", key, field)) or 0)
        if not counts_still(counts[own_field], counts[all_field]):
            return False
        num_fields = self._num_fields.get(trial, self._rows.peek(("HLEN", key)))
        if num_fields >= MAX_STICKY_FIELDS:
            self.writes.append(("UNLINK", key))
            self._restarted.add(trial)
            num_fields, self._sticky[trial] = 0, {own_field: 0, all_field: 0}
            counts = self._sticky[trial]
        for field in (own_field, all_field):
            num_fields += not counts[field]
            counts[field] += 1
            self.writes.append(("HINCRBY", key, field, 1))
        self._num_fields[trial] = num_fields
        self.seconds_kept[key] = ANSWERS_KEPT_S
        return True

    def add(self, trial: str, name: str) -> None:
        self._counts[trial, name] += 1
        self.seconds_kept[CANARY_COUNTS + trial] = COUNTS_KEPT_S

    def change(self, value: bool = True) -> Transaction:
        counts = [("HINCRBY", CANARY_COUNTS + trial, name, num) for (trial, name), num in self._counts.items()]
        expiries = [("EXPIRE", key, seconds) for key, seconds in self.seconds_kept.items()]
        return Transaction(value=value, when_full=False, writes=[*self.writes, *counts, *expiries])


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
