"""What a host tier that is too small keeps of conversations: the share of their prompts that is found, by its size.

Virtual time: the real scheduler, and a stand-in for the worker whose copies end with their step. Conversations continue
one after the other: in turns, at random, or at random while a sixth of the turns begin a new one in place of another.
The pool holds a fifth of them, the tier a part. Copies cost hardly anything, so the time to a first token goes with
the prompt tokens that are computed. Where chance decides, figures are means over several seeds: that of a single one is
off by a quarter. It runs against any checkout that has `FullLayers`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

from motet.workers.plan import MoveEnd, SampledToken, StepPlan, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import FullLayers, GangLimits
from motet.workers.wire.messages import SamplingParams, SequenceRequest

BLOCK_SIZE = 16
NUM_CONVERSATIONS, FIRST_TOKENS = 20, 1600
NUM_ROUNDS, NUM_REQUESTED, NUM_ANSWERED = 6, 40, 56  # turns of each after the first, and tokens of a turn
ORDERS = ("in turns", "at random", "come and go")
SEEDS = range(1, 7)
SIZES = (0.5, 0.75, 0.9, 1.0, 1.2)  # of the tier, over all pages of the conversations at their end
_WORD = 1


def computed_share(
    size: float, order: str, seed: int = 1, window: int | None = None, layers: FullLayers | None = None
) -> float:
    """The tokens of later turns' prompts that are computed, over all of them; what is new in a turn is always.

    `window`: newest tokens that layers see, but for those of `layers`.
    """
    rng = random.Random(seed)
    num_pages_each = -(-(FIRST_TOKENS + NUM_ROUNDS * (NUM_REQUESTED + NUM_ANSWERED)) // BLOCK_SIZE)
    num_pages = NUM_CONVERSATIONS * num_pages_each
    limits = GangLimits(1 << 14, 1 << 16, BLOCK_SIZE, num_pages // 5, 512, 8, window, layers)
    scheduler = Scheduler(limits, frozenset(), lambda _: 0, tiers=TierSizes(int(size * num_pages)))
    histories = [_words(rng, FIRST_TOKENS) for _ in range(NUM_CONVERSATIONS)]
    for number, history in enumerate(histories):
        _answer(scheduler, number, history)
    num_computed = num_prompt = 0
    for turn in range(NUM_ROUNDS * NUM_CONVERSATIONS):
        number = turn % NUM_CONVERSATIONS if order == "in turns" else rng.randrange(NUM_CONVERSATIONS)
        if order == "come and go" and rng.random() < 1 / NUM_ROUNDS:
            histories[number] = _words(rng, FIRST_TOKENS)
            _answer(scheduler, number, histories[number])
            continue
        histories[number] += _words(rng, NUM_REQUESTED)
        num_prompt += len(histories[number])
        num_computed += _answer(scheduler, number, histories[number]) - (NUM_ANSWERED - 1)
    return num_computed / num_prompt


def _answer(scheduler: Scheduler, number: int, history: list[int]) -> int:
    """Runs a turn to its end and adds the answer to the conversation. Returns the tokens computed."""
    before = scheduler.load().counters.num_computed_tokens
    sampling = SamplingParams(max_tokens=NUM_ANSWERED, ignore_eos=True)
    request = SequenceRequest(sequence_id=number, prompt_token_ids=[*history], sampling=sampling, tenant="t")
    assert scheduler.add(request, 0) is None
    while scheduler.has_work():
        plan = scheduler.schedule()
        result = _result(plan)
        scheduler.observe(plan, 1.0)
        for update in scheduler.commit(plan, result):
            history += update.token_ids
    return scheduler.load().counters.num_computed_tokens - before


def _words(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(3, 1 << 16) for _ in range(number)]


def _result(plan: StepPlan) -> StepResult:
    tokens: dict[int, SampledToken | None] = {
        part.sequence_id: SampledToken(_WORD, None) for part in plan.sequences if part.sample is not None
    }
    return StepResult(plan.step, tokens, (), (), tuple(MoveEnd(move.number, 0.0, None) for move in plan.moves))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--window", type=int, help="newest tokens that layers see (default: all layers see all)")
    parser.add_argument("--full-every", type=int, help="with a window, this many layers a layer that sees all")
    arguments = parser.parse_args()
    layers = None
    if arguments.full_every is not None:
        layers = FullLayers(2, 2 * arguments.full_every)
    sizes = SIZES if arguments.window is None else (0.0, *SIZES)
    print("share of prompt tokens computed, by the size of the tier over that of the conversations")
    print(f"{'order':11}" + "".join(f"{size:>7}" for size in sizes))
    summary: dict[str, object] = {"benchmark": "host_tier"}
    for name in ORDERS:
        seeds = SEEDS if name != "in turns" else SEEDS[:1]
        shares = [
            statistics.mean(computed_share(size, name, seed, arguments.window, layers) for seed in seeds)
            for size in sizes
        ]
        print(f"{name:11}" + "".join(f"{share:7.3f}" for share in shares), flush=True)
        summary[name.replace(" ", "_")] = {
            str(size): round(share, 3) for size, share in zip(sizes, shares, strict=True)
        }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
