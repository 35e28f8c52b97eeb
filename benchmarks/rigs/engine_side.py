"""motet's side of the engine benchmarks: a store filled as uploads fill it, and an engine in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.store.store import AdapterStore
from motet.benchmarks.rigs.workload import Job
from motet.cluster.config import MotetConfig
from motet.workers.engine_builder import build_engine
from motet.workers.models.config import ModelConfig
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest, Submit

BLOCK_SIZE = 16
POOL_BYTES = 2 << 30  # 64 adapters of ranks 8 to 64 take 1.2 GB of it


@dataclass(frozen=True)
class EngineRun:
    num_output_tokens: int
    wall_s: float
    cpu_s: float


def fill_store(root: Path, model_path: Path, adapters: Sequence[Path]) -> list[AdapterRef]:
    """Validates, stores and packs PEFT folders for bfloat16."""
    model, store = ModelConfig.from_folder(model_path), AdapterStore(root)
    layout = AdapterLayout(model.shape, model.slab(BLOCK_SIZE), "bfloat16")
    refs = []
    for folder in adapters:
        config = (folder / "adapter_config.json").read_bytes()
        content = validate(config, folder / "adapter_model.safetensors", model.shape)
        store.put(content, [layout])
        refs.append(AdapterRef(content.digest, content.module_ranks, content.invocation_token_ids))
    return refs


class EngineSide:
    """An engine with every adapter in its pool, as the baseline has every adapter in its modules."""

    def __init__(self, model_path: Path, store_path: Path, refs: Sequence[AdapterRef], num_threads: int) -> None:
        self._refs = refs
        self._next_id = 0
        self._engine = build_engine(
            MotetConfig.of(
                model_path=model_path,
                data_dir=store_path.parent,
                dtype="bfloat16",
                pool_bytes=POOL_BYTES,
                block_size=BLOCK_SIZE,
                num_threads=num_threads,
                prefix_cache=False,  # rounds ask the same again
            ).engine
        )
        self.run([Job([1, 2, 3], 2, adapter) for adapter in [None, *range(len(refs))]])

    def run(self, jobs: Sequence[Job]) -> EngineRun:
        """Submits all jobs at once and runs steps to the end. Raises RuntimeError if a job is not answered in full."""
        wanted = {}
        started, cpu_started = time.perf_counter(), time.process_time()
        for job in jobs:
            wanted[self._next_id] = job.num_output_tokens
            self._submit(job)
        while self._engine.has_work():
            for update in self._engine.step():
                if update.error is not None:
                    raise RuntimeError(update.error.message)
                wanted[update.sequence_id] -= len(update.token_ids)
            if self._engine.waits:
                time.sleep(0.001)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        if any(wanted.values()):
            raise RuntimeError("the engine made too few or too many tokens")
        return EngineRun(sum(job.num_output_tokens for job in jobs), wall_s, cpu_s)

    def close(self) -> None:
        self._engine.close()

    def _submit(self, job: Job) -> None:
        self._engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=self._next_id,
                    prompt_token_ids=job.prompt_token_ids,
                    sampling=SamplingParams(max_tokens=job.num_output_tokens, temperature=0.0, ignore_eos=True),
                    tenant="benchmark",
                    adapter=None if job.adapter is None else self._refs[job.adapter],
                )
            )
        )
        self._next_id += 1
