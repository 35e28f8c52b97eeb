"""Each token that a gang computes is charged, or counted as computed again, whatever ends or interrupts runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.scheduler_rig import asking, limits, quick_result
from motet.tests.rigs.stand_in_engine import INFO
from motet.workers.decoding.constraints import Constraints
from motet.workers.engine import Engine
from motet.workers.plan import SampledToken, StepPlan, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import Cancel, SamplingParams, SequenceRequest, SequenceUsage, TokenLogprobs


class LateMasks:
    """Of the gang's `Constraints`, what a scheduler uses: masks that were late are ready by chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._ids, self._compiled = rng, set[int](), list[int]()
        self.wake = None

    @property
    def num(self) -> int:
        return len(self._ids)

    def add(self, sequence_id: int, tenant: str, grammar: str, token_ids: Sequence[int], ignores_eos: bool) -> None:
        self._ids.add(sequence_id)
        self._compiled.append(sequence_id)

    def take_ended(self) -> Iterator[tuple[int, None]]:
        compiled, self._compiled = self._compiled, []
        return iter([(sequence_id, None) for sequence_id in compiled if sequence_id in self._ids])

    def remove(self, sequence_id: int) -> None:
        self._ids.discard(sequence_id)

    def is_ready(self, sequence_id: int) -> bool:
        return self._rng.random() < 0.5

    def check_integrity(self, ids: Sequence[int]) -> None:
        assert self._ids == {*ids}


class CountingExecutor:
    """Computes nothing, and counts what each sequence's rows would have cost. Masks are late by chance."""

    def __init__(self, rng: random.Random, *, feeds_tokens: bool) -> None:
        self._rng, self.feeds_tokens = rng, feeds_tokens
        self._plans: list[StepPlan] = []
        self.num_computed: Counter[int] = Counter()  # by sequence; beams but the root count for -1

    def begin(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        for part in plan.sequences:
            self.num_computed[max(part.sequence_id, -1)] += len(part.token_ids)

    def finish(self) -> StepResult:
        plan = self._plans.pop(0)
        tokens = dict[int, SampledToken | None]()
        for part in plan.sequences:
            if part.sample is None or (part.sample.is_constrained and self._rng.random() < 0.3):
                continue
            num_top = part.sample.params.num_logprobs
            ranked = [*range(10, 10 + (num_top or 0))]
            logprobs = None if num_top is None else TokenLogprobs(-1.0, ranked, [-0.5 - place for place in ranked])
            tokens[part.sequence_id] = SampledToken(self._rng.choice([7, 7, 7, 99]), logprobs)
        loaded = tuple(load.residence.digest for load in plan.loads)
        return msgspec.structs.replace(quick_result(plan), tokens=tokens, loaded=loaded)

    def wake_on_copy_end(self, wake: object) -> None: ...

    def close(self) -> None: ...


class Law:
    """A gang, the last usage of each of its sequences, and what it has computed for them."""

    def __init__(self, rng: random.Random, *, feeds_tokens: bool = False) -> None:
        of = limits(rng.randint(14, 40), rng.randint(4, 16), rng.randint(2, 6), num_state_pages=rng.choice([0, 0, 2]))
        masks = cast(Any, LateMasks(rng))
        self.scheduler = Scheduler(
            of,
            frozenset({99}),
            lambda ref: max(ref.module_ranks.values()),
            constraints=None if feeds_tokens else cast(Constraints, masks),
        )
        self.executor = CountingExecutor(rng, feeds_tokens=feeds_tokens)
        self.engine = Engine(self.scheduler, self.executor, INFO, overlaps=feeds_tokens or rng.random() < 0.7)
        self.requests: dict[int, SequenceRequest] = {}
        self.usage: dict[int, SequenceUsage] = {}
        self.ended: set[int] = set()

    def add(self, **more: Any) -> None:
        number = len(self.requests) + 1
        request = msgspec.structs.replace(asking(number, [3]), **more)
        if self.scheduler.add(request, 1) is None:
            self.requests[number] = request

    def step(self) -> None:
        for update in self.engine.step():
            if update.usage is not None:
                self.usage[update.sequence_id] = update.usage
            if update.finish_reason or update.error:
                self.ended.add(update.sequence_id)
        self.scheduler.check_integrity()

    def check(self) -> None:
        assert self.ended == self.requests.keys()
        num_again = num_beam_tokens = 0
        for number, request in self.requests.items():
            usage, before = self.usage[number], request.usage or SequenceUsage()
            again = usage.num_recomputed_tokens - before.num_recomputed_tokens
            charged = charged_tokens(usage) - charged_tokens(before)
            num_again += again
            if request.beams is None:
                assert self.executor.num_computed[number] == charged + again, (request, usage)
            else:
                num_beam_tokens += charged + again
        beams = [number for number, request in self.requests.items() if request.beams is not None]
        assert num_beam_tokens == sum(self.executor.num_computed[number] for number in (-1, *beams))
        counters = self.scheduler.load().counters
        assert counters.num_computed_tokens == self.executor.num_computed.total()
        assert counters.num_recomputed_tokens == num_again


def charged_tokens(usage: SequenceUsage) -> int:
    """Computed positions: the newest generated token is not computed."""
    return usage.num_computed_prompt_tokens + max(0, usage.num_generated_tokens - 1)


@pytest.mark.parametrize("feeds_tokens", [False, True])
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_what_is_computed_is_charged_or_counted_as_computed_again(seed: int, feeds_tokens: bool) -> None:
    """Preemptions, late masks, cancels, searches, scores, embeddings, and sequences that come from another gang."""
    rng = random.Random(seed)
    gang = Law(rng, feeds_tokens=feeds_tokens)
    for _ in range(rng.randint(1, 50)):
        gang.add(**requested(rng, may_search=not feeds_tokens, may_have_grammar=not feeds_tokens))
        for _ in range(rng.randint(0, 3)):
            gang.step()
        live = [*gang.requests.keys() - gang.ended]
        if live and rng.random() < 0.1:
            gang.engine.receive(Cancel(rng.choice(live)))
    for _ in range(4000):
        if not gang.engine.has_work():
            break
        gang.step()
    gang.check()


def requested(rng: random.Random, *, may_search: bool, may_have_grammar: bool) -> dict[str, Any]:
    tenant, max_tokens = rng.choice("abcdef"), rng.randint(1, 20)
    # Few share prefixes, so that what was computed is not found again.
    prompt = [rng.randrange(90) for _ in range(rng.randint(1, 24))]
    more: dict[str, Any] = {"tenant": tenant, "prompt_token_ids": prompt, "weight": 1.0 + ord(tenant) % 3}
    more["sampling"] = rng.choice(
        [
            SamplingParams(max_tokens=max_tokens),
            SamplingParams(max_tokens=max_tokens, grammar="g" if may_have_grammar else ""),
            SamplingParams(max_tokens=rng.choice([0, max_tokens]), num_prompt_logprobs=1),
            SamplingParams(max_tokens=0, pooling="mean"),
        ]
    )
    kind = rng.random()
    if kind < 0.15 and may_search:
        rules = BeamRules(rng.randint(1, 3), max_tokens, frozenset())
        more |= {"beams": rules, "sampling": SamplingParams(max_tokens=max_tokens)}
    elif kind < 0.3:  # another gang has generated more than its client has had
        num_had, num_generated = sorted(rng.randint(1, max_tokens) for _ in range(2))
        before = SequenceUsage(
            num_computed_prompt_tokens=len(prompt), num_generated_tokens=num_generated, num_recomputed_tokens=2
        )
        more |= {"usage": before, "generated_token_ids": [7] * num_had, "sampling": SamplingParams(max_tokens=30)}
    return more
