"""NanoFlow (arXiv 2408.12757 §6.2, 6.3): how many requests a second a gang serves within 200 ms for each token.

Llama-2-70B on eight A100 80GB: motet's scheduler in virtual time, whose steps take what the cost model says over one
efficiency, that of all operations in the paper's table 2 together. Operations run one after the other. Requests
come by chance; lengths are lognormal with the paper's means and deviations.

Full steps take 199 ms, so the knee is the rate beyond which queues grow. That is read from a gang that gets more than
it can serve: tokens that its steps compute in a second, in the second third of the arrivals, over those of a request.
A knee by mean latency alone would depend on the trace's length, as a queue grows slowly. Latency, the time from a
request's arrival to its end over the tokens of its answer, is shown for a rate a little below.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from statistics import fmean

from motet.benchmarks.papers.nanoflow import A100, DEGREE, PUBLISHED
from motet.benchmarks.papers.pipeline import MEASURED_MS, NUM_ROWS, OPTIMUM
from motet.benchmarks.papers.policies import Continuous
from motet.benchmarks.papers.virtual_load import BLOCK_SIZE, Job, run
from motet.benchmarks.rigs.published_bases import published_base
from motet.benchmarks.scarce.page_reserve import LENGTHS, Lengths
from motet.workers.costs.device_costs import DeviceCosts
from motet.workers.costs.operations import Chunk, StepBatch, kv_bytes_of_a_token, model_size, step_operations
from motet.workers.plan import StepPlan

MODEL = published_base("Llama-2-70B")
EFFICIENCY = sum(row.milliseconds for row in PUBLISHED.values()) / sum(MEASURED_MS.values())
COSTS = DeviceCosts(MODEL, A100, DEGREE, EFFICIENCY, 25e9, 0)
PAGE_BYTES = BLOCK_SIZE * kv_bytes_of_a_token(MODEL)
NUM_PAGES = int((0.9 * A100.memory_bytes * DEGREE - model_size(MODEL).weights_bytes()) / PAGE_BYTES)
LOADS = {"Splitwise": Lengths((1155, 1109), (211, 163)), "LMSYS": LENGTHS["LMSYS"], "ShareGPT": LENGTHS["ShareGPT"]}
PUBLISHED_KNEES = {"Splitwise": (6.6, 8.2), "LMSYS": (17.1, 32.1), "ShareGPT": (10.5, 16.3)}  # TensorRT-LLM, NanoFlow
PUBLISHED_TOKENS_PER_S = {"Splitwise": 1259, "LMSYS": 1247, "ShareGPT": 1272}  # NanoFlow's, of a GPU, figure 7
ARRIVALS_S = 120.0
TOO_MUCH, NEARLY = 1.35, 0.95  # rates, over what the model says of full steps and over the knee


def jobs_of(load: str, number: int, rate: float) -> list[Job]:
    """`rate`: arrivals in a second."""
    chance, now_s, found = random.Random(7), 0.0, []
    for prompt, answer in LOADS[load].draw(number, seed=2):
        now_s += chance.expovariate(rate)
        found.append(Job(prompt, answer, now_s))
    return found


@dataclass(frozen=True)
class Served:
    """In the second third of the arrivals: before it the gang fills, and after it requests go on coming."""

    token_s: float  # mean seconds for each token of an answer, of the requests that come then
    rows_per_s: float


def served(load: str, rate: float, arrivals_s: float = ARRIVALS_S) -> Served:
    begins_s, ends_s = arrivals_s / 3, arrivals_s * 2 / 3
    now_s, rows, taken_s = 0.0, 0, 0.0

    def step_s(plan: StepPlan) -> float:
        nonlocal now_s, rows, taken_s
        step_s = COSTS.step_s(plan)
        if begins_s <= now_s < ends_s:
            rows, taken_s = rows + sum(len(part.token_ids) for part in plan.sequences), taken_s + step_s
        now_s += step_s
        return step_s

    jobs = jobs_of(load, max(1, round(rate * arrivals_s)), rate)
    outcome = run(jobs, Continuous(), NUM_PAGES, NUM_ROWS, NUM_ROWS, step_s=step_s)
    come = [took_s for job, took_s in outcome.token_s.items() if begins_s <= job.arrives_s < ends_s]
    return Served(fmean(come), rows / taken_s)


def full_tokens_per_s(load: str) -> float:
    """Of a gang whose steps have 2,048 rows: prompts included."""
    (prompt, _), (answer, _) = LOADS[load].prompt, LOADS[load].answer
    num_decodes = round(NUM_ROWS * answer / (prompt + answer))
    contexts, num_prompts = (round(prompt + answer / 2),) * num_decodes, (NUM_ROWS - num_decodes) / prompt
    chunks = (Chunk(0, round(prompt)),) * int(num_prompts)
    rest = NUM_ROWS - num_decodes - sum(chunk.num_tokens for chunk in chunks)
    batch = StepBatch(contexts, (*chunks, Chunk(0, rest)) if rest else chunks)
    return NUM_ROWS / sum(one.seconds(A100, DEGREE) for one in step_operations(MODEL, batch, DEGREE)) * EFFICIENCY


def knee(load: str, arrivals_s: float = ARRIVALS_S) -> float:
    """Requests a second beyond which the queue grows."""
    too_much = TOO_MUCH * full_tokens_per_s(load) / tokens_of(load)
    return served(load, too_much, arrivals_s).rows_per_s / tokens_of(load)


def tokens_of(load: str) -> float:
    """Of a request's prompt and answer, on average."""
    return LOADS[load].prompt[0] + LOADS[load].answer[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arrivals-s", type=float, default=ARRIVALS_S, help="of virtual time (default 120)")
    arrivals_s = parser.parse_args().arrivals_s
    print(f"efficiency {EFFICIENCY:.3f}, {NUM_PAGES} pages of {BLOCK_SIZE}; requests/s")
    print(f"{'':10} {'ours':>5} {'ms a token at 0.95':>18} {'TensorRT-LLM':>12} {'NanoFlow':>8} | tokens/s of a GPU")
    found, token_ms, tokens = dict[str, float](), dict[str, float](), dict[str, float]()
    for load, (tensorrt, nanoflow) in PUBLISHED_KNEES.items():
        found[load] = knee(load, arrivals_s)
        token_ms[load] = 1e3 * served(load, NEARLY * found[load], arrivals_s).token_s
        tokens[load] = found[load] * tokens_of(load) / DEGREE
        print(
            f"{load:10} {found[load]:5.1f} {token_ms[load]:18.0f} {tensorrt:12} {nanoflow:8} | {tokens[load]:.0f} "
            f"{PUBLISHED_TOKENS_PER_S[load]}, {tokens[load] / OPTIMUM:.3f} of the optimum",
            flush=True,
        )
    summary = {
        "requests_per_s": {load: round(rate, 2) for load, rate in found.items()},
        "over_nanoflow": {load: round(rate / PUBLISHED_KNEES[load][1], 3) for load, rate in found.items()},
        "token_ms_at_0.95": {load: round(each, 1) for load, each in token_ms.items()},
        "tokens_per_s": {load: round(each) for load, each in tokens.items()},
        "tokens_over_nanoflow": {load: round(each / PUBLISHED_TOKENS_PER_S[load], 3) for load, each in tokens.items()},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
