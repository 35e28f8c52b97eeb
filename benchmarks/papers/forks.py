"""What one beam search costs a gang: tokens computed, steps, requests and bytes, against what forks need.

Forks need the prompt once, and then `width` tokens for each round but the first, which is the prompt's last token. The
real engine computes the demo's base, on the CPU; the router's side is the real one too. Samples of one prompt (`n`) are
beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from motet.router.generation.beam_streams import BeamRun
from motet.tests.rigs.engine_dispatcher import EngineDispatcher
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

BASE = Path(__file__).parents[2] / "examples/demo/base"
NUM_TOKENS = 40  # of each beam and sample


class Cost(NamedTuple):
    num_requests: int
    num_tokens: int  # computed
    num_steps: int
    num_sent_bytes: int  # to the gang


async def search(rig: EngineRig, prompt: list[int], width: int) -> Cost:
    dispatcher = EngineDispatcher(rig)
    before = rig.engine.load().counters
    request = SequenceRequest(prompt_token_ids=prompt, sampling=SamplingParams(), tenant="acme")
    run = BeamRun(dispatcher, request, BeamRules(width, NUM_TOKENS, frozenset()), lambda _: False, lambda _: None)
    for stream in run.streams():
        async for update in stream:
            assert update.error is None, update.error
    return _cost(rig, before, dispatcher.requests)


async def samples(rig: EngineRig, prompt: list[int], num: int) -> Cost:
    dispatcher = EngineDispatcher(rig)
    before = rig.engine.load().counters
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    request = SequenceRequest(prompt_token_ids=prompt, sampling=sampling, tenant="acme")
    for stream in [dispatcher.submit(request) for _ in range(num)]:
        async for update in stream:
            assert update.error is None, update.error
    return _cost(rig, before, dispatcher.requests)


def _cost(rig: EngineRig, before: object, requests: list[SequenceRequest]) -> Cost:
    after = rig.engine.load().counters
    return Cost(
        len(requests),
        after.num_computed_tokens - before.num_computed_tokens,  # type: ignore[attr-defined]
        after.num_steps - before.num_steps,  # type: ignore[attr-defined]
        sum(len(msgspec.msgpack.encode(Submit(request))) for request in requests),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[30, 100, 300, 460], metavar="TOKENS")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst = {"beams": 0.0, "samples": 0.0}
    most_steps = most_requests = 0
    print(f"{'':8}  prompt  width  requests  bytes sent  steps  tokens  forks need  ratio")
    with tempfile.TemporaryDirectory() as folder:
        stock = Stock.make(BASE, {}, Path(folder) / "store", block_size=16)
        for num_prompt in options.prompts:
            for width in options.widths:
                for name, requested in (("beams", search), ("samples", samples)):
                    prompt = [random.Random(num_prompt * width).randrange(10, 400) for _ in range(num_prompt)]
                    with stock.engine(1200, max_num_sequences=64, num_threads=1, kv_host_bytes=0) as rig:
                        cost = asyncio.run(requested(rig, prompt, width))
                    need = num_prompt + width * (NUM_TOKENS - 1)
                    ratio = cost.num_tokens / need
                    worst[name] = max(worst[name], ratio)
                    if name == "beams":
                        most_steps, most_requests = (
                            max(most_steps, cost.num_steps),
                            max(most_requests, cost.num_requests),
                        )
                    print(
                        f"{name:8}  {num_prompt:6}  {width:5}  {cost.num_requests:8}  {cost.num_sent_bytes:10}"
                        f"  {cost.num_steps:5}  {cost.num_tokens:6}  {need:10}  {ratio:5.3f}"
                    )
    summary = {
        "tokens_over_forks": round(worst["beams"], 3),
        "samples_over_forks": round(worst["samples"], 3),
        "steps_over_length": round(most_steps / NUM_TOKENS, 3),
        "requests": most_requests,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
