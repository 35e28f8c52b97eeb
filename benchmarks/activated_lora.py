"""Turns of activated LoRA (aLoRA) and of plain LoRA after a conversation with the base: tokens computed, first tokens.

A real engine in this process with SmolLM2-135M's shape (bfloat16, pages of 16 tokens). The base answers a prompt, then
one adapter has a turn, then another one, then the base again; each turn repeats what was said and adds 16 tokens. Each
round has other tokens, and the same turns with adapters that compute all of their prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE, fill_store
from motet.cluster.config import MotetConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest, Submit

INVOCATION, NUM_NEW = (7, 8, 9), 16
TURNS = ("base", "first", "second", "base again")


@dataclass(frozen=True)
class Turn:
    first_token_s: float
    num_cached: int


class Conversations:
    """One engine, of which each conversation begins with tokens that were never said before."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._chance, self._num_asked = engine, random.Random(seed), 0

    def hold(self, num_tokens: int, num_answered: int, refs: list[AdapterRef | None]) -> list[Turn]:
        """One turn of each of `refs`, after one of the base."""
        said, turns = self._tokens(num_tokens), list[Turn]()
        for ref in (None, *refs):
            prompt = said + ([*INVOCATION, *self._tokens(NUM_NEW - len(INVOCATION))] if turns else [])
            answer, turn = self._ask(prompt, ref, num_answered)
            turns.append(turn)
            said += [] if len(turns) > 1 else answer
        return turns

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(10, random_model.VOCAB_SIZE), k=count)

    def _ask(self, prompt: list[int], ref: AdapterRef | None, num_tokens: int) -> tuple[list[int], Turn]:
        self._num_asked += 1
        before, answer, first_token_s = self._engine.load().counters.num_cached_tokens, list[int](), 0.0
        began = time.perf_counter()
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = SequenceRequest(
            sequence_id=self._num_asked, prompt_token_ids=prompt, sampling=sampling, tenant="benchmark", adapter=ref
        )
        self._engine.receive(Submit(request))
        while self._engine.has_work():
            for update in self._engine.step():
                if update.token_ids and not answer:
                    first_token_s = time.perf_counter() - began
                answer += update.token_ids
        return answer, Turn(first_token_s, self._engine.load().counters.num_cached_tokens - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the base's conversation, its answer included")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        adapters = random_model.write_adapters(Path(folder) / "adapters", 2)
        plain = fill_store(Path(folder) / "data" / "store", model_path, adapters)
        activated = [msgspec.structs.replace(ref, invocation_token_ids=INVOCATION) for ref in plain]
        config = MotetConfig.of(
            model_path=model_path,
            data_dir=Path(folder) / "data",
            dtype="bfloat16",
            pool_bytes=2 << 30,
            block_size=BLOCK_SIZE,
        )
        engine = build_engine(config.engine)
        conversations, rounds = Conversations(engine, seed=1), list[tuple[list[Turn], list[Turn]]]()
        conversations.hold(64, 1, [*plain])  # loads the adapters
        for _ in range(arguments.repetitions):
            with_plain = conversations.hold(arguments.tokens - 32, 32, [*plain, None])
            rounds.append((with_plain, conversations.hold(arguments.tokens - 32, 32, [*activated, None])))
        engine.close()
    result: dict[str, float] = {}
    for index, name in enumerate(TURNS):
        key = name.replace(" ", "_")
        ratio = statistics.median(own[index].first_token_s / other[index].first_token_s for other, own in rounds)
        cached = [min(turns[index].num_cached for turns in kinds) for kinds in zip(*rounds, strict=True)]
        result |= {f"{key}_first_token_over_plain": round(ratio, 3), f"{key}_cached": cached[1]}
        print(
            f"{name}: cached {cached[1]} tokens ({cached[0]} with plain LoRA), first token {ratio:.3f} of plain LoRA's"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
