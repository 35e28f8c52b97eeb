"""What a full pool costs: tokens computed over tokens needed, preemptions and steps, for three length distributions.

Virtual time: the real scheduler, and a stand-in for the worker that ends each answer at a length that the scheduler
does not know. All requests wait from the beginning, for a pool of about 192 of them, without tiers behind it; a run is
over when the last one has started, so the pool is full all the time.

Lengths are lognormal. Their means and standard deviations in tokens, of prompts and of answers, are
- ShareGPT: 246 and 547, 322 and 244; LMSYS: 102 and 169, 222 and 210 (NanoFlow, arXiv 2408.12757, table 4);
- Alpaca: 19 and 14, 58 and 50 (the means are of vLLM's paper, arXiv 2309.06180; the deviations are assumed).

It runs against any checkout: `motet` is what is imported by that name.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

from motet.workers.plan import SampledToken, StepPlan, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import SamplingParams, SequenceRequest

BLOCK_SIZE = 16
MAX_TOKENS_PER_STEP = 512
MAX_MODEL_LEN = 8192
NUM_SEQUENCES = 2000
NUM_SIDE_BY_SIDE = 192  # sequences of mean length that the pool holds when each has half of its answer
_EOS, _WORD = 1, 2


@dataclass(frozen=True)
class Lengths:
    """Means and standard deviations, in tokens."""

    prompt: tuple[float, float]
    answer: tuple[float, float]

    def draw(self, number: int, seed: int) -> list[tuple[int, int]]:
        """Lengths of the prompts and answers of so many requests."""
        rng = random.Random(seed)
        return [(_lognormal(rng, *self.prompt), _lognormal(rng, *self.answer)) for _ in range(number)]


LENGTHS = {
    "ShareGPT": Lengths((246, 547), (322, 244)),
    "LMSYS": Lengths((102, 169), (222, 210)),
    "Alpaca": Lengths((19, 14), (58, 50)),
}


@dataclass(frozen=True)
class Outcome:
    computed_over_needed: float  # tokens
    num_preemptions: int
    preempted_share: float  # of the sequences, those preempted at least once
    steps_per_1000_tokens: float  # of answers


def run(
    lengths: Lengths,
    num_sequences: int = NUM_SEQUENCES,
    num_side_by_side: int = NUM_SIDE_BY_SIDE,
    seed: int = 1,
    prepare: Callable[[Scheduler], None] = lambda scheduler: None,
) -> Outcome:
    """Serves so many requests until none waits. `prepare`: changes the scheduler first."""
    requests = lengths.draw(num_sequences, seed)
    mean_tokens = sum(prompt + answer / 2 for prompt, answer in requests) / num_sequences
    num_pages = int(num_side_by_side * (mean_tokens / BLOCK_SIZE + 0.5))
    num_pages = max(num_pages, *(-(-sum(request) // BLOCK_SIZE) for request in requests))
    limits = GangLimits(MAX_MODEL_LEN, 1 << 16, BLOCK_SIZE, num_pages, MAX_TOKENS_PER_STEP, 4 * num_side_by_side)
    scheduler = Scheduler(limits, frozenset({_EOS}), lambda _: 0)
    prepare(scheduler)
    for number, (num_prompt, _) in enumerate(requests):
        prompt = [3 + number, *[_WORD] * (num_prompt - 1)]
        request = SequenceRequest(
            sequence_id=number, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=None), tenant="t"
        )
        assert scheduler.add(request, 0) is None
    word, end = SampledToken(_WORD, None), SampledToken(_EOS, None)
    most_computed, preempted = [0] * num_sequences, set[int]()  # tokens, by sequence
    load = scheduler.load()
    while load.gauges.num_waiting:
        plan = scheduler.schedule()
        for part in plan.sequences:
            if part.start < most_computed[part.sequence_id]:
                preempted.add(part.sequence_id)
            most_computed[part.sequence_id] = max(most_computed[part.sequence_id], part.start + len(part.token_ids))
        scheduler.commit(plan, _result(plan, requests, word, end))
        load = scheduler.load()
    counters = load.counters
    return Outcome(
        counters.num_computed_tokens / sum(most_computed),
        counters.num_preemptions,
        len(preempted) / num_sequences,
        1000 * counters.num_steps / counters.num_generated_tokens,
    )


def _result(plan: StepPlan, requests: list[tuple[int, int]], word: SampledToken, end: SampledToken) -> StepResult:
    tokens: dict[int, SampledToken | None] = {}
    for part in plan.sequences:
        if part.sample is not None:
            is_last = part.sample.index + 1 == requests[part.sequence_id][1]
            tokens[part.sequence_id] = end if is_last else word
    return StepResult(plan.step, tokens, (), ())


def _lognormal(rng: random.Random, mean: float, deviation: float) -> int:
    sigma2 = math.log(1 + (deviation / mean) ** 2)
    drawn = rng.lognormvariate(math.log(mean) - sigma2 / 2, math.sqrt(sigma2))
    return max(1, min(MAX_MODEL_LEN // 2 - 1, round(drawn)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=NUM_SEQUENCES, help=f"of each (default {NUM_SEQUENCES})")
    parser.add_argument("--side-by-side", type=int, default=NUM_SIDE_BY_SIDE, help="that the pool holds (default 192)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    outcomes = {
        name: run(lengths, arguments.sequences, arguments.side_by_side, arguments.seed)
        for name, lengths in LENGTHS.items()
    }
    print(f"{'lengths':10} {'computed/needed':>15} {'preemptions':>11} {'preempted':>9} {'steps/1000 tokens':>17}")
    for name, outcome in outcomes.items():
        print(
            f"{name:10} {outcome.computed_over_needed:15.3f} {outcome.num_preemptions:11} "
            f"{outcome.preempted_share:9.1%} {outcome.steps_per_1000_tokens:17.2f}"
        )
    print(json.dumps({"benchmark": "page_reserve", **{name: asdict(outcome) for name, outcome in outcomes.items()}}))


if __name__ == "__main__":
    main()
