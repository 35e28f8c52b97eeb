"""What KV of eight bits loses beside KV in bfloat16, by the plain twins of its kernels, on a CPU.

First attention alone: one row over 1,024 tokens of normal random numbers, against the same in float64. Then the demo
base: greedy answers to prompts of random tokens, and log-probabilities up to the first token that differs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest import mock

import torch

from motet.cluster.config import MotetConfig
from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import plain_kernels
from motet.kernels.float8_kv import SCALE_BYTES, float8_view
from motet.kernels.plain import attention, float8_kv
from motet.workers import worker_builder
from motet.workers.config import EngineConfig, KVDtype
from motet.workers.engine_builder import build_engine
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit, TokenLogprobs

BASE: Final = Path(__file__).resolve().parents[1] / "examples" / "demo" / "base"
BLOCK, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_KEYS = 16, 32, 8, 128, 1024
NUM_PROMPTS, NUM_TOKENS, TOP = 24, 32, 5
Answer = list[tuple[int, TokenLogprobs]]


def attention_errors() -> dict[str, float]:
    """Norm of what is wrong over the norm of what is right."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(NUM_KEYS, NUM_KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    q = torch.randn(1, NUM_HEADS, HEAD_DIM, generator=generator)
    num_pages, scale = NUM_KEYS // BLOCK, HEAD_DIM**-0.5

    def batch(first: int) -> AttentionBatch:
        """Rows from this position on, of one sequence."""
        positions = torch.arange(first, NUM_KEYS)
        return AttentionBatch(
            (0, NUM_KEYS - first),
            (NUM_KEYS,),
            torch.arange(num_pages, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            num_pages,
            positions,
            positions // BLOCK,
            positions % BLOCK,
        )

    def attend(dtype: torch.dtype) -> torch.Tensor:
        paged = [x.to(dtype).view(num_pages, BLOCK, NUM_KV_HEADS, HEAD_DIM) for x in (k, v)]
        return attention.paged_attention(q.to(dtype), torch.stack(paged, 1), batch(NUM_KEYS - 1), scale, None)

    slab = 2 * BLOCK * NUM_KV_HEADS * (HEAD_DIM + SCALE_BYTES) // torch.bfloat16.itemsize
    kv = float8_view(torch.zeros(num_pages, slab, dtype=torch.bfloat16), BLOCK, NUM_KV_HEADS, HEAD_DIM)
    unturned = torch.stack((torch.ones(NUM_KEYS, HEAD_DIM // 2), torch.zeros(NUM_KEYS, HEAD_DIM // 2)), 1)
    float8_kv.write_kv(q.expand(NUM_KEYS, -1, -1), k.bfloat16(), v.bfloat16(), unturned, kv, batch(0))
    of_float8 = float8_kv.paged_attention(q.bfloat16(), kv, batch(NUM_KEYS - 1), scale, None)
    right = attend(torch.float64)
    found = {"bfloat16": attend(torch.bfloat16), "float8": of_float8}
    return {name: float((x.double() - right).norm() / right.norm()) for name, x in found.items()}


def answers(config: EngineConfig, kv_dtype: KVDtype) -> list[Answer]:
    """Of the demo base, with the twins, which a CPU is else refused."""
    rng = random.Random(1)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(worker_builder, "check_kv_dtype"))
        patches.enter_context(mock.patch.object(worker_builder, "choose_kernels", return_value=plain_kernels()))
        engine = build_engine(replace(config, kv_dtype=kv_dtype))
    for number in range(NUM_PROMPTS):
        prompt = [rng.randrange(4, 500) for _ in range(rng.randrange(40, 200))]
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=TOP)
        engine.receive(
            Submit(SequenceRequest(sequence_id=number, prompt_token_ids=prompt, sampling=sampling, tenant="benchmark"))
        )
    found: list[Answer] = [[] for _ in range(NUM_PROMPTS)]
    while engine.has_work():
        for update in engine.step():
            assert update.error is None, update.error
            found[update.sequence_id] += zip(update.token_ids, update.logprobs or (), strict=True)
    engine.close()
    return found


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    errors = attention_errors()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        config = MotetConfig.of(
            model_path=BASE, data_dir=Path(folder), dtype="bfloat16", pool_bytes=64 << 20, device="cpu"
        )
        config.engine.store_path.mkdir(parents=True, exist_ok=True)
        pairs = list(zip(answers(config.engine, "dtype"), answers(config.engine, "float8"), strict=True))
    num_before, differences = 0, list[float]()
    for one, other in pairs:
        num_alike = next((i for i in range(NUM_TOKENS) if one[i][0] != other[i][0]), NUM_TOKENS)
        num_before += num_alike
        for (_, here), (_, there) in zip(one[: num_alike + 1], other, strict=False):
            known = dict(zip(there.top_ids, there.top_logprobs, strict=True))
            both = [
                (x, known[token]) for token, x in zip(here.top_ids, here.top_logprobs, strict=True) if token in known
            ]
            differences += [abs(x - y) for x, y in both]
    num_equal = sum([t for t, _ in one] == [t for t, _ in other] for one, other in pairs)
    p99 = statistics.quantiles(differences, n=100)[98]
    print("attention, relative error: " + ", ".join(f"{name} {error:.4f}" for name, error in errors.items()))
    print(
        f"{num_equal} of {NUM_PROMPTS} answers are equal, {num_before} of {NUM_PROMPTS * NUM_TOKENS} tokens come before"
    )
    print(f"the first that differs; log-probabilities differ by {statistics.median(differences):.3f}, p99 {p99:.3f}")
    result = {
        "benchmark": "float8_kv",
        **{f"attention_error_{name}": round(error, 4) for name, error in errors.items()},
        "equal_answers": round(num_equal / NUM_PROMPTS, 3),
        "tokens_before_a_difference": round(num_before / NUM_PROMPTS / NUM_TOKENS, 3),
        "logprob_difference_p50": round(statistics.median(differences), 4),
        "logprob_difference_p99": round(p99, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
