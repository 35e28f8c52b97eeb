"""What a full pool costs a real engine: tokens computed over tokens needed, preemptions and tokens a second of CPU.

48 requests come at once, to a pool of 200 pages without tiers behind it: room for about a third of them. Each answer
ends at a length that the scheduler does not know: the model's token there is replaced by the end of text. With
`--before` another checkout serves the same requests, in turn with this one, each run in a process of its own.
`most_gain` bounds what any reserve could gain: by the times of the steps, what it would be if no token were computed
again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.workers.plan import SampledToken, StepResult
from motet.workers.wire.messages import SamplingParams

NUM_REQUESTS, NUM_PAGES, BLOCK_SIZE = 48, 200, 16
MODEL = Path(__file__).parents[2] / "examples" / "demo" / "base"
PROMPT, ANSWER = (80, 60), (120, 90)  # mean and standard deviation in tokens, lognormal
MAX_TOKENS = 250  # of a prompt, and of an answer
_END = 3  # a token that the model never chooses: it pads


@dataclass(frozen=True)
class Outcome:
    computed_over_needed: float  # tokens
    num_preemptions: int
    tokens_per_cpu_s: float  # of answers
    most_gain: float  # times as many of these, if what is computed again took no time


def serve(model: Path, seed: int) -> Outcome:
    """Serves the requests in this process, after others that compile kernels and teach it how long answers are."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        stock = Stock.make(model, {}, Path(folder), BLOCK_SIZE, "bfloat16")
        with stock.engine(NUM_PAGES, kv_host_bytes=0) as rig:
            _run(rig, seed + 1000)
            return _run(rig, seed)


def _run(rig: EngineRig, seed: int) -> Outcome:
    rng = random.Random(seed)
    lengths = [(_lognormal(rng, *PROMPT), _lognormal(rng, *ANSWER)) for _ in range(NUM_REQUESTS)]
    left = {number: answer for number, (_, answer) in enumerate(lengths)}
    engine = rig.engine
    finish = engine.executor.finish

    def finish_in_time() -> StepResult:
        result = finish()
        for number in result.tokens:
            left[number] -= 1
            if not left[number]:
                result.tokens[number] = SampledToken(_END, None)
        return result

    engine.executor.finish = finish_in_time  # type: ignore[method-assign]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(_END,), max_tokens=MAX_TOKENS)
    before, steps = engine.load().counters, list[tuple[float, int, int]]()
    for number, (num_prompt, _) in enumerate(lengths):
        prompt = [rng.randrange(4, 500) for _ in range(num_prompt)]
        rig.submit(number, prompt, None, sampling)
    began_at, earlier = time.process_time(), before
    while engine.has_work():
        step_at = time.process_time()
        engine.step()
        after = engine.load().counters
        num_generated = after.num_generated_tokens - earlier.num_generated_tokens
        num_others = after.num_computed_tokens - earlier.num_computed_tokens - num_generated
        steps.append((time.process_time() - step_at, num_generated, num_others))
        earlier = after
    seconds, after = time.process_time() - began_at, engine.load().counters
    engine.executor.finish = finish  # type: ignore[method-assign]
    num_needed = sum(prompt + answer - 1 for prompt, answer in lengths)
    num_computed = after.num_computed_tokens - before.num_computed_tokens
    again_s = (num_computed - num_needed) * _prompt_token_s(steps)
    return Outcome(
        num_computed / num_needed,
        after.num_preemptions - before.num_preemptions,
        (after.num_generated_tokens - before.num_generated_tokens) / seconds,
        seconds / (seconds - again_s),
    )


def _prompt_token_s(steps: list[tuple[float, int, int]]) -> float:
    """Least squares: what a prompt token adds to a step. `steps`: seconds, tokens generated, and other tokens."""
    rows = np.array(steps)
    return float(np.linalg.lstsq(np.column_stack((rows[:, 1:], np.ones(len(rows)))), rows[:, 0], rcond=None)[0][1])


def _lognormal(rng: random.Random, mean: float, deviation: float) -> int:
    sigma2 = math.log(1 + (deviation / mean) ** 2)
    return max(2, min(MAX_TOKENS - 1, round(rng.lognormvariate(math.log(mean) - sigma2 / 2, math.sqrt(sigma2)))))


def _serve_apart(checkout: Path, model: Path, seed: int) -> Outcome:
    """The same in a process that imports `motet` from a checkout."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        (Path(folder) / "motet").symlink_to(checkout.resolve())
        command = [sys.executable, __file__, "--here", "--model", str(model), "--seed", str(seed)]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a base (default: the demo's)")
    parser.add_argument("--rounds", type=int, default=5, help="of both in turn (default 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="one run in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(asdict(serve(arguments.model, arguments.seed))))
        return
    checkouts = {"now": Path(__file__).parents[2]} | ({"before": arguments.before} if arguments.before else {})
    outcomes: dict[str, list[Outcome]] = {name: [] for name in checkouts}
    for number in range(arguments.rounds):
        for name, checkout in checkouts.items():
            outcomes[name].append(_serve_apart(checkout, arguments.model, arguments.seed + number))
            print(f"{name:7} {outcomes[name][-1]}", flush=True)
    summary: dict[str, object] = {"benchmark": "page_reserve_engine"}
    for name, found in outcomes.items():
        summary[f"computed_over_needed_{name}"] = round(statistics.mean(o.computed_over_needed for o in found), 3)
        summary[f"preemptions_{name}"] = round(statistics.mean(o.num_preemptions for o in found), 1)
        summary[f"most_gain_{name}"] = round(statistics.median(o.most_gain for o in found), 3)
    if arguments.before:
        pairs = zip(outcomes["now"], outcomes["before"], strict=True)
        summary["speed_over_before"] = round(
            statistics.median(now.tokens_per_cpu_s / old.tokens_per_cpu_s for now, old in pairs), 3
        )
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
