"""NanoFlow (arXiv 2408.12757 §6.2, 6.3): how many requests a second a gang serves within 200 ms for each token.

Llama-2-70B on eight A100 80GB: motet's scheduler in virtual time, whose steps take what the cost model says over one
efficiency, that of all operations in the paper's table 2 together. Operations run one after the other. Requests
come by chance; lengths are lognormal with the paper's means and deviations. A request's latency is the time from its
arrival to its end over the tokens of its answer, and the knee is the rate where the mean of them reaches 200 ms, in the
second third of the arrivals. Queues grow slowly, so that is above the rate that full steps sustain, which is computed.
"""

from __future__ import annotations

import argparse
import json
import random
from statistics import fmean

from motet.benchmarks.papers.nanoflow import A100, DEGREE, PUBLISHED
from motet.benchmarks.papers.pipeline import MEASURED_MS, NUM_ROWS, OPTIMUM
from motet.benchmarks.papers.policies import Continuous
from motet.benchmarks.papers.virtual_load import BLOCK_SIZE, Job, run
from motet.benchmarks.rigs.published_bases import published_base
from motet.benchmarks.scarce.page_reserve import LENGTHS, Lengths
from motet.workers.costs.device_costs import DeviceCosts
from motet.workers.costs.model_size import kv_bytes_of_a_token, model_size
from motet.workers.costs.operations import Batch, Chunk, step_operations

MODEL = published_base("Llama-2-70B")
EFFICIENCY = sum(row.milliseconds for row in PUBLISHED.values()) / sum(MEASURED_MS.values())
COSTS = DeviceCosts(MODEL, A100, DEGREE, EFFICIENCY, 25e9, 0)
PAGE_BYTES = BLOCK_SIZE * kv_bytes_of_a_token(MODEL)
NUM_PAGES = int((0.9 * A100.memory_bytes * DEGREE - model_size(MODEL).weights_bytes()) / PAGE_BYTES)
LOADS = {"Splitwise": Lengths((1155, 1109), (211, 163)), "LMSYS": LENGTHS["LMSYS"], "ShareGPT": LENGTHS["ShareGPT"]}
PUBLISHED_KNEES = {"Splitwise": (6.6, 8.2), "LMSYS": (17.1, 32.1), "ShareGPT": (10.5, 16.3)}  # TensorRT-LLM, NanoFlow
PUBLISHED_TOKENS_PER_S = {"Splitwise": 1259, "LMSYS": 1247, "ShareGPT": 1272}  # NanoFlow's, of a GPU, figure 7
TOKEN_S = 0.2
ARRIVALS_S = 180.0


def jobs_of(load: str, number: int, rate: float) -> list[Job]:
    """`rate`: arrivals in a second."""
    chance, now_s, found = random.Random(7), 0.0, []
    for prompt, answer in LOADS[load].draw(number, seed=2):
        now_s += chance.expovariate(rate)
        found.append(Job(prompt, answer, now_s))
    return found


def token_s(load: str, rate: float, arrivals_s: float = ARRIVALS_S) -> float:
    """Mean seconds for each token of an answer, of the requests that come in the second third.

    Before it the gang fills, and after it requests go on coming while most of these are answered.
    """
    jobs = jobs_of(load, max(1, round(rate * arrivals_s)), rate)
    outcome = run(jobs, Continuous(), NUM_PAGES, NUM_ROWS, NUM_ROWS, step_s=COSTS.step_s)
    return fmean(
        took_s for job, took_s in outcome.token_s.items() if arrivals_s / 3 <= job.arrives_s < arrivals_s * 2 / 3
    )


def full_tokens_per_s(load: str) -> float:
    """Of a gang whose steps have 2,048 rows: prompts included."""
    (prompt, _), (answer, _) = LOADS[load].prompt, LOADS[load].answer
    num_decodes = round(NUM_ROWS * answer / (prompt + answer))
    contexts, num_prompts = (round(prompt + answer / 2),) * num_decodes, (NUM_ROWS - num_decodes) / prompt
    chunks = (Chunk(0, round(prompt)),) * int(num_prompts)
    rest = NUM_ROWS - num_decodes - sum(chunk.num_tokens for chunk in chunks)
    batch = Batch(contexts, (*chunks, Chunk(0, rest)) if rest else chunks)
    return NUM_ROWS / sum(one.seconds(A100, DEGREE) for one in step_operations(MODEL, batch, DEGREE)) * EFFICIENCY


def sustained(load: str) -> float:
    """Requests a second of a gang whose steps are full."""
    return full_tokens_per_s(load) / (LOADS[load].prompt[0] + LOADS[load].answer[0])


def knee(load: str, arrivals_s: float = ARRIVALS_S) -> float:
    """Requests a second, interpolated between two rates whose latencies lie on both sides of the objective.

    A step takes a fixed time and more for each row, of which there are more the longer it takes: the inverse of the
    latency falls on a line as the rate grows.
    """
    below, above = 1.05 * sustained(load), 1.35 * sustained(load)
    speeds = [1 / token_s(load, rate, arrivals_s) for rate in (below, above)]
    while speeds[0] <= 1 / TOKEN_S:
        above, below = below, 0.8 * below
        speeds = [1 / token_s(load, below, arrivals_s), speeds[0]]
    while speeds[1] > 1 / TOKEN_S:
        below, above = above, 1.25 * above
        speeds = [speeds[1], 1 / token_s(load, above, arrivals_s)]
    return below + (above - below) * (speeds[0] - 1 / TOKEN_S) / (speeds[0] - speeds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arrivals-s", type=float, default=ARRIVALS_S, help="of virtual time (default 180)")
    arguments = parser.parse_args()
    print(f"efficiency {EFFICIENCY:.3f}, {NUM_PAGES} pages of {BLOCK_SIZE}; requests/s at {TOKEN_S} s a token")
    print(
        f"{'':10} {'ours':>6} {'sustained':>9} {'TensorRT-LLM':>12} {'NanoFlow':>8}; tokens/s of a GPU whose steps are "
        "full, NanoFlow's"
    )
    found, full = {}, {}
    for load, (tensorrt, nanoflow) in PUBLISHED_KNEES.items():
        found[load], full[load] = knee(load, arguments.arrivals_s), full_tokens_per_s(load) / DEGREE
        print(
            f"{load:10} {found[load]:6.1f} {sustained(load):9.1f} {tensorrt:12} {nanoflow:8}; {full[load]:6.0f} "
            f"{PUBLISHED_TOKENS_PER_S[load]}"
            f", {full[load] / OPTIMUM:.3f} of the optimum",
            flush=True,
        )
    summary = {
        "requests_per_s": {load: round(rate, 2) for load, rate in found.items()},
        "over_nanoflow": {load: round(rate / PUBLISHED_KNEES[load][1], 3) for load, rate in found.items()},
        "sustained_over_nanoflow": {load: round(sustained(load) / PUBLISHED_KNEES[load][1], 3) for load in found},
        "tokens_per_s": {load: round(rate) for load, rate in full.items()},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
