"""What embeddings and the scores of prompts cost an engine, against the same prompts computed for one token each.

All have the same prompts without a prefix in common, and run in turn on one engine; figures are medians. `neighbour` is
of a sequence of another tenant that decodes beside them: how many times as long the longest of its waits for a token is
as beside plain prompts. The model has SmolLM2-135M's shape and random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.trained_tokenizer import write_tokenizer
from motet.cluster.config import MotetConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.wire.messages import Cancel, SamplingParams, SequenceRequest, Submit

PLAIN: Final = "prefill"
KINDS: Final[Mapping[str, SamplingParams]] = MappingProxyType(
    {
        PLAIN: SamplingParams(max_tokens=1, temperature=0.0),
        "embedding_last": SamplingParams(max_tokens=0, pooling="last"),
        "embedding_mean": SamplingParams(max_tokens=0, pooling="mean"),
        "scores": SamplingParams(max_tokens=0, num_prompt_logprobs=0),
        "scores_top_20": SamplingParams(max_tokens=0, num_prompt_logprobs=20),
    }
)


class Load:
    """Prompts of one tenant, and a sequence of another one that decodes meanwhile."""

    def __init__(self, engine: Engine, num_prompts: int, num_tokens: int) -> None:
        self._engine, self._next_id = engine, 0
        self._num_prompts, self._num_tokens = num_prompts, num_tokens
        self._generator = random.Random(3)

    def run(self, sampling: SamplingParams) -> tuple[float, float]:
        """Seconds until all prompts have ended, and the longest that the neighbour waited for a token."""
        neighbour = self._submit("neighbour", 16, SamplingParams(max_tokens=4000, ignore_eos=True))
        self._engine.step()
        began_at = time.perf_counter()
        left = {self._submit("benchmark", self._num_tokens, sampling) for _ in range(self._num_prompts)}
        last_at, longest_s = began_at, 0.0
        while left:
            for update in self._engine.step():
                if update.error is not None:
                    raise RuntimeError(update.error.message)
                if update.sequence_id == neighbour and update.token_ids:
                    now = time.perf_counter()
                    longest_s, last_at = max(longest_s, now - last_at), now
                elif update.finish_reason is not None:
                    left.discard(update.sequence_id)
        took_s = time.perf_counter() - began_at
        self._engine.receive(Cancel(neighbour))
        while self._engine.has_work():
            self._engine.step()
        return took_s, longest_s

    def _submit(self, tenant: str, num_tokens: int, sampling: SamplingParams) -> int:
        self._next_id += 1
        prompt = self._generator.choices(range(1, random_model.VOCAB_SIZE), k=num_tokens)
        self._engine.receive(
            Submit(
                SequenceRequest(sequence_id=self._next_id, prompt_token_ids=prompt, sampling=sampling, tenant=tenant)
            )
        )
        return self._next_id


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="at once (default 16)")
    parser.add_argument("--tokens", type=int, default=256, help="of each (default 256)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each kind (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        config = MotetConfig.of(
            model_path=write_tokenizer(random_model.write_model(Path(folder) / "model")),
            data_dir=Path(folder),
            dtype="bfloat16",
            pool_bytes=1 << 30,
            num_threads=arguments.threads,
        ).engine
        engine = build_engine(config)
        try:
            load = Load(engine, arguments.prompts, arguments.tokens)
            load.run(KINDS[PLAIN])
            runs = [{kind: load.run(KINDS[kind]) for kind in KINDS} for _ in range(arguments.repetitions)]
        finally:
            engine.close()
    took = {kind: statistics.median(run[kind][0] for run in runs) for kind in KINDS}
    waits = {kind: statistics.median(run[kind][1] for run in runs) for kind in KINDS}
    for kind in KINDS:
        print(f"{kind:15} {took[kind]:.2f} s, the neighbour's longest wait {1000 * waits[kind]:.0f} ms")
    others = [kind for kind in KINDS if kind != PLAIN]
    figures = {f"{kind}_ratio": round(took[kind] / took[PLAIN], 2) for kind in others}
    figures |= {f"{kind}_neighbour": round(waits[kind] / waits[PLAIN], 2) for kind in others}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
