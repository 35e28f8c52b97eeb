"""What grammars cost an engine: 64 sequences whose answers follow a schema against 64 free ones, and a schema's wait.

Both loads have the same prompts and lengths, and run in turn. Prompts fill each step whatever time that takes
(`token_interval_s` 0): otherwise how many steps a load has follows from how long its steps happen to take, and loads
differ by half for no other reason. A new schema of 20 KB is one that the engine has not
seen: its first token comes later than that of the same prompt without one by `new_schema_ms`, in the median. The
engine is idle otherwise. The model has SmolLM2-135M's shape and random weights.

`hostile_neighbour_p99_ratio` is of a `motet serve` of the demo model: how many times as long first tokens of one tenant
take while another one asks for hostile forms of answers (`benchmarks/hostile.py --parts grammars`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from motet.benchmarks.hostile_parts.grammars import grammars
from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.trained_tokenizer import write_tokenizer
from motet.benchmarks.rigs.workload import draw_jobs
from motet.cluster.config import MotetConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.wire.engine_load import EngineCounters
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

_NUM_FIELDS = 150  # of a schema, which takes 20 KB with them


def schema(number: int) -> str:
    """A grammar of 20 KB, unlike that of any other number. Its answers are longer than any job's."""
    kinds = (
        {"type": "string"},
        {"type": "integer"},
        {"type": "array", "items": {"type": "number"}},
        {"type": "boolean"},
    )
    fields = {
        f"field_{number}_{index}": {"description": "what this field is for, in words " * 2, **kinds[index % len(kinds)]}
        for index in range(_NUM_FIELDS)
    }
    whole = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return "start: %json " + json.dumps(whole)


class Run:
    """Submits sequences to one engine, and times them."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._engine, self._num_tokens, self._next_id = engine, num_tokens, 0
        self._prompts = [job.prompt_token_ids for job in draw_jobs(64, [None], random_model.VOCAB_SIZE)]

    def all_s(self, grammars: Iterable[str]) -> float:
        """Seconds until as many sequences as there are grammars have all of their tokens; "" is free."""
        began_at = time.perf_counter()
        num = self._submit(grammars, self._num_tokens)
        assert self._finish() == num * self._num_tokens, "an answer ended before its length"
        return time.perf_counter() - began_at

    @property
    def counters(self) -> EngineCounters:
        """Since the start."""
        return self._engine.load().counters

    def first_token_s(self, grammar: str) -> float:
        return self._timed([grammar], 1)

    def _timed(self, grammars: Iterable[str], num_tokens: int) -> float:
        began_at = time.perf_counter()
        self._submit(grammars, num_tokens)
        self._finish()
        return time.perf_counter() - began_at

    def _submit(self, grammars: Iterable[str], num_tokens: int) -> int:
        first = self._next_id
        for prompt, grammar in zip(self._prompts, grammars, strict=False):
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, grammar=grammar)
            request = SequenceRequest(
                sequence_id=self._next_id, prompt_token_ids=prompt, sampling=sampling, tenant="benchmark"
            )
            self._engine.receive(Submit(request))
            self._next_id += 1
        return self._next_id - first

    def _finish(self) -> int:
        num_tokens = 0
        while self._engine.has_work():
            for update in self._engine.step():
                if update.error is not None:
                    raise RuntimeError(update.error.message)
                num_tokens += len(update.token_ids)
            if self._engine.waits:
                time.sleep(0.0005)
        return num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default 32)")
    parser.add_argument("--repetitions", type=int, default=3, help="of both loads (default 3)")
    parser.add_argument("--schemas", type=int, default=9, help="new ones (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default 1)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of hostile forms of answers (default 20)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = write_tokenizer(random_model.write_model(Path(folder) / "model"))
        config = MotetConfig.of(
            model_path=model_path,
            data_dir=Path(folder),
            dtype="bfloat16",
            pool_bytes=1 << 30,
            num_threads=arguments.threads,
            prefix_cache=False,
            token_interval_s=0.0,
        ).engine
        engine = build_engine(config)
        try:
            figures = _report(*_measure(Run(engine, arguments.tokens), arguments.repetitions, arguments.schemas))
        finally:
            engine.close()
    figures["hostile_neighbour_p99_ratio"] = asyncio.run(grammars(arguments.seconds))["grammars_p99_ratio"]
    print(json.dumps(figures))


def _measure(run: Run, repetitions: int, num_schemas: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds of all free sequences and of all that follow a schema; of first tokens without and with a new schema."""
    free, constrained, without, new = list[float](), list[float](), list[float](), list[float]()
    run.first_token_s(schema(0))  # the tokenizer is read, and the process starts that checks grammars
    for _ in range(repetitions):
        at_start = run.counters
        free.append(run.all_s([""] * 64))
        half_way = run.counters
        constrained.append(run.all_s([schema(0)] * 64))
        at_end = run.counters
        num_free, num_constrained = half_way.num_steps - at_start.num_steps, at_end.num_steps - half_way.num_steps
        num_late = at_end.num_late_masks - half_way.num_late_masks
        print(
            f"{num_free} steps with free sequences; {num_constrained} with a schema, {num_late} late masks", flush=True
        )
    for number in range(1, num_schemas + 1):
        without.append(run.first_token_s(""))
        new.append(run.first_token_s(schema(number)))
    return free, constrained, without, new


def _report(
    free: list[float], constrained: list[float], without: list[float], new: list[float]
) -> dict[str, str | float]:
    print(f"64 free: {min(free):.2f} s; 64 with a schema of {len(schema(0)) >> 10} KB: {min(constrained):.2f} s")
    waits = [1000 * (with_one - alone) for with_one, alone in zip(new, without, strict=True)]
    print(f"a new schema's first token: later by {statistics.median(waits):.1f} ms, at most {max(waits):.1f} ms")
    figures: dict[str, str | float] = {"benchmark": "structured"}
    figures["throughput_ratio_64"] = round(min(free) / min(constrained), 3)
    figures["new_schema_ms"] = round(statistics.median(waits), 1)
    return figures


if __name__ == "__main__":
    main()
