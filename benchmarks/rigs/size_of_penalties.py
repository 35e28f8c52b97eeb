"""What penalties cost a step, with a model of SmolLM2-135M's shape and 128 sequences at 8,000 tokens."""

from __future__ import annotations

import random
import time
from pathlib import Path

from motet.benchmarks.rigs import random_model
from motet.cluster.config import MotetConfig
from motet.workers.engine_builder import build_engine
from motet.workers.wire.messages import Cancel, SamplingParams, SequenceRequest, Submit

NUM_SEQUENCES = 128
NUM_PROMPT = 8000
_NUM_STEPS = 6  # of each measurement
_NUM_RUNS = 2
_KINDS = {
    "plain": SamplingParams(temperature=0.0, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0.0, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1
    ),
}


class DecodingEngine:
    """A real engine. All sequences begin with one document, whose pages they share: 128 own ones would not fit here."""

    def __init__(self, folder: Path) -> None:
        model_path = random_model.write_model(folder / "model")
        config = MotetConfig.of(
            model_path=model_path,
            data_dir=folder,
            dtype="bfloat16",
            pool_bytes=1 << 30,
            block_size=16,
            num_threads=1,
            max_num_sequences=NUM_SEQUENCES,
        )
        self._engine = build_engine(config.engine)
        draw = random.Random(0)
        self._document = [draw.randrange(1, random_model.VOCAB_SIZE) for _ in range(NUM_PROMPT)]
        self._next_id = 0

    def steps_ms(self) -> dict[str, float]:
        """CPU milliseconds of a step, all threads together, by kind of sampling; the least of the runs in turn."""
        runs: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        for _ in range(_NUM_RUNS):
            for kind, sampling in _KINDS.items():
                runs[kind].append(self._step_ms(sampling))
        return {kind: min(times) for kind, times in runs.items()}

    def close(self) -> None:
        self._engine.close()

    def _step_ms(self, sampling: SamplingParams) -> float:
        ids = range(self._next_id, self._next_id + NUM_SEQUENCES)
        self._next_id += NUM_SEQUENCES
        for sequence_id in ids:
            prompt = [*self._document, 1 + sequence_id % (random_model.VOCAB_SIZE - 1)]
            request = SequenceRequest(
                sequence_id=sequence_id, prompt_token_ids=prompt, sampling=sampling, tenant="scale"
            )
            self._engine.receive(Submit(request))
        decoding: set[int] = set()
        while len(decoding) < NUM_SEQUENCES:
            for update in self._engine.step():
                assert update.error is None, update.error
                decoding.add(update.sequence_id)
        began_s = time.process_time()
        for _ in range(_NUM_STEPS):
            self._engine.step()
        spent_s = time.process_time() - began_s
        for sequence_id in ids:
            self._engine.receive(Cancel(sequence_id))
        self._engine.step()
        return spent_s / _NUM_STEPS * 1e3
